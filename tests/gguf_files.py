"""Tiny GGUF files for tests, written with the `gguf` package's own writer."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 256, 512, 4, 2, 64, 32


def random_tree(
    seed: int = 0, *, bias: bool = False, qk_norm: bool = False, tied: bool = True
) -> dict[str, Any]:
    """A parameter tree of float32 numpy arrays, leaf by leaf as the layout is stated."""
    rng = np.random.default_rng(seed)

    def new(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def linear(width: int, out: int, with_bias: bool = False) -> dict[str, np.ndarray]:
        return {"kernel": new(width, out)} | ({"bias": new(out)} if with_bias else {})

    def layer() -> dict[str, Any]:
        attention = {
            "query": linear(HIDDEN, HEADS * HEAD_DIM, bias),
            "key": linear(HIDDEN, KV_HEADS * HEAD_DIM, bias),
            "value": linear(HIDDEN, KV_HEADS * HEAD_DIM, bias),
            "output": linear(HEADS * HEAD_DIM, HIDDEN),
        }
        if qk_norm:
            attention["query_norm"] = {"scale": new(HEAD_DIM)}
            attention["key_norm"] = {"scale": new(HEAD_DIM)}
        return {
            "attention_norm": {"scale": new(HIDDEN)},
            "attention": attention,
            "mlp_norm": {"scale": new(HIDDEN)},
            "mlp": {
                "gate": linear(HIDDEN, MLP),
                "up": linear(HIDDEN, MLP),
                "down": linear(MLP, HIDDEN),
            },
        }

    tree = {"embedding": {"embedding": new(VOCABULARY, HIDDEN)}}
    tree |= {f"layer_{i}": layer() for i in range(LAYERS)}
    tree["final_norm"] = {"scale": new(HIDDEN)}
    if not tied:
        tree["lm_head"] = {"kernel": new(HIDDEN, VOCABULARY)}
    return tree


def permuted(rows: np.ndarray) -> np.ndarray:
    """Rows of a query or key projection in the order of llama GGUFs: per head 0, D/2, 1, ..."""
    result = np.empty_like(rows)
    half = HEAD_DIM // 2
    for head in range(len(rows) // HEAD_DIM):
        for i in range(half):
            for j in (0, 1):
                result[head * HEAD_DIM + 2 * i + j] = rows[head * HEAD_DIM + j * half + i]
    return result


def gguf_tensors(tree: dict[str, Any], arch: str = "llama") -> dict[str, np.ndarray]:
    """GGUF tensor name -> values as the file holds them ([out, in], q and k permuted for llama)."""
    order = permuted if arch == "llama" else (lambda rows: rows)
    tensors = {
        "token_embd.weight": tree["embedding"]["embedding"],
        "output_norm.weight": tree["final_norm"]["scale"],
    }
    if "lm_head" in tree:
        tensors["output.weight"] = tree["lm_head"]["kernel"].T
    for i in range(LAYERS):
        layer, blk = tree[f"layer_{i}"], f"blk.{i}"
        attention, mlp = layer["attention"], layer["mlp"]
        tensors[f"{blk}.attn_norm.weight"] = layer["attention_norm"]["scale"]
        tensors[f"{blk}.ffn_norm.weight"] = layer["mlp_norm"]["scale"]
        for name in ("gate", "up", "down"):
            tensors[f"{blk}.ffn_{name}.weight"] = mlp[name]["kernel"].T
        tensors[f"{blk}.attn_output.weight"] = attention["output"]["kernel"].T
        for short, name, rearranged in (("q", "query", order), ("k", "key", order),
                                        ("v", "value", lambda rows: rows)):  # fmt: skip
            tensors[f"{blk}.attn_{short}.weight"] = rearranged(attention[name]["kernel"].T)
            if "bias" in attention[name]:
                tensors[f"{blk}.attn_{short}.bias"] = rearranged(attention[name]["bias"])
        for short, name in (("q", "query_norm"), ("k", "key_norm")):
            if name in attention:
                tensors[f"{blk}.attn_{short}_norm.weight"] = attention[name]["scale"]
    return tensors


def metadata(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """What a file of the tiny model says, without `arch.`; a change to None leaves a key out."""
    values = {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    values = {key if key.startswith("tokenizer.") else f"{arch}.{key}": value
              for key, value in values.items()}  # fmt: skip
    values |= changes
    return {key: value for key, value in values.items() if value is not None}


def write(
    path: Path,
    tensors: dict[str, np.ndarray],
    values: dict[str, Any] | None = None,
    *,
    arch: str = "llama",
    types: dict[str, Type] | None = None,
) -> Path:
    """Write a GGUF file. `types`: tensor name -> type of data that is uint8 blocks already."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (metadata(arch) if values is None else values).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, data in tensors.items():
        kind = (types or {}).get(name)
        if data.dtype.name == "bfloat16":
            data, kind = np.ascontiguousarray(data).view(np.uint8), Type.BF16
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
