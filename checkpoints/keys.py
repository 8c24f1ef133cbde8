"""Which tensor of a Hugging Face checkpoint is which leaf of the parameter tree.

The table follows from the config alone, so it says what a checkpoint must hold before one is
opened. PyTorch keeps a linear layer's weight as [out, in]; the tree keeps [in, out].

Sizes: E hidden, F mlp, H query heads, K KV heads, D head dim, V vocabulary.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from checkpoints.errors import CheckpointError

Path = tuple[str, ...]
Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

# Buffers that old versions of transformers saved beside the weights; they follow from the config.
IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

# (query/key/value bias, output bias, mlp bias, query and key norm) of each family: always, never,
# or what the named field of the config says (absent: false).
_EXTRAS: dict[str, tuple[bool | str, bool | str, bool | str, bool]] = {
    "llama": ("attention_bias", "attention_bias", "mlp_bias", False),
    "mistral": (False, False, False, False),
    "qwen2": (True, False, False, False),
    "qwen3": ("attention_bias", "attention_bias", False, True),
}
# What transformers assumes where the field is absent; null means as many as query heads.
_KV_HEADS = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}
_HEAD_DIM = {"llama": None, "mistral": None, "qwen2": None, "qwen3": 128}


@dataclass(frozen=True)
class Entry:
    """One tensor: its name and shape in the files, its path in the tree."""

    key: str
    shape: Shape
    path: Path
    transpose: bool = False

    @property
    def tree_shape(self) -> Shape:
        return self.shape[::-1] if self.transpose else self.shape


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config: {name} = {value!r}; it must be given, a positive integer")
    return value


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"config: {name} = {value!r}; it must be true or false")
    return value


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether logits are made with the embedding itself (absent means no, as in transformers)."""
    return _flag(config, "tie_word_embeddings")


def head_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(H, K, D) of a config dict, its absent and null fields read as transformers reads them."""
    family = family_of(config)
    heads = _size(config, "num_attention_heads")
    kv_heads: int | None = config.get("num_key_value_heads", _KV_HEADS[family])
    kv_heads = (
        heads
        if kv_heads is None
        else _size({"num_key_value_heads": kv_heads}, "num_key_value_heads")
    )
    head_dim: int | None = config.get("head_dim", _HEAD_DIM[family])
    if head_dim is not None:
        head_dim = _size({"head_dim": head_dim}, "head_dim")
    else:
        hidden = _size(config, "hidden_size")
        if hidden % heads:
            raise CheckpointError(
                f"config: hidden_size {hidden} is not a multiple of num_attention_heads {heads} "
                "and no head_dim is given"
            )
        head_dim = hidden // heads
    if heads % kv_heads:
        raise CheckpointError(
            f"config: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{kv_heads}"
        )
    return heads, kv_heads, head_dim


def family_of(config: Mapping[str, Any]) -> str:
    """`model_type` of a config dict, if it is one this table knows."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _EXTRAS:
        raise CheckpointError(
            f"config: model_type = {family!r} is not supported; supported: {sorted(_EXTRAS)}"
        )
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            "config: quantization_config is set; quantised safetensors can't be read, use the "
            "unquantised checkpoint or a GGUF file"
        )
    return family


