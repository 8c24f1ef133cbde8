"""GGUF metadata to a config dict in the vocabulary of Hugging Face's config.json.

A key that would change what the model computes and is not understood is an error that names it.
"""

import math
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.gguf_file import GGUFFile

# general.architecture -> (model_type, class). Mistral models are stored as "llama".
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
# Keys of an architecture that this module reads, without their "llama." and so on.
_UNDERSTOOD = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count",
    "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
# Keys that change nothing in a dense model run as it stands; where a value is given, only with it.
_WITHOUT_EFFECT = {
    "rope.scaling.finetuned": None,
    "tensor_data_layout": "Meta AI original pth",
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "use_parallel_residual": False,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}


def config_from_gguf(file: GGUFFile, rope_freqs: np.ndarray | None = None) -> dict[str, Any]:
    """The config dict of a llama, qwen2 or qwen3 GGUF.

    Args:
      file: the parsed header; tensor names and shapes settle what the metadata leaves open (tied
        embeddings, biases, vocabulary size).
      rope_freqs: values of the tensor `rope_freqs.weight` (float32 [D/2]) where the file has one:
        the divisors of Llama 3's RoPE scaling, from which its parameters are derived.

    Raises CheckpointError, naming the key, for an unsupported architecture, a missing key, and a
    key or value that is not understood.
    """
    name = file.require("general.architecture", str)
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: architecture {name!r} is not supported (only {', '.join(ARCHITECTURES)})"
        )
    _refuse_unknown_keys(file, name)
    model_type, class_name = ARCHITECTURES[name]
    hidden = file.require(f"{name}.embedding_length", int)
    heads = file.require(f"{name}.attention.head_count", int)
    kv_heads = file.get(f"{name}.attention.head_count_kv", int, heads)
    if min(hidden, heads, kv_heads) < 1 or heads % kv_heads:
        raise CheckpointError(
            f"{file.path}: {name}.embedding_length {hidden}, attention.head_count {heads} and"
            f" attention.head_count_kv {kv_heads} fit no model"
        )
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": _vocab_size(file, name),
        "hidden_size": hidden,
        "intermediate_size": file.require(f"{name}.feed_forward_length", int),
        "num_hidden_layers": file.require(f"{name}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _head_dim(file, name, hidden, heads),
        "max_position_embeddings": file.require(f"{name}.context_length", int),
        "rms_norm_eps": file.require(f"{name}.attention.layer_norm_rms_epsilon", float),
        "hidden_act": "silu",
        "rope_theta": file.get(f"{name}.rope.freq_base", float, 10000.0),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_token_ids(file),
    }
    if model_type != "qwen2":  # qwen2 always has q, k and v biases, and no key that says so
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    config["rope_scaling"] = _rope_scaling(file, name)
    if rope_freqs is not None:
        if config["rope_scaling"] is not None:
            raise CheckpointError(
                f"{file.path}: both {name}.rope.scaling.type"
                f" {config['rope_scaling']['rope_type']!r} and a tensor 'rope_freqs.weight'"
            )
        config["rope_scaling"] = llama3_scaling(
            rope_freqs, config["rope_theta"], config["head_dim"], source=str(file.path)
        )
    return config


def _refuse_unknown_keys(file: GGUFFile, name: str) -> None:
    for key, value in file.metadata.items():
        short = key.removeprefix(f"{name}.")
        if short == key or short in _UNDERSTOOD:
            continue
        if short in _WITHOUT_EFFECT and _WITHOUT_EFFECT[short] in (None, value):
            continue
        raise CheckpointError(
            f"{file.path}: metadata {key!r} = {str(value)[:60]} may change what the model computes"
            " and is not supported"
        )


def _vocab_size(file: GGUFFile, name: str) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    rows = embedding.shape[0]
    for what, size in (
        (f"{name}.vocab_size", file.get(f"{name}.vocab_size", int, rows)),
        ("tokenizer.ggml.tokens", len(file.get("tokenizer.ggml.tokens", list, range(rows)))),
    ):
        if size != rows:
            raise CheckpointError(
                f"{file.path}: {what} tells of {size} tokens, 'token_embd.weight' has {rows} rows"
            )
    return rows


