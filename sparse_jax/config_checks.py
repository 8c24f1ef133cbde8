"""The error a bad configuration raises, and the checks that raise it."""

import math
from typing import Any

# Ours -> the name a Hugging Face config.json uses, so that a message helps whoever wrote either.
HF_NAMES = {
    "family": "model_type",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
    "rms_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "windows": "sliding_window, layer_types",
    "bos_id": "bos_token_id",
    "eos_ids": "eos_token_id",
    "pad_id": "pad_token_id",
    "theta": "rope_theta",
    "kind": "rope_type",
    "original_max_positions": "original_max_position_embeddings",
}


class ConfigError(ValueError):
    """A model configuration that is wrong or that this library can't serve exactly.

    The message names the field, its value and what to do about it.
    """


def bad(name: str, value: Any, reason: str) -> ConfigError:
    """The error for field `name`; `reason` says what is wrong and how to put it right."""
    hf = HF_NAMES.get(name)
    where = f"{name} ({hf} in config.json)" if hf else name
    return ConfigError(f"{where} = {value!r}: {reason}")


def check_int(name: str, value: Any, *, minimum: int) -> int:
    """`value` if it is an int (a bool is none) of at least `minimum`; ConfigError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad(name, value, f"give an int, not {type(value).__name__}")
    if value < minimum:
        raise bad(name, value, f"must be at least {minimum}")
    return value


def check_number(
    name: str, value: Any, *, above: float | None = None, minimum: float | None = None
) -> int | float:
    """`value` if it is a finite int or float within the bounds; ConfigError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(name, value, f"give a number, not {type(value).__name__}")
    if not math.isfinite(value):
        raise bad(name, value, "must be finite")
    if above is not None and value <= above:
        raise bad(name, value, f"must be above {above:g}")
    if minimum is not None and value < minimum:
        raise bad(name, value, f"must be at least {minimum:g}")
    return value


def check_bool(name: str, value: Any) -> bool:
    """`value` if it is a bool; ConfigError otherwise (0, 1 and null are not taken for one)."""
    if not isinstance(value, bool):
        raise bad(name, value, f"give true or false, not {type(value).__name__}")
    return value


def check_token_id(name: str, value: Any, vocab_size: int) -> int:
    """`value` if it is an id of the vocabulary; ConfigError otherwise."""
    check_int(name, value, minimum=0)
    if value >= vocab_size:
        raise bad(
            name, value, f"not in the vocabulary of {vocab_size}; give an id below that, or none"
        )
    return value
