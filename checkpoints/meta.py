"""Meta's original layout: `params.json` and `consolidated.*`, as the Llama releases ship it.

Three things differ from Hugging Face's layout. Query and key rows come in pairs (2i, 2i + 1) that
RoPE turns together, where the tree has i and i + D/2: rows are reordered within each head. Large
models are split over files for model parallelism: pieces are joined along the axis that each layer
was split on. And the config is terse: `checkpoints.meta_config` derives the rest.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import keys
from checkpoints.errors import CheckpointError
from checkpoints.hf import progress_bar
from checkpoints.meta_config import PARAMS, config_from_params
from checkpoints.raw import RawTensor, checked_dtype, equal_bytes, joined_shape, place
from checkpoints.safetensors_file import read_header, read_json
from checkpoints.torch_file import read_torch_header

EMBEDDING = "tok_embeddings.weight"
OUTPUT = "output.weight"
_IGNORED = "rope.freqs"  # a buffer in the Llama 1 and 2 releases; it follows from the config

# Hugging Face's name inside a layer -> Meta's, and the axis of [out, in] that the model-parallel
# layer is split on (None: every file holds all of it).
_LAYER = {
    "input_layernorm": ("attention_norm", None),
    "self_attn.q_proj": ("attention.wq", 0),
    "self_attn.k_proj": ("attention.wk", 0),
    "self_attn.v_proj": ("attention.wv", 0),
    "self_attn.o_proj": ("attention.wo", 1),
    "post_attention_layernorm": ("ffn_norm", None),
    "mlp.gate_proj": ("feed_forward.w1", 0),
    "mlp.up_proj": ("feed_forward.w3", 0),
    "mlp.down_proj": ("feed_forward.w2", 1),
}
_ROTATED = re.compile(r"layers\.\d+\.attention\.w[qk]\.weight")


@dataclass(frozen=True)
class _Joined:
    """One tensor of the model: its parts, a file each, and the axis they are joined along."""

    parts: tuple[RawTensor, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        return joined_shape(self.parts, self.axis)


def read_meta(
    path: str | os.PathLike[str], *, dtype: Any = None, progress: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a Llama (or Mistral) model in its original layout.

    Args:
      path: directory with `params.json` and `consolidated.00.pth` (`.01`, ... for models split for
        model parallelism) or `consolidated.safetensors`.
      dtype: float32, bfloat16 or float16 to read every weight as; None keeps each tensor's bits.
      progress: whether to show a bar of the bytes read.

    Returns:
      (config, params): a config dict in Hugging Face's vocabulary, and the parameter tree, with
      query and key kernels in rotate-half order, on the default device. The same weights in Hugging
      Face's layout give the same tree bit for bit.

    Raises:
      CheckpointError: names the file and the tensor or field, before any weight is read.
      ValueError: `dtype` is no dtype for weights.
    """
    wanted = checked_dtype(dtype)
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a directory; give the one that holds {PARAMS}")
    meta = read_json(path / PARAMS)
    shards = _read_shards(path)
    embedding = _join(EMBEDDING, _parts(shards, EMBEDDING), _embedding_axis(shards, meta, path))
    tied = _is_tied(shards, embedding)
    config = config_from_params(
        meta, embedding_rows=embedding.shape[0], tied=tied, where=str(path / PARAMS)
    )
    entries = keys.table(config)
    names = {entry.key: _meta_name(entry.key) for entry in entries}

    found = {EMBEDDING: embedding}
    axes = dict(names.values())
    for name in shards[0]:
        if name != EMBEDDING and not (tied and name == OUTPUT):
            # A name that the table does not know is refused below, whatever its axis.
            found[name] = _join(name, _parts(shards, name), axes.get(name, 0))
    keys.match(
        {names[entry.key][0]: entry.shape for entry in entries},
        [(name, joined.shape) for name, joined in found.items()],
        where=f"{path} ({len(shards)} consolidated file(s))",
    )
    head_dim = keys.head_sizes(config)[2]
    _check_heads(found, head_dim)

    params: dict[str, Any] = {}
    total = sum(part.nbytes for joined in found.values() for part in joined.parts)
    with progress_bar(total, path, progress) as bar:
        for entry in entries:
            name = names[entry.key][0]
            rotated = _ROTATED.fullmatch(name) is not None
            leaf = place(
                found[name].parts,
                axis=found[name].axis,
                transpose=entry.transpose,
                row_order=(lambda rows: rotate_half_order(rows, head_dim)) if rotated else None,
                row_group=head_dim if rotated else 1,
                dtype=wanted,
            )
            keys.put(params, entry.path, leaf)
            bar.update(sum(part.nbytes for part in found[name].parts))
    return config, params


