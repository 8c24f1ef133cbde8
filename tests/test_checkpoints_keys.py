"""The key table against what transformers stores, and what it refuses."""

from typing import Any

import numpy as np
import pytest
from checkpoint_files import hf_shapes
from golden.cases import FAMILIES

from checkpoints import CheckpointError
from checkpoints.keys import IGNORED, head_sizes, leaves, match, put, table

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {entry.key: entry.shape for entry in table(config)}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_is_what_transformers_stores(name):
    """Biases, query and key norms, head dims and tied embeddings of every family."""
    assert shapes_of(FAMILIES[name][1]) == hf_shapes(name)


def test_paths_and_transposition():
    entries = {entry.key: entry for entry in table({**CONFIG, "attention_bias": True})}
    key = entries["model.layers.0.self_attn.k_proj.weight"]
    assert (key.shape, key.tree_shape) == ((16, 32), (32, 16))
    assert key.path == ("layer_0", "attention", "key", "kernel")
    bias = entries["model.layers.0.self_attn.k_proj.bias"]
    assert (bias.shape, bias.tree_shape, bias.path[-1]) == ((16,), (16,), "bias")
    embedding = entries["model.embed_tokens.weight"]
    assert embedding.tree_shape == (64, 32)
    assert embedding.path == ("embedding", "embedding")
    head = entries["lm_head.weight"]
    assert (head.tree_shape, head.path) == ((32, 64), ("lm_head", "kernel"))
    assert len({entry.path for entry in entries.values()}) == len(entries)


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, (4, 2, 8)),
        ({"num_key_value_heads": None}, (4, 4, 8)),
        ({"head_dim": 16}, (4, 2, 16)),
        ({"head_dim": None}, (4, 2, 8)),
        ({"model_type": "qwen3"}, (4, 2, 128)),
        ({"model_type": "mistral", "num_attention_heads": 16}, (16, 2, 2)),
    ],
)
def test_head_sizes_given_and_left_out(changes, sizes):
    assert head_sizes({**CONFIG, **changes}) == sizes


@pytest.mark.parametrize(
    ("family", "kv_heads"), [("llama", 32), ("mistral", 8), ("qwen2", 32), ("qwen3", 32)]
)
def test_absent_kv_heads_are_what_transformers_assumes(family, kv_heads):
    config = {**CONFIG, "model_type": family, "num_attention_heads": 32}
    del config["num_key_value_heads"]
    assert head_sizes(config)[1] == kv_heads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "model_type = 'gemma3' is not supported.*'llama'"),
        ({"model_type": None}, "model_type = None"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"vocab_size": 64.0}, "vocab_size = 64.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"head_dim": "8"}, "head_dim = '8'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 .*num_key_value_heads 3"),
        ({"hidden_size": 30}, "hidden_size 30 .*num_attention_heads 4"),
        ({"attention_bias": 1}, "attention_bias = 1"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings = None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_configs_that_are_refused_by_field(changes, message):
    with pytest.raises(CheckpointError, match=message):
        table({**CONFIG, **changes})


def test_match_accepts_any_order():
    shapes = shapes_of(CONFIG)
    match(shapes, reversed(list(shapes.items())), where="here")


@pytest.mark.parametrize("family", ["llama_bias", "qwen3"])
def test_every_missing_key_is_named(family):
    shapes = hf_shapes(family)
    for key in shapes:
        found = [(name, shape) for name, shape in shapes.items() if name != key]
        with pytest.raises(CheckpointError, match=f"folder.*missing: '{key}'"):
            match(shapes, found, where="folder")
        with pytest.raises(CheckpointError, match=f"not in this model: '{key}'"):
            match(dict(found), shapes.items(), where="folder")
        with pytest.raises(CheckpointError, match=f"given twice: '{key}'"):
            match(shapes, [*shapes.items(), (key, shapes[key])], where="folder")
        wrong = {**shapes, key: (*shapes[key], 1)}
        with pytest.raises(CheckpointError, match=f"'{key}' has shape .*the config asks for"):
            match(shapes, wrong.items(), where="folder")


def test_match_names_all_kinds_of_faults_and_counts_the_rest():
    shapes = shapes_of({**CONFIG, "num_hidden_layers": 3})
    found = shapes_of({**CONFIG, "attention_bias": True, "hidden_size": 64})
    with pytest.raises(CheckpointError) as error:
        match(shapes, found.items(), where="folder")
    for part in ("missing: 'model.layers.1.", "and 13 more", "k_proj.bias", "more of a wrong"):
        assert part in str(error.value)


def test_ignored_buffers_are_these_and_no_others():
    assert IGNORED.fullmatch("model.layers.11.self_attn.rotary_emb.inv_freq")
    assert IGNORED.fullmatch("model.rotary_emb.inv_freq")
    for key in ("model.layers.0.self_attn.q_proj.weight", "x.model.rotary_emb.inv_freq"):
        assert not IGNORED.fullmatch(key)


def test_leaves_and_put_are_inverse():
    tree: dict[str, Any] = {}
    put(tree, ("a", "b"), np.zeros(1))
    put(tree, ("a", "c", "d"), np.zeros(2))
    assert [path for path, _ in leaves(tree)] == [("a", "b"), ("a", "c", "d")]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {}}, "a is empty"),
        ({}, "the tree is empty"),
        ({"a": {"b": 3}}, "a/b is a int"),
        ({"a": {0: np.zeros(1)}}, "key 0 under a"),
        ({"a/b": np.zeros(1)}, "key 'a/b' under the top"),
        ({"a": [np.zeros(1)]}, "a is a list"),
    ],
)
def test_trees_that_are_no_parameter_trees(tree, message):
    with pytest.raises(CheckpointError, match=message):
        list(leaves(tree))