def _head_dim(file: GGUFFile, name: str, hidden: int, heads: int) -> int:
    """Dimension of a head: given, or hidden / heads; RoPE must turn all of it."""
    key = f"{name}.attention.key_length"
    head_dim = file.get(key, int)
    if head_dim is None:
        if hidden % heads:
            raise CheckpointError(
                f"{file.path}: no {key}, and {hidden} hidden units don't divide by {heads} heads"
            )
        head_dim = hidden // heads
    for other in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        value = file.get(other, int, head_dim)
        if value != head_dim:
            raise CheckpointError(
                f"{file.path}: {other} {value} differs from the key's {head_dim}: not supported"
            )
    return head_dim


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    """bos, eos and pad ids. Ends of a turn and of a message end a generation too, so they join the
    list of eos ids, as they do in config files of chat models."""
    prefix = "tokenizer.ggml."
    ends = [file.get(f"{prefix}{end}_token_id", int) for end in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": file.get(f"{prefix}bos_token_id", int),
        "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
        "pad_token_id": file.get(f"{prefix}padding_token_id", int),
    }


def _rope_scaling(file: GGUFFile, name: str) -> dict[str, Any] | None:
    prefix = f"{name}.rope.scaling."
    kind = file.get(f"{prefix}type", str)
    legacy = file.get(f"{name}.rope.scale_linear", float)
    if kind is None and legacy is not None:
        return None if legacy == 1.0 else {"rope_type": "linear", "factor": legacy}
    given = [key for key in file.metadata if key.startswith(prefix) and "finetuned" not in key]
    if kind in (None, "none"):
        if kind is None and given:
            raise CheckpointError(f"{file.path}: {given[0]!r} is given, {prefix}type is not")
        return None
    if kind == "linear":
        unfit = set(given) - {prefix + "type", prefix + "factor"}
        # The length that linear scaling started from is for the record: it enters no formula.
        unfit -= {prefix + "original_context_length"}
        if unfit:
            raise CheckpointError(f"{file.path}: {min(unfit)!r} does not go with linear scaling")
        return {"rope_type": "linear", "factor": file.require(f"{prefix}factor", float)}
    if kind == "yarn":
        factor = file.require(f"{prefix}factor", float)
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": file.require(
                f"{prefix}original_context_length", int
            ),
            "beta_fast": file.get(f"{prefix}yarn_beta_fast", float, 32.0),
            "beta_slow": file.get(f"{prefix}yarn_beta_slow", float, 1.0),
        }
        extra = file.get(f"{prefix}attn_factor", float, 1.0)
        if extra != 1.0:  # comes on top of YaRN's own factor; Hugging Face's key replaces it
            scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
        return scaling
    raise CheckpointError(f"{file.path}: {prefix}type {kind!r} is not supported")


def llama3_divisors(
    theta: float, head_dim: int, factor: float, low: float, high: float, original: float
) -> np.ndarray:
    """What Llama 3's scaling divides each RoPE frequency by (float64 [D/2]): 1 for wavelengths
    below original/high, `factor` above original/low, and in between the reciprocal of a mix whose
    share runs linearly in 1/wavelength."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - share) / factor + share)


def llama3_scaling(
    divisors: np.ndarray, theta: float, head_dim: int, *, source: str
) -> dict[str, Any]:
    """Parameters of the llama3 RoPE scaling which gives the divisors of a `rope_freqs.weight`.

    The divisors depend on factor, original/low and original/high only, so low = 1 (every known
    model's) settles the rest: the factor is the largest divisor, and the share of each wavelength
    in between lies on a line in 1/wavelength. What comes out must give all divisors back within
    the rounding of float32; CheckpointError if not, rather than a model that is nearly right.
    """
    found = np.asarray(divisors, np.float64).reshape(-1)
    fail = CheckpointError(
        f"{source}: tensor 'rope_freqs.weight' is not Llama 3's RoPE scaling, the only kind of RoPE"
        " factors that is supported"
    )
    if found.shape != (head_dim // 2,) or not np.all(np.isfinite(found)) or found.min() < 1.0:
        raise fail
    factor = float(found.max())
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)  # 1 / wavelength
    between = (found > 1.0 + 1e-6) & (found < factor * (1 - 1e-6))
    if between.sum() < 2:
        raise fail
    share = (1.0 / found[between] - 1.0 / factor) / (1.0 - 1.0 / factor)
    slope, offset = np.polyfit(frequency[between], share, 1)
    high = round(1.0 - 1.0 / offset, 3)
    original = round(slope * (high - 1.0))
    again = llama3_divisors(theta, head_dim, factor, 1.0, high, original)
    # Converters compute wavelengths in float32, whose rounding (about 1e-6 of a wavelength, since
    # theta is raised to a power) shifts the share, and so 1/divisor, by about as much.
    if not np.allclose(1.0 / again, 1.0 / found, rtol=0.0, atol=5e-6):
        raise fail
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
