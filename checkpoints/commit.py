"""A directory that is either complete and unchanged, or refused.

It is filled under another name beside its place. Last comes `manifest.json`: what the directory
holds, the size and SHA-256 of every file, and a digest of itself. Then one rename puts it in its
place. A process that dies on the way leaves a directory without a manifest, and the place as it
was; a file lost, cut short or changed later is found out by its size or its hash.
"""

import ctypes
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError

MANIFEST = "manifest.json"
_DIGEST = "sha256"
_FILES = "files"


def write_directory(
    path: Path, fill: Callable[[Path], dict[str, Any]], *, overwrite: bool = False
) -> None:
    """Makes a complete directory at `path`, or leaves what is there as it is.

    Args:
      path: refused where it exists, unless `overwrite`, which replaces a directory that has a
        manifest (and nothing else) in one step.
      fill: puts files into the directory it is given and returns the body of the manifest, JSON
        with `files` and `sha256` left to this function.

    Raises CheckpointError if `path` can't be written to or replaced.
    """
    check_destination(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")
    part.mkdir()
    try:
        body = fill(part)
        files = sorted(file for file in part.rglob("*") if file.is_file())
        body[_FILES] = {
            file.relative_to(part).as_posix(): [size, digest]
            for file, (size, digest) in zip(files, _hash(files, sync=True), strict=True)
        }
        body[_DIGEST] = _digest(body)
        with open(part / MANIFEST, "w") as stream:
            stream.write(json.dumps(body, indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        for folder in (part, *(f for f in part.rglob("*") if f.is_dir())):
            _sync_folder(folder)
        _publish(part, path, overwrite)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_destination(path: Path, overwrite: bool) -> None:
    """Refuses a place that is taken, before any work."""
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise CheckpointError(
            f"{path}: already exists; choose another place or pass overwrite=True"
        )
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path}: has no {MANIFEST}, so it is not a checkpoint of ours and is not overwritten; "
            "remove it yourself"
        )


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a directory whose files are all there with the sizes it states."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    file = path / MANIFEST
    try:
        body = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: has no {MANIFEST}: a save that did not finish, or not a checkpoint of ours"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON ({error}); the file is damaged") from None
    if not isinstance(body, dict) or body.get(_DIGEST) != _digest(body):
        raise CheckpointError(f"{file}: does not match its own digest; the file is damaged")
    for name, (size, _) in body[_FILES].items():
        try:
            found = (path / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path / name}: missing; the checkpoint is incomplete") from None
        if found != size:
            raise CheckpointError(
                f"{path / name}: has {found} bytes but was saved with {size}; it is damaged"
            )
    return body


def verify_contents(path: Path, manifest: dict[str, Any]) -> None:
    """Reads every file of the directory and compares its hash; CheckpointError names the file."""
    names = list(manifest[_FILES])
    hashes = _hash([path / name for name in names], sync=False)
    for name, found in zip(names, hashes, strict=True):
        if list(found) != manifest[_FILES][name]:
            raise CheckpointError(
                f"{path / name}: not the contents that were saved (SHA-256 differs); it is damaged"
            )


def _digest(body: dict[str, Any]) -> str:
    rest = {name: value for name, value in body.items() if name != _DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _hash(files: Iterable[Path], *, sync: bool) -> list[tuple[int, str]]:
    """(size, SHA-256) of each file; with `sync`, each is on the disk when this returns."""

    def one(file: Path) -> tuple[int, str]:
        with open(file, "rb") as stream:
            if sync:
                os.fsync(stream.fileno())
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return os.fstat(stream.fileno()).st_size, digest

    with ThreadPoolExecutor() as pool:  # hashing lets go of the interpreter's lock
        return list(pool.map(one, files))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _publish(part: Path, path: Path, overwrite: bool) -> None:
    if not overwrite or not path.exists():
        if path.exists():  # meanwhile: a rename would silently replace an empty directory
            raise CheckpointError(f"{path}: was made by someone else during the save")
        os.rename(part, path)
    elif not _exchange(part, path):
        # No atomic exchange here: for a moment nothing is at `path`, but the old one is kept until
        # the new one is in place.
        old = path.with_name(f".{path.name}.old-{uuid.uuid4().hex}")
        os.rename(path, old)
        os.rename(part, path)
        shutil.rmtree(old)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two directories in one step; False where the system or file system can't."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))
