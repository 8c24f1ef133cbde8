"""The small models and RoPE variants that `make_golden.py` records and the tests compare.

Configs are written as config.json spells them, in old and new spellings on purpose.
"""

from typing import Any

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL = {**_LLAMA, "model_type": "mistral", "hidden_size": 64, "head_dim": 16}
_QWEN2 = {**_LLAMA, "model_type": "qwen2", "rope_theta": 1000000.0}
_QWEN3 = {**_LLAMA, "model_type": "qwen3", "head_dim": 32, "rope_theta": 1000000.0}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 3}

# name: (tokens, config)
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (48, _LLAMA),
    "llama_bias": (
        48,
        {**_LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama_head_dim": (48, {**_LLAMA, "head_dim": 32, "rope_scaling": None}),
    "mistral_window": (48, {**_MISTRAL, "sliding_window": 8}),
    "mistral_full": (48, {**_MISTRAL, "sliding_window": None}),
    "qwen2": (48, {**_QWEN2, "tie_word_embeddings": True}),
    "qwen2_window": (48, {**_QWEN2, **_WINDOWS, "max_window_layers": 1}),
    "qwen2_layer_types": (
        48,
        {
            **_QWEN2,
            **_WINDOWS,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": (48, {**_QWEN3, "tie_word_embeddings": True}),
    "qwen3_bias_window": (
        48,
        {**_QWEN3, **_WINDOWS, "attention_bias": True, "max_window_layers": 2},
    ),
}

_ROPE = {**_LLAMA, "head_dim": 32}  # enough pairs that each band of yarn and llama3 has some
_NO_THETA = {key: value for key, value in _ROPE.items() if key != "rope_theta"}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_BETAS = {"beta_fast": 2.0, "beta_slow": 0.1}


def _scaled(max_positions: int, **scaling: Any) -> dict[str, Any]:
    return {**_ROPE, "max_position_embeddings": max_positions, "rope_scaling": scaling}


# The original context is 32 tokens in all of them, so most positions lie beyond it.
ROPE_MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "rope_default": (96, {**_ROPE, "rope_scaling": {"rope_type": "default"}}),
    "rope_linear": (96, _scaled(128, type="linear", factor=4.0)),
    "rope_dynamic": (96, _scaled(32, type="dynamic", factor=2.0)),
    "rope_dynamic_40": (40, _scaled(32, rope_type="dynamic", factor=2.0)),
    "rope_dynamic_24": (24, _scaled(32, rope_type="dynamic", factor=2)),
    "rope_yarn": (96, _scaled(128, type="yarn", factor=4, original_max_position_embeddings=32)),
    "rope_yarn_attention": (96, _scaled(128, **_YARN, attention_factor=1.5)),
    "rope_yarn_mscale": (96, _scaled(128, **_YARN, mscale=1.0, mscale_all_dim=0.4)),
    "rope_yarn_betas": (96, _scaled(128, **_YARN, **_BETAS)),
    "rope_yarn_no_truncate": (96, _scaled(128, **_YARN, **_BETAS, truncate=False)),
    "rope_llama3": (
        96,
        {
            **_NO_THETA,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}

MODELS = {**FAMILIES, **ROPE_MODELS}

# What must not go unnoticed: changed this way, the logits of the case must be far off (the script
# that records them checks). Weights are drawn by name, so a bias left out is a bias of zero.
NEIGHBOURS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-2},
    "llama_bias": {"mlp_bias": False},
    "llama_head_dim": {"rope_theta": 20000.0},
    "mistral_window": {"sliding_window": 9},
    "mistral_full": {"sliding_window": 40},
    "qwen2": {"rope_theta": 10000.0},
    "qwen2_window": {"max_window_layers": 2},
    "qwen2_layer_types": {"layer_types": None, "max_window_layers": 1},
    "qwen3": {"rope_theta": 10000.0},
    "qwen3_bias_window": {"attention_bias": False},
    **{name: {"rope_scaling": None} for name in ROPE_MODELS if name != "rope_default"},
    "rope_default": {"rope_theta": 11000.0},
    "rope_dynamic_24": {"max_position_embeddings": 16},
    "rope_yarn_attention": {"rope_scaling": _YARN},
    "rope_yarn_mscale": {"rope_scaling": _YARN},
    "rope_yarn_betas": {"rope_scaling": _YARN},
    "rope_yarn_no_truncate": {"rope_scaling": {**_YARN, **_BETAS}},
    "rope_llama3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


def _table(
    theta: float, head_dim: int, max_positions: int, length: int, **scaling: Any
) -> tuple[int, dict[str, Any]]:
    config = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 2 * head_dim,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rope_theta": theta,
        "rope_scaling": scaling or None,
    }
    return length, config


_YARN_4K = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# name: (sequence length, config): the RoPE of real models, far beyond their original context.
TABLES: dict[str, tuple[int, dict[str, Any]]] = {
    "default_1e4_d128": _table(10000.0, 128, 4096, 131072),
    "default_1e5_d64": _table(100000, 64, 8192, 131072),
    "default_5e5_d128": _table(500000.0, 128, 8192, 131072),
    "default_1e6_d80": _table(1000000.0, 80, 32768, 131072),
    "default_1e6_d96": _table(1000000.0, 96, 32768, 131072),
    "linear_4": _table(10000.0, 128, 16384, 131072, type="linear", factor=4.0),
    "linear_2.5_d96": _table(10000.0, 96, 16384, 131072, type="linear", factor=2.5),
    "dynamic_2_at_1000": _table(10000.0, 128, 2048, 1000, type="dynamic", factor=2.0),
    "dynamic_2_at_2048": _table(10000.0, 128, 2048, 2048, type="dynamic", factor=2.0),
    "dynamic_2_at_2049": _table(10000.0, 128, 2048, 2049, type="dynamic", factor=2.0),
    "dynamic_2_at_8192": _table(10000.0, 128, 2048, 8192, type="dynamic", factor=2.0),
    "dynamic_1.3_d80_at_40000": _table(500000.0, 80, 4096, 40000, type="dynamic", factor=1.3),
    "yarn_qwen2.5": _table(
        1000000.0, 128, 131072, 131072, type="yarn", factor=4.0,
        original_max_position_embeddings=32768,
    ),
    "yarn_16": _table(10000.0, 128, 65536, 131072, **_YARN_4K),
    "yarn_16_factor_null": _table(10000.0, 128, 65536, 131072, **{**_YARN_4K, "factor": None}),
    "yarn_16_original_absent": _table(10000.0, 128, 4096, 131072, rope_type="yarn", factor=16.0),
    "yarn_16_attention": _table(10000.0, 128, 65536, 131072, **_YARN_4K, attention_factor=0.9),
    "yarn_16_no_truncate": _table(10000.0, 128, 65536, 131072, **_YARN_4K, truncate=False),
    "yarn_16_betas": _table(10000.0, 80, 65536, 131072, **_YARN_4K, beta_fast=64, beta_slow=2),
    "yarn_40_mscale": _table(
        10000.0, 64, 163840, 131072, rope_type="yarn", factor=40, beta_fast=32, beta_slow=1,
        mscale=1.0, mscale_all_dim=0.707, original_max_position_embeddings=4096,
    ),
    "yarn_16_mscale_alone": _table(10000.0, 64, 65536, 131072, **_YARN_4K, mscale=0.707),
    # So short a context that both ends of the band meet: a step in place of a ramp.
    "yarn_step": _table(
        10000.0, 16, 64, 256, rope_type="yarn", factor=4.0, original_max_position_embeddings=6,
    ),
    "llama3.1": _table(500000.0, 128, 131072, 131072, **_LLAMA3, factor=8.0),
    "llama3.2": _table(500000.0, 64, 131072, 131072, **_LLAMA3, factor=32.0),
}  # fmt: skip


def table_positions(length: int) -> list[int]:
    """Positions to compare: the first, the last, and powers of two and their neighbours between."""
    powers = [2**i + d for i in range(1, 18) for d in (-1, 0, 1) if i % 2 or d == 0]
    odd = [100, 1000, 5000, 12345, 50000, 100000]
    return sorted({p for p in (0, 1, *powers, *odd, length - 1) if p < length})