def table(config: Mapping[str, Any]) -> tuple[Entry, ...]:
    """Every tensor of the model that `config` describes, in the order of the network.

    Raises CheckpointError for an unknown architecture and for sizes missing or contradictory.
    """
    qkv_bias, output_bias, mlp_bias, qk_norm = (
        _flag(config, extra) if isinstance(extra, str) else extra
        for extra in _EXTRAS[family_of(config)]
    )
    heads, kv_heads, head_dim = head_sizes(config)
    hidden, vocabulary = _size(config, "hidden_size"), _size(config, "vocab_size")
    mlp, layers = _size(config, "intermediate_size"), _size(config, "num_hidden_layers")

    def linear(key: str, path: Path, width: int, out: int, bias: bool) -> Iterator[Entry]:
        yield Entry(f"{key}.weight", (out, width), (*path, "kernel"), transpose=True)
        if bias:
            yield Entry(f"{key}.bias", (out,), (*path, "bias"))

    def layer(i: int) -> Iterator[Entry]:
        key, top = f"model.layers.{i}", f"layer_{i}"
        attention, self_attn = (top, "attention"), f"{key}.self_attn"
        query_width, kv_width = heads * head_dim, kv_heads * head_dim
        yield Entry(f"{key}.input_layernorm.weight", (hidden,), (top, "attention_norm", "scale"))
        yield from linear(
            f"{self_attn}.q_proj", (*attention, "query"), hidden, query_width, qkv_bias
        )
        yield from linear(f"{self_attn}.k_proj", (*attention, "key"), hidden, kv_width, qkv_bias)
        yield from linear(f"{self_attn}.v_proj", (*attention, "value"), hidden, kv_width, qkv_bias)
        yield from linear(
            f"{self_attn}.o_proj", (*attention, "output"), query_width, hidden, output_bias
        )
        if qk_norm:
            yield Entry(
                f"{self_attn}.q_norm.weight", (head_dim,), (*attention, "query_norm", "scale")
            )
            yield Entry(
                f"{self_attn}.k_norm.weight", (head_dim,), (*attention, "key_norm", "scale")
            )
        yield Entry(f"{key}.post_attention_layernorm.weight", (hidden,), (top, "mlp_norm", "scale"))
        yield from linear(f"{key}.mlp.gate_proj", (top, "mlp", "gate"), hidden, mlp, mlp_bias)
        yield from linear(f"{key}.mlp.up_proj", (top, "mlp", "up"), hidden, mlp, mlp_bias)
        yield from linear(f"{key}.mlp.down_proj", (top, "mlp", "down"), mlp, hidden, mlp_bias)

    entries = [Entry(EMBEDDING, (vocabulary, hidden), ("embedding", "embedding"))]
    for i in range(layers):
        entries += layer(i)
    entries.append(Entry("model.norm.weight", (hidden,), ("final_norm", "scale")))
    if not is_tied(config):
        entries.append(Entry(LM_HEAD, (vocabulary, hidden), ("lm_head", "kernel"), transpose=True))
    return tuple(entries)


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def match(expected: Mapping[str, Shape], found: Iterable[tuple[str, Shape]], *, where: str) -> None:
    """Checks that two lists of named shapes are the same list; order does not matter.

    Args:
      expected: what the config asks for.
      found: what there is, as (name, shape) pairs, so that a name given twice is seen.
      where: the file or tree that `found` comes from, for the message.

    Raises CheckpointError that names every kind of fault: given twice, missing, unexpected, shape.
    """
    seen: dict[str, Shape] = {}
    twice = set()
    for name, shape in found:
        if name in seen:
            twice.add(name)
        seen[name] = tuple(shape)
    faults = []
    if twice:
        faults.append(f"given twice: {_some(twice)}")
    if missing := expected.keys() - seen.keys():
        faults.append(f"missing: {_some(missing)}")
    if unexpected := seen.keys() - expected.keys():
        faults.append(f"not in this model: {_some(unexpected)}")
    wrong = [
        f"{name!r} has shape {list(seen[name])} but the config asks for {list(expected[name])}"
        for name in expected
        if name in seen and seen[name] != tuple(expected[name])
    ]
    faults += wrong[:5] + ([f"{len(wrong) - 5} more of a wrong shape"] if len(wrong) > 5 else [])
    if faults:
        raise CheckpointError(
            f"{where} does not hold what its config describes: {'; '.join(faults)}"
        )


def leaves(params: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, leaf) of every array of a nested dict, empty dicts and odd keys refused by name."""
    if not params:
        raise CheckpointError(f"parameter tree: {'/'.join(prefix) or 'the tree'} is empty")
    for name, value in params.items():
        if not isinstance(name, str) or "/" in name:
            raise CheckpointError(
                f"parameter tree: key {name!r} under {'/'.join(prefix) or 'the top'} is not a "
                "string without '/'"
            )
        path = (*prefix, name)
        if isinstance(value, Mapping):
            yield from leaves(value, path)
        elif hasattr(value, "shape") and hasattr(value, "dtype"):
            yield path, value
        else:
            raise CheckpointError(
                f"parameter tree: {'/'.join(path)} is a {type(value).__name__}, not an array"
            )


def put(params: dict[str, Any], path: Path, leaf: Any) -> None:
    """Sets a leaf of a nested dict, making the dicts on the way."""
    for name in path[:-1]:
        params = params.setdefault(name, {})
    params[path[-1]] = leaf
