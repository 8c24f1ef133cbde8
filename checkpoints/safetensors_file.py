"""The safetensors container: headers checked in full before a tensor is touched, and the way back.

Written here and not taken from the `safetensors` package, since that one maps whole files (which
counts as resident memory), reads bfloat16 for NumPy only in some versions, and writes from a dict
that holds every tensor at once. The format: a little-endian uint64 N, then N bytes of JSON (name ->
dtype, shape, data_offsets), then the data, with no gap.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.raw import RawTensor

# Weights only: what a model of ours can hold without being cast.
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Other types that the format knows: their sizes are checked, and reading them is refused by name.
_OTHER_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "U16": 2, "I16": 2,
    "U32": 4, "I32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # the limit of the reference implementation


def unique_pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for `json.loads` that refuses a key given twice (json keeps the last)."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"{twice[0]!r} is given twice")
    return result


def read_json(path: Path, text: str | bytes | None = None) -> dict[str, Any]:
    """A JSON object from a file (or from `text`, which came out of it); no key given twice."""
    try:
        value = json.loads(
            path.read_bytes() if text is None else text, object_pairs_hook=unique_pairs
        )
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); fetch the file again") from None
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is needed, this is a {type(value).__name__}")
    return value


def read_header(path: Path) -> list[RawTensor]:
    """Every tensor of a file in the order of its data, its place checked against the file's size.

    Raises CheckpointError that names the file, and the tensor where there is one: a header cut
    short or not JSON, a tensor given twice, sizes that contradict each other, a truncated file,
    and data types other than float32, float16 and bfloat16.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{path}: {size} bytes long with a header of {length}: truncated, or not a "
                    "safetensors file; fetch it again"
                )
            text = stream.read(length)
    except (FileNotFoundError, IsADirectoryError):
        raise CheckpointError(f"{path}: no such file") from None
    header = read_json(path, text)
    header.pop("__metadata__", None)

    data = 8 + length
    spans = []
    for name, info in header.items():
        dtype, shape, begin, end = _entry(path, name, info)
        spans.append((begin, end, name, dtype, shape))
    spans.sort(key=lambda span: span[:2])
    position = 0
    for begin, end, name, _, _ in spans:
        if begin != position:
            raise CheckpointError(
                f"{path}: tensor {name!r} starts at byte {begin} of the data but the one before "
                f"ends at {position}; the header is damaged"
            )
        position = end
        if data + end > size:
            raise CheckpointError(
                f"{path}: tensor {name!r} ends at byte {data + end} but the file has only {size}; "
                "it is truncated, fetch it again"
            )
    if data + position != size:
        raise CheckpointError(
            f"{path}: {size - data - position} bytes after the last tensor; the header is damaged"
        )
    for _, _, name, dtype, _ in spans:
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name!r} has data type {dtype}; only {sorted(DTYPES)} can be read"
            )
    return [
        RawTensor(name, path, data + begin, DTYPES[dtype], shape)
        for begin, _, name, dtype, shape in spans
    ]


def _entry(path: Path, name: str, info: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of one header entry, its parts consistent with each other."""

    def sizes(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)

    try:
        dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    except (TypeError, KeyError):
        raise CheckpointError(
            f"{path}: tensor {name!r}: its header entry lacks dtype, shape or data_offsets"
        ) from None
    if not sizes(shape) or not sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{path}: tensor {name!r}: shape {shape!r} or data_offsets {offsets!r} is malformed"
        )
    item = DTYPES[dtype].itemsize if dtype in DTYPES else _OTHER_BYTES.get(dtype)
    if item is None:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown data type {dtype!r}")
    begin, end = offsets
    count = 1
    for n in shape:
        count *= n  # Python integers: a damaged shape can't overflow
    if end - begin != count * item:
        raise CheckpointError(
            f"{path}: tensor {name!r}: {dtype}{shape} takes {count * item} bytes but data_offsets "
            f"{offsets} span {end - begin}"
        )
    return dtype, tuple(shape), begin, end


def write_file(
    path: Path,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    chunks: Iterable[Iterator[np.ndarray]],
) -> None:
    """Writes one file, tensor by tensor.

    Args:
      path: appears only when complete; a file already there is replaced.
      tensors: name -> (dtype, shape), in the order of the data.
      chunks: for each of them, an iterator over consecutive C-contiguous pieces of its data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on it
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned, as the format recommends
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            for pieces in chunks:
                for piece in pieces:
                    stream.write(piece.reshape(-1).view(np.uint8).data)
            if stream.tell() != 8 + len(text) + position:
                raise AssertionError(f"{path}: the data written is not what the header says")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
