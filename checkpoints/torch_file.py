"""Tensors inside a `torch.save` file, found without torch and without running anything in it.

Such a file is an uncompressed zip: `NAME/data.pkl` says which tensors there are, `NAME/data/K` are
the bytes of storage K. A pickle is a program; the unpickler here knows only the few names a
state dict needs, answers them with plain records of its own, and refuses every other.
"""

import collections
import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.raw import RawTensor

_STORAGES: dict[str, np.dtype] = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(jnp.bfloat16),
}


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: np.dtype


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int  # in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _sizes(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value)


def _rebuild_tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
) -> _Tensor:
    if not (
        isinstance(storage, _Storage)
        and type(offset) is int
        and offset >= 0
        and _sizes(shape)
        and _sizes(stride)
        and len(shape) == len(stride)
    ):
        raise pickle.UnpicklingError("a tensor with malformed storage, offset, shape or stride")
    return _Tensor(storage, offset, shape, stride)


def _rebuild_parameter(data: Any, requires_grad: Any = False, hooks: Any = None) -> _Tensor:
    if not isinstance(data, _Tensor):
        raise pickle.UnpicklingError("a parameter that is not made of a tensor")
    return data


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(
            f"the pickle asks for {module}.{name}; only tensors of float32, float16 and bfloat16 "
            "are read, nothing else is run"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            raise pickle.UnpicklingError(f"an unknown persistent id {pid!r}")
        _, dtype, key, _, _ = pid
        if not isinstance(dtype, np.dtype) or not isinstance(key, str):
            raise pickle.UnpicklingError(f"a storage of unknown type {dtype!r} or key {key!r}")
        return _Storage(key, dtype)


def read_torch_header(path: Path) -> list[RawTensor]:
    """Every tensor of a state dict saved by `torch.save` (the zip format, torch 1.6 and later).

    Raises CheckpointError that names the file, and the tensor where there is one: truncated or
    legacy files, pickles that ask for anything but tensors, values that are no tensors, storages
    missing or too short, tensors that are not contiguous.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as stream:
            members = {info.filename: info for info in archive.infolist()}
            root = _root(path, members)
            _check_byte_order(path, archive, members, root)
            state = _unpickle(path, archive.read(f"{root}data.pkl"))
            return [
                _locate(path, stream, members, root, name, tensor) for name, tensor in state.items()
            ]
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (zipfile.BadZipFile, struct.error, EOFError) as error:
        raise CheckpointError(
            f"{path}: not a whole torch zip file ({error}); it is truncated or in the format from "
            "before torch 1.6: fetch it again or save it with a current torch"
        ) from None


def _root(path: Path, members: Mapping[str, zipfile.ZipInfo]) -> str:
    pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{path}: a zip file without the one data.pkl that torch.save writes")
    return pickles[0].removesuffix("data.pkl")


def _check_byte_order(
    path: Path, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], root: str
) -> None:
    name = f"{root}byteorder"
    if name in members and (order := archive.read(name)) != b"little":
        raise CheckpointError(f"{path}: byte order {order!r}; only little-endian files are read")


def _unpickle(path: Path, program: bytes) -> dict[str, _Tensor]:
    try:
        state = _Unpickler(io.BytesIO(program)).load()
    except (
        Exception
    ) as error:  # a damaged pickle can fail in any way; none may pass as a bug of ours
        raise CheckpointError(f"{path}: data.pkl can't be read: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a dict of tensors")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, _Tensor):
            raise CheckpointError(
                f"{path}: entry {name!r} is a {type(tensor).__name__}, not a tensor"
            )
    return state


def _locate(
    path: Path,
    stream: io.BufferedReader,
    members: Mapping[str, zipfile.ZipInfo],
    root: str,
    name: str,
    tensor: _Tensor,
) -> RawTensor:
    where = f"{path}: tensor {name!r}"
    count, expected = 1, []
    for size in reversed(tensor.shape):
        expected.append(count)
        count *= size
    strides = zip(tensor.shape, tensor.stride, reversed(expected), strict=True)
    if any(size > 1 and stride != right for size, stride, right in strides):
        raise CheckpointError(f"{where} is not contiguous; save it after .contiguous()")
    info = members.get(f"{root}data/{tensor.storage.key}")
    if info is None:
        raise CheckpointError(f"{where}: its storage data/{tensor.storage.key} is not in the file")
    if info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{where}: its storage is compressed, which torch.save never does")
    begin = tensor.offset * tensor.storage.dtype.itemsize
    end = begin + count * tensor.storage.dtype.itemsize
    if end > info.file_size:
        raise CheckpointError(
            f"{where} ends at byte {end} of its storage, which has only {info.file_size}"
        )
    # The local header may be longer than the entry in the directory: torch pads it for alignment.
    stream.seek(info.header_offset)
    header = stream.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise CheckpointError(f"{where}: the zip header of its storage is damaged")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    start = info.header_offset + 30 + name_length + extra_length
    return RawTensor(name, path, start + begin, tensor.storage.dtype, tensor.shape)
