"""RoPE in config.json, under every spelling in use, and what of it is refused."""

import json
from typing import Any

import pytest
from golden.cases import TABLES

from sparse_jax.config import ConfigError, ModelConfig, RopeConfig


def read(**fields: Any) -> ModelConfig:
    """A llama with these fields of config.json beside its sizes."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = dict.fromkeys(sizes, 64) | {"num_attention_heads": 4, "model_type": "llama"}
    return ModelConfig.from_hf({**config, **fields})


@pytest.mark.parametrize("name", TABLES)
def test_rope_survives_writing(name):
    ours = ModelConfig.from_hf(TABLES[name][1])
    assert ModelConfig.from_hf(json.loads(json.dumps(ours.to_hf()))) == ours


THETA = {"rope_theta": 5e5}
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, RopeConfig()),
        (THETA, RopeConfig(5e5)),
        ({"rope_scaling": None, "rope_parameters": None}, RopeConfig()),
        ({"rope_scaling": {}}, RopeConfig()),
        ({"rope_scaling": {"rope_type": "default", "factor": 1.0}}, RopeConfig()),
        ({"rope_parameters": {"rope_type": "default", **THETA}}, RopeConfig(5e5)),
        ({**THETA, "rope_scaling": LINEAR}, RopeConfig(5e5, "linear", 4.0)),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, RopeConfig(1e4, "linear", 4)),
        ({"rope_scaling": {**LINEAR, "type": "linear"}}, RopeConfig(1e4, "linear", 4.0)),
        ({"rope_scaling": {"type": "linear", "factor": 1}}, RopeConfig(1e4, "linear", 1)),
        ({**THETA, "rope_parameters": {**LINEAR, **THETA}}, RopeConfig(5e5, "linear", 4.0)),
        (
            {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, **THETA}},
            RopeConfig(5e5, "linear", 4.0),
        ),
        ({"rope_parameters": {"full_attention": LINEAR}}, RopeConfig(1e4, "linear", 4.0)),
        (
            {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": dict(LINEAR)}},
            RopeConfig(1e4, "linear", 4.0),
        ),
        ({"rope_scaling": LINEAR, "partial_rotary_factor": 1.0}, RopeConfig(1e4, "linear", 4.0)),
        # The original context: inside, outside, both alike, or the model's own.
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 64},
            RopeConfig(1e4, "yarn", 4.0, 64),
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": None, "beta_fast": None},
                "original_max_position_embeddings": 16,
                "max_position_embeddings": 64,
            },
            RopeConfig(1e4, "yarn", 4.0, 16),
        ),
    ],
)
def test_rope_spellings(fields, expected):
    assert read(**fields).rope == expected


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "longrope", "factor": 4.0}, "rope_type .*'longrope'"),
        ({"type": "mrope", "mrope_section": [1]}, "'mrope'"),
        ({"type": "linear", "rope_type": "dynamic", "factor": 2.0}, "disagree"),
        ({"type": "linear"}, "no 'factor'"),
        ({"type": "linear", "factor": "4"}, "factor.* = '4'"),
        ({"type": "linear", "factor": None}, "factor.* = None"),
        ({"type": "linear", "factor": 0.5}, "factor.* = 0.5"),
        ({"type": "linear", "factor": float("inf")}, "factor.* = inf"),
        ({"type": "linear", "factor": True}, "factor.* = True"),
        ({"rope_type": "default", "factor": 2.0}, "factor.* = 2.0"),
        ({**LINEAR, "short_factor": [1.0]}, "short_factor"),
        ({**LINEAR, "original_max_position_embeddings": 32}, "original_max_position_embeddings"),
        ({**LINEAR, "partial_rotary_factor": 0.5}, "partial_rotary_factor.* = 0.5"),
        ({**LINEAR, "rope_theta": None}, "rope_theta.* = None"),
        ({"type": "dynamic", "factor": 2.0, "beta_fast": 32}, "beta_fast"),
        ({"type": "yarn"}, "no 'factor'"),
        ({"type": "yarn", "factor": 2.0, "truncate": None}, "truncate"),
        ({"type": "yarn", "factor": 2.0, "truncate": 0}, "truncate = 0"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}, "beta_fast = 1"),
        ({"type": "yarn", "factor": 2.0, "attention_factor": 0}, "attention_factor = 0"),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1.5}, "= 1.5"),
        ({"type": "llama3", "factor": 8.0}, "low_freq_factor = None"),
        (
            {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor = 4",
        ),
        ("linear", "rope_scaling = 'linear'"),
        (
            {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}},
            "same in every",
        ),
        ({"full_attention": None}, "layers without RoPE"),
    ],
)
def test_bad_rope_is_refused(scaling, named):
    with pytest.raises(ConfigError, match=named):
        read(rope_scaling=scaling)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "10000.0 .* 500000.0"),
        ({"rope_theta": 0}, "rope_theta = 0"),
        ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 2.0}}, "disagree"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ({"original_max_position_embeddings": 99}, "original_max_position_embeddings = 99"),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 32,
                },
                "original_max_position_embeddings": 64,
            },
            "64 .* 32",
        ),
    ],
)
def test_contradicting_rope_is_refused(fields, named):
    with pytest.raises(ConfigError, match=named):
        read(**fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kind": "ntk"}, "kind .rope_type.* = 'ntk'"),
        ({"theta": -1.0}, "theta .rope_theta.* = -1.0"),
        ({"theta": "1e4"}, "theta .* = '1e4'"),
        ({"factor": 2.0}, "factor = 2.0: kind='default' does not use it"),
        ({"kind": "linear", "mscale": 1.0}, "mscale = 1.0: kind='linear' does not use it"),
        ({"kind": "linear", "factor": 2.0, "context": 8}, "context = 8"),
        ({"kind": "yarn", "factor": 2.0}, "original_max_positions .* = None"),
        ({"kind": "yarn", "theta": 1.0, "original_max_positions": 8}, "theta .* above 1"),
        ({"kind": "llama3", "original_max_positions": 8}, "low_freq_factor = None"),
        ({"kind": "dynamic", "factor": 2.0, "context": 0}, "context = 0"),
    ],
)
def test_rope_config_is_checked(fields, named):
    with pytest.raises(ConfigError, match=named):
        RopeConfig(**fields)
