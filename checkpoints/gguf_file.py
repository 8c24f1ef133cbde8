"""The GGUF container: header, metadata and where each tensor lies. Knows nothing of models.

Read with plain reads and no memory map, so that what a reader holds in memory is what it asked
for; the quantisation formats themselves are the `gguf` package's.

Layout (versions 2 and 3, little-endian): magic `GGUF`, version u32, number of tensors u64, number
of metadata pairs u64; the pairs (key, value type u32, value); for each tensor its name, number of
axes u32, axes u64 (innermost first), type u32 and offset u64 into the data section, which starts
at the next multiple of the alignment.
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from checkpoints.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_AXES = 4  # of a tensor; the format allows no more
_STRING, _ARRAY = 8, 9
_SCALARS = {  # value type -> struct code
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's place in the file. `shape` is in numpy's order (outermost axis first)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header. `metadata` holds plain Python values (int, float, bool, str, list)."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """`metadata[key]` checked to be of `kind`; `default` where the key is absent."""
        return get_typed(self.metadata, key, kind, default, source=str(self.path))

    def require(self, key: str, kind: type) -> Any:
        """`metadata[key]`; CheckpointError where it is absent or not of `kind`."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.path}: the metadata lacks {key!r}")
        return value


def get_typed(
    metadata: Mapping[str, Any], key: str, kind: type, default: Any = None, *, source: str
) -> Any:
    """`metadata[key]` checked to be of `kind`; `default` where the key is absent. An int serves
    where a float is asked for; a bool never serves as an int. CheckpointError otherwise."""
    if key not in metadata:
        return default
    value = metadata[key]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(
            f"{source}: metadata {key!r} should be {kind.__name__}, not {type(value).__name__}"
            f" ({str(value)[:60]!r})"
        )
    return value


class _Reader:
    """Little-endian values off a file; running past its end names what was being read."""

    def __init__(self, path: Path, handle: BinaryIO):
        self.path = path
        self.handle = handle
        self.size = os.fstat(handle.fileno()).st_size
        self.what = "the header"

    def raw(self, count: int) -> bytes:
        position = self.handle.tell()
        # Compared with what is left, not just read: a damaged length could ask for exabytes.
        if count > self.size - position:
            raise CheckpointError(
                f"{self.path}: file cut short or damaged while reading {self.what}: {count} bytes"
                f" wanted at byte {position}, the file has {self.size}"
            )
        return self.handle.read(count)

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.raw(struct.calcsize("<" + code)))
        if code == "f":
            # The shortest decimal that gives this float32 (1e-05, not 9.999999747378752e-06).
            return float(str(np.float32(value)))
        return value

    def string(self) -> str:
        raw = self.raw(self.scalar("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path}: damaged text (not UTF-8) in {self.what}: {raw[:40]!r}"
            ) from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                code = _SCALARS[item]
                raw = self.raw(count * struct.calcsize("<" + code))
                return list(struct.unpack(f"<{count}{code}", raw))
            if item == _STRING:
                return [self.string() for _ in range(count)]
            kind = item  # arrays of arrays: allowed by the format, used by nothing
        raise CheckpointError(
            f"{self.path}: unknown value type {kind} in {self.what} (a damaged file, or a newer"
            " GGUF version)"
        )


def read_header(path: str | os.PathLike[str]) -> GGUFFile:
    """Parse a GGUF file's header and check it against the file's size. Reads no tensor data.

    Raises FileNotFoundError for a missing file, CheckpointError (naming the thing) for bad magic,
    an unsupported version or byte order, a truncated or damaged file, a key or tensor that occurs
    twice, an unknown tensor type, and one part of a split model.
    """
    path = Path(path)
    with path.open("rb") as handle:
        reader = _Reader(path, handle)
        magic = handle.read(4)
        if magic != MAGIC:
            raise CheckpointError(f"{path}: not a GGUF file (starts with {magic!r}, not {MAGIC!r})")
        version = reader.scalar("I")
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{path}: big-endian GGUF is not supported")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{path}: GGUF version {version} is not supported (only {VERSIONS})"
            )
        tensor_count, pair_count = reader.scalar("Q"), reader.scalar("Q")
        metadata = _read_metadata(reader, pair_count)
        if metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{path}: one of {metadata['split.count']} parts of a split model (split.count);"
                " join them first with llama.cpp's gguf-split --merge"
            )
        alignment = get_typed(
            metadata, "general.alignment", int, DEFAULT_ALIGNMENT, source=str(path)
        )
        if alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{path}: general.alignment {alignment} is no power of two")
        tensors = _read_tensor_infos(reader, tensor_count, alignment)
    return GGUFFile(path, metadata, tensors)


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        reader.what = f"metadata pair {index} of {count}"
        key = reader.string()
        reader.what = f"metadata {key!r}"
        if key in metadata:
            raise CheckpointError(f"{reader.path}: metadata {key!r} occurs twice")
        metadata[key] = reader.value(reader.scalar("I"))
    return metadata


def _read_tensor_infos(reader: _Reader, count: int, alignment: int) -> dict[str, TensorInfo]:
    found: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]] = []
    for index in range(count):
        reader.what = f"the description of tensor {index} of {count}"
        name = reader.string()
        reader.what = f"the description of tensor {name!r}"
        axes = reader.scalar("I")
        if not 1 <= axes <= MAX_AXES:
            raise CheckpointError(f"{reader.path}: tensor {name!r} has {axes} axes")
        shape = tuple(reader.scalar("Q") for _ in range(axes))[::-1]
        raw_type, offset = reader.scalar("I"), reader.scalar("Q")
        try:
            kind = GGMLQuantizationType(raw_type)
        except ValueError as error:
            raise CheckpointError(
                f"{reader.path}: tensor {name!r} has unknown type {raw_type}"
            ) from error
        if offset % alignment:
            raise CheckpointError(
                f"{reader.path}: tensor {name!r} starts at {offset}, no multiple of {alignment}"
            )
        found.append((name, shape, kind, offset))

    start = -(-reader.handle.tell() // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in found:
        if name in tensors:
            raise CheckpointError(f"{reader.path}: tensor {name!r} occurs twice")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise CheckpointError(
                f"{reader.path}: tensor {name!r} has rows of {shape[-1]}, no multiple of"
                f" {kind.name}'s block of {block}"
            )
        nbytes = math.prod(shape) // block * block_bytes
        end = start + offset + nbytes
        if end > reader.size:
            raise CheckpointError(
                f"{reader.path}: file cut short: tensor {name!r} ends at byte {end}, the file has"
                f" {reader.size}"
            )
        tensors[name] = TensorInfo(name, shape, kind, start + offset, nbytes)
    return tensors