def rotate_half_order(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows [heads * D, E] with RoPE's pairs at (2i, 2i + 1) -> the pairs at (i, i + D/2)."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _meta_name(key: str) -> tuple[str, int | None]:
    """Meta's name of a Hugging Face key, and the axis it is split on."""
    if key == keys.LM_HEAD:
        return OUTPUT, 0
    if key == keys.EMBEDDING:
        return EMBEDDING, None  # depends on the release, see `_embedding_axis`
    if key == "model.norm.weight":
        return "norm.weight", None
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", key)
    if found is None or found[2] not in _LAYER:
        raise CheckpointError(f"{key!r} has no counterpart in Meta's layout")
    name, axis = _LAYER[found[2]]
    return f"layers.{found[1]}.{name}.weight", axis


def _read_shards(path: Path) -> list[dict[str, RawTensor]]:
    """name -> tensor of every consolidated file, in order; the files must hold the same names."""
    files = sorted(path.glob("consolidated*.pth"))
    others = sorted(path.glob("consolidated*.safetensors"))
    if files and others:
        raise CheckpointError(
            f"{path}: holds both {files[0].name} and {others[0].name}; remove one of the two"
        )
    files = files or others
    if not files:
        raise CheckpointError(f"{path}: no consolidated.*.pth and no consolidated.safetensors")
    suffix = files[0].suffix
    numbered = [f"consolidated.{i:02d}{suffix}" for i in range(len(files))]
    names = [file.name for file in files]
    if names not in (numbered, [f"consolidated{suffix}"]):
        missing = sorted(set(numbered) - set(names)) or numbered
        raise CheckpointError(f"{path}: found {names} but {missing[0]} is missing")

    shards: list[dict[str, RawTensor]] = []
    for file in files:
        tensors = read_torch_header(file) if suffix == ".pth" else read_header(file)
        shards.append({t.name: t for t in tensors if t.name != _IGNORED})
        if odd := shards[-1].keys() ^ shards[0].keys():
            name = min(odd)
            lacks = file if name in shards[0] else files[0]
            raise CheckpointError(f"{lacks}: tensor {name!r} is not in it, but in the other files")
    return shards


def _parts(shards: list[dict[str, RawTensor]], name: str) -> tuple[RawTensor, ...]:
    if name not in shards[0]:
        raise CheckpointError(f"tensor {name!r} is missing from the consolidated files")
    return tuple(shard[name] for shard in shards)


def _join(name: str, parts: tuple[RawTensor, ...], axis: int | None) -> _Joined:
    if axis is not None:
        if any(len(part.shape) <= axis for part in parts):
            raise CheckpointError(
                f"{parts[0].file}: tensor {name!r} of shape {list(parts[0].shape)} can't be joined "
                f"along axis {axis}"
            )
        joined_shape(parts, axis)
        return _Joined(parts, axis)
    for part in parts[1:]:
        vectors = [(_as_row(parts[0]),), (_as_row(part),)]
        if not equal_bytes(*vectors):
            raise CheckpointError(
                f"tensor {name!r} must be the same in every file but differs between "
                f"{parts[0].file} and {part.file}"
            )
    return _Joined(parts[:1], 0)


def _as_row(tensor: RawTensor) -> RawTensor:
    count = int(np.prod(tensor.shape, dtype=np.int64))
    return RawTensor(tensor.name, tensor.file, tensor.offset, tensor.dtype, (1, count))


def _embedding_axis(shards: list[dict[str, RawTensor]], meta: Mapping[str, Any], path: Path) -> int:
    """Llama 3 splits its embedding by vocabulary, Llama 1 and 2 by hidden size: the shape tells."""
    shape = _parts(shards, EMBEDDING)[0].shape
    dim = meta.get("dim")
    if len(shape) == 2 and shape[1] == dim:
        return 0
    if len(shape) == 2 and shape[1] * len(shards) == dim:
        return 1
    raise CheckpointError(
        f"{path}: {PARAMS} says dim = {dim!r} but {EMBEDDING!r} has shape {list(shape)} in each of "
        f"{len(shards)} file(s); one of the two is wrong, or a consolidated file is missing"
    )


def _is_tied(shards: list[dict[str, RawTensor]], embedding: _Joined) -> bool:
    """Whether the output is absent or the embedding again, bit for bit (Llama 3.2 1B and 3B)."""
    if OUTPUT not in shards[0]:
        return True
    output = _join(OUTPUT, _parts(shards, OUTPUT), 0)
    if len(output.shape) != 2:
        return False  # a wrong shape, which the key table names
    return equal_bytes(embedding.parts, output.parts, a_axis=embedding.axis)


def _check_heads(found: Mapping[str, _Joined], head_dim: int) -> None:
    """Rows are reordered within heads, so each file must hold whole ones."""
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd; RoPE turns pairs")
    for name, joined in found.items():
        for part in joined.parts:
            if _ROTATED.fullmatch(name) and part.shape[0] % head_dim:
                raise CheckpointError(
                    f"{part.file}: tensor {name!r} has {part.shape[0]} rows, not whole heads of "
                    f"{head_dim}"
                )
