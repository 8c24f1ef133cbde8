"""Contiguous tensors inside files, and how they get into jax arrays with no second copy.

A whole tensor is never held twice. Its rows are read a megabyte at a time into a small buffer
and put where they belong in an array that is laid out as the result (transposed, joined from
several files, its rows permuted, its dtype changed), and that array is then handed to JAX. On the
CPU back end JAX adopts a host buffer as it stands if its address is a multiple of 64, so the
array is allocated so. Files are read, not mapped: pages of a mapped file count as resident memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.errors import CheckpointError

CHUNK_BYTES = 1 << 20  # of a file at a time; chunks past the L2 cache transpose half as fast
_ALIGNMENT = 64  # below this, PjRt's CPU client copies instead of adopting the buffer


@dataclass(frozen=True)
class RawTensor:
    """A C-contiguous little-endian tensor at a place in a file."""

    name: str
    file: Path
    offset: int  # bytes from the start of the file
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array which `jax.device_put` on CPU adopts without a copy."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def _fill(stream: BinaryIO, buffer: np.ndarray, tensor: RawTensor) -> None:
    view = memoryview(buffer.view(np.uint8).reshape(-1))
    while len(view):
        got = stream.readinto(view)  # type: ignore[attr-defined]
        if not got:
            raise CheckpointError(
                f"{tensor.file}: ends inside tensor {tensor.name!r}, {len(view)} bytes short; "
                "the file is truncated, fetch it again"
            )
        view = view[got:]


def row_chunks(tensor: RawTensor, multiple: int = 1) -> Iterator[tuple[int, np.ndarray]]:
    """Rows of a tensor seen as [shape[0], rest] (a scalar as [1, 1]), in order: (first row, chunk).

    Every chunk but the last has a number of rows that `multiple` divides. The chunk is a view of
    one buffer that the next step overwrites.
    """
    rows = tensor.shape[0] if tensor.shape else 1
    width = int(np.prod(tensor.shape[1:], dtype=np.int64))
    if rows * width == 0:
        return
    per_row = width * tensor.dtype.itemsize
    step = max(CHUNK_BYTES // (per_row * multiple), 1) * multiple
    buffer = np.empty((min(step, rows), width), tensor.dtype)
    with open(tensor.file, "rb", buffering=0) as stream:
        stream.seek(tensor.offset)
        for start in range(0, rows, step):
            chunk = buffer[: min(step, rows - start)]
            _fill(stream, chunk, tensor)
            yield start, chunk


def _joined_rows(parts: Sequence[RawTensor], axis: int, start: int, stop: int) -> np.ndarray:
    """Rows start:stop of matrices joined along `axis`."""
    pieces, first = [], 0
    for part in parts:
        rows, width = part.shape
        low, high = (start, stop) if axis else (max(start - first, 0), min(stop - first, rows))
        if low < high:
            pieces.append(np.empty((high - low, width), part.dtype))
            with open(part.file, "rb", buffering=0) as stream:
                stream.seek(part.offset + low * width * part.dtype.itemsize)
                _fill(stream, pieces[-1], part)
        first += rows
    return np.concatenate(pieces, axis)


def equal_bytes(
    a: Sequence[RawTensor], b: Sequence[RawTensor], *, a_axis: int = 0, b_axis: int = 0
) -> bool:
    """Whether two matrices, each joined from parts, have the same dtype, shape and bits.

    Bits, so a NaN equals itself and the zeros do not equal each other. Stops at a difference.
    """
    shape = joined_shape(a, a_axis)
    if a[0].dtype != b[0].dtype or shape != joined_shape(b, b_axis):
        return False
    step = max(CHUNK_BYTES // max(shape[1] * a[0].dtype.itemsize, 1), 1)
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        x, y = _joined_rows(a, a_axis, start, stop), _joined_rows(b, b_axis, start, stop)
        if not np.array_equal(x.view(np.uint8), y.view(np.uint8)):
            return False
    return True


def _cast(values: np.ndarray, dtype: np.dtype, tensor: RawTensor) -> np.ndarray:
    """Values as `dtype`, rounded to nearest even; a finite one that becomes infinite is refused."""
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    if dtype.itemsize <= values.dtype.itemsize and np.any(np.isinf(cast) & ~np.isinf(values)):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} ({tensor.dtype}) holds values beyond the range "
            f"of {dtype}; read it as float32 or keep its dtype"
        )
    return cast


def joined_shape(parts: Sequence[RawTensor], axis: int) -> tuple[int, ...]:
    """Shape of the parts joined along `axis`; CheckpointError if they don't fit together."""
    first = parts[0]
    for part in parts[1:]:
        same_rest = (
            len(part.shape) == len(first.shape)
            and part.shape[:axis] == first.shape[:axis]
            and part.shape[axis + 1 :] == first.shape[axis + 1 :]
        )
        if not same_rest or part.dtype != first.dtype:
            raise CheckpointError(
                f"tensor {first.name!r} is {first.dtype}{list(first.shape)} in {first.file} but "
                f"{part.dtype}{list(part.shape)} in {part.file}: these can't be parts of one tensor"
            )
    return (
        *first.shape[:axis],
        sum(part.shape[axis] for part in parts),
        *first.shape[axis + 1 :],
    )


def place(
    parts: Sequence[RawTensor],
    *,
    axis: int = 0,
    transpose: bool = False,
    row_order: Callable[[np.ndarray], np.ndarray] | None = None,
    row_group: int = 1,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """Reads one tensor, joined from `parts` along `axis`, onto the default device.

    Args:
      parts: the pieces in order; one for a checkpoint that isn't split.
      axis: 0 or 1, along which the pieces are joined.
      transpose: whether the result is [columns, rows] of what the files hold.
      row_order: maps rows [n, width], n a multiple of `row_group`, to the same rows in another
        order, never across groups of `row_group` rows.
      dtype: of the result; None keeps the file's. A change rounds to nearest even.

    Returns:
      The array, on the device already: the host buffer is JAX's, or free again.
    """
    shape = joined_shape(parts, axis)
    result_shape = shape[::-1] if transpose else shape
    result = aligned_empty(result_shape, np.dtype(parts[0].dtype if dtype is None else dtype))
    target = result.T if transpose else result
    target = target.reshape(shape[0] if shape else 1, -1) if len(shape) != 2 else target
    row, column = 0, 0
    for part in parts:
        width = part.shape[1] if len(part.shape) == 2 else target.shape[1]
        for start, chunk in row_chunks(part, row_group):
            ordered = _cast(chunk if row_order is None else row_order(chunk), result.dtype, part)
            first = row + start
            target[first : first + len(chunk), column : column + width] = ordered
        if axis == 0:
            row += part.shape[0] if part.shape else 1
        else:
            column += width
    return jax.device_put(result).block_until_ready()


def checked_dtype(dtype: object) -> np.dtype | None:
    """The dtype that weights are to be read as: None, or one of float32, bfloat16, float16."""
    if dtype is None:
        return None
    try:
        known = np.dtype(dtype)  # type: ignore[call-overload]
    except TypeError:
        known = None
    if known not in (np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.float16)):
        raise ValueError(
            f"dtype={dtype!r}: weights can be read as float32, bfloat16 or float16, or None to "
            "keep what the file holds"
        )
    return known
