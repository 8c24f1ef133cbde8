"""GGUF tensors into jax arrays: a few megabytes of rows at a time, into the array they stay in."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants

from checkpoints.errors import CheckpointError
from checkpoints.gguf_file import TensorInfo
from checkpoints.raw import aligned_empty

# Types whose values are stored as they are; these keep their dtype.
PLAIN = {Type.F32: np.float32, Type.F16: np.float16, Type.BF16: jnp.bfloat16}
# Block formats; these become float32.
QUANTISED = (
    Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1,
    Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K,
)  # fmt: skip
# Decoded values at once: bounds what reading needs beyond the result itself (the decoders hold
# several arrays of this many float32).
CHUNK_VALUES = 1 << 20


def value_dtype(path: Path, info: TensorInfo) -> np.dtype:
    """The dtype which holds this tensor's values exactly: its own, or float32 if quantised.

    CheckpointError, naming tensor and type, for a type that is not supported."""
    if info.type in PLAIN:
        return np.dtype(PLAIN[info.type])
    if info.type in QUANTISED:
        return np.dtype(np.float32)
    known = ", ".join(kind.name for kind in (*PLAIN, *QUANTISED))
    raise CheckpointError(
        f"{path}: tensor {info.name!r} is of type {info.type.name}, which is not supported (only"
        f" {known})"
    )


def _chunks(path: Path, handle: BinaryIO, info: TensorInfo) -> Iterator[tuple[int, np.ndarray]]:
    """(index of the first row, rows [n, width]) over a tensor of one (a single row) or two axes."""
    dtype = value_dtype(path, info)
    width = info.shape[-1]
    count = 1 if len(info.shape) == 1 else info.shape[0]
    if not info.nbytes:
        return
    row_bytes = info.nbytes // count
    step = max(1, CHUNK_VALUES // width)
    handle.seek(info.offset)
    for start in range(0, count, step):
        n = min(step, count - start)
        raw = handle.read(n * row_bytes)
        if len(raw) != n * row_bytes:
            raise CheckpointError(f"{path}: file cut short within tensor {info.name!r}")
        if info.type in PLAIN:
            values = np.frombuffer(raw, dtype)
        else:
            # Blocks never straddle rows, so one long row gives the same values; the package
            # works through 16 rows at a time, which is slow for short ones.
            values = quants.dequantize(np.frombuffer(raw, np.uint8)[None], info.type)
        yield start, values.reshape(n, width)


def read_vector(path: Path, handle: BinaryIO, info: TensorInfo) -> np.ndarray:
    """A tensor of one axis as a numpy array in its `value_dtype`."""
    if len(info.shape) != 1 or not info.nbytes:
        raise CheckpointError(f"{path}: tensor {info.name!r} has shape {list(info.shape)}")
    ((_, values),) = _chunks(path, handle, info)
    return values[0]


def unpermuted_rows(rows: int, head_dim: int) -> np.ndarray:
    """Where each row of a stored query or key projection belongs (int64 [rows]).

    Files of the llama architecture store every head's rows in pairs (0, D/2, 1, D/2 + 1, ...), for
    a RoPE that turns neighbours; the tree keeps them in order (0, 1, ..., D - 1), for one that
    turns halves. So row 2i + j of a head goes to row i + j D/2.
    """
    order = np.arange(rows).reshape(rows // head_dim, 2, head_dim // 2)
    return order.swapaxes(1, 2).reshape(-1)


def read_tensor(
    path: Path,
    handle: BinaryIO,
    info: TensorInfo,
    *,
    transpose: bool = False,
    target_rows: np.ndarray | None = None,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """One tensor of one or two axes on the default device.

    Args:
      transpose: whether the result is [columns, rows] of what the file holds.
      target_rows: int [rows], where each of the file's rows (or elements, if it has one axis) goes
        in the result; None keeps their order.
      dtype: of the result; None keeps `value_dtype`. A change rounds to nearest even.

    The host holds the result and one chunk, no second copy (raw.py says why the CPU back end needs
    none either).
    """
    kind = value_dtype(path, info) if dtype is None else dtype
    result = aligned_empty(info.shape[::-1] if transpose else info.shape, kind)
    target = result.T if transpose else result
    if len(info.shape) == 1:
        values = read_vector(path, handle, info)
        target[slice(None) if target_rows is None else target_rows] = values.astype(kind)
    else:
        for start, values in _chunks(path, handle, info):
            rows = slice(start, start + len(values))
            where = rows if target_rows is None else target_rows[rows]
            target[where] = values.astype(kind, copy=False)
    return jax.device_put(result).block_until_ready()
