"""GGUF model files of llama (Mistral's too), qwen2 and qwen3 to a config dict and a parameter tree.

Reading streams: a tensor is decoded a few megabytes at a time straight into the array that stays,
so the host never holds much more than the result.
"""

import os
import re
from typing import Any

from tqdm import tqdm

from checkpoints import keys
from checkpoints.errors import CheckpointError
from checkpoints.gguf_config import config_from_gguf
from checkpoints.gguf_file import GGUFFile, read_header
from checkpoints.gguf_quants import read_tensor, read_vector, unpermuted_rows, value_dtype
from checkpoints.raw import checked_dtype

_ROPE_FREQS = "rope_freqs.weight"
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PERMUTED = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj\.(weight|bias)")


def read_gguf(
    file: str | os.PathLike[str], *, dtype: Any = None, progress: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a whole model from one GGUF file.

    Tensor types F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 and Q2_K to Q6_K. Query and key rows
    of the llama architecture come out in Hugging Face's (rotate-half) order.

    Args:
      file: path of the .gguf file.
      dtype: of every leaf: float32, bfloat16 or float16. None keeps each tensor's own, which for
        a file of 16-bit floats is not one dtype for all (norms are stored as float32 there);
        quantised tensors become float32.
      progress: show a bar over the tensors.

    Returns:
      (config, params): a dict in the vocabulary of config.json, and the parameter tree (nested
      dict of jax arrays on the default device, kernels [in, out]). Embeddings are tied exactly
      if the file has no `output.weight`; with one there is an `lm_head`, equal or not.

    Raises FileNotFoundError; ValueError for a dtype that weights can't be read as; CheckpointError,
    before any weight is read, for a damaged or truncated file, an architecture, tensor type,
    RoPE scaling or metadata key that is not supported, and tensors missing, left over or of a wrong
    shape, each by its name.
    """
    kind = checked_dtype(dtype)
    header = read_header(file)
    tensors = header.tensors
    with header.path.open("rb") as handle:
        rope_freqs = None
        if _ROPE_FREQS in tensors:
            rope_freqs = read_vector(header.path, handle, tensors[_ROPE_FREQS])
        config = config_from_gguf(header, rope_freqs)
        plan = _plan(header, config)
        head_dim = config["head_dim"]
        params: dict[str, Any] = {}
        for name, entry in tqdm(plan, "reading GGUF", unit="tensor", disable=not progress):
            permuted = config["model_type"] == "llama" and _PERMUTED.fullmatch(entry.key)
            leaf = read_tensor(
                header.path,
                handle,
                tensors[name],
                transpose=entry.transpose,
                target_rows=unpermuted_rows(entry.shape[0], head_dim) if permuted else None,
                dtype=kind,
            )
            keys.put(params, entry.path, leaf)
    return config, params


def gguf_name(key: str) -> str:
    """The GGUF tensor name of a Hugging Face key, as `blk.3.attn_q.weight`."""
    stem, _, suffix = key.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if found is None or found[2] not in _IN_LAYER:
        raise CheckpointError(f"no GGUF tensor is known for {key!r}")
    return f"blk.{found[1]}.{_IN_LAYER[found[2]]}.{suffix}"


def _plan(header: GGUFFile, config: dict[str, Any]) -> list[tuple[str, keys.Entry]]:
    """(tensor name, where it goes) of each tensor, the file's list checked against the config's."""
    plan = [(gguf_name(entry.key), entry) for entry in keys.table(config)]
    keys.match(
        {name: entry.shape for name, entry in plan},
        [(name, info.shape) for name, info in header.tensors.items() if name != _ROPE_FREQS],
        where=str(header.path),
    )
    for name, _ in plan:
        value_dtype(header.path, header.tensors[name])
    if config["model_type"] == "llama" and config["head_dim"] % 2:
        raise CheckpointError(f"{header.path}: head dimension {config['head_dim']} is odd")
    return plan


__all__ = ["gguf_name", "read_gguf"]
