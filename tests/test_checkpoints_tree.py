"""Saving and restoring pytrees: bits kept, nothing cast, nothing half-written accepted."""

import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import CheckpointError
from checkpoints.commit import MANIFEST
from checkpoints.tree import read_metadata, read_target, restore, save

ROOT = Path(__file__).resolve().parent.parent


class Pair(NamedTuple):
    first: Any
    second: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["keys", "lengths"], meta_fields=["page"]
)
@dataclass(frozen=True)
class State:
    keys: Any
    lengths: Any
    page: int


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def assert_same(left: Any, right: Any) -> None:
    """Equal structure, shapes, dtypes and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert isinstance(b, jax.Array)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def everything() -> dict[str, Any]:
    bits = jnp.arange(24, dtype=jnp.uint32).reshape(4, 6) * np.uint32(2654435761)
    nan = jnp.array([jnp.nan, -0.0, jnp.inf, -jnp.inf, 1e-45], jnp.float32)
    return {
        "layers": [
            State(bits.astype(jnp.bfloat16), jnp.array([3, 2**24 + 1], jnp.int32), page=16),
            State(jnp.ones((2, 3), jnp.float16), jnp.zeros((), jnp.int32), page=4),
        ],
        "optimizer": Pair((nan, None), {1: np.int32(7), 0: jnp.array(True)}),
        "keys": {"old": jax.random.PRNGKey(1), "new": jax.random.key(2)},
        "more keys": jax.random.split(jax.random.key(3, impl="rbg"), (2, 3)),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "numpy": np.arange(12, dtype=np.int16).reshape(3, 4).T,
    }


def test_round_trip(tmp_path):
    tree = everything()
    save(tmp_path / "tree", tree, metadata={"config": {"hidden_size": 64}, "note": None})
    assert_same(tree, restore(tmp_path / "tree", abstract(tree)))
    assert read_metadata(tmp_path / "tree") == {"config": {"hidden_size": 64}, "note": None}
    assert [p.name for p in tmp_path.iterdir()] == ["tree"]


@pytest.mark.parametrize(
    "dtype",
    "bool int4 int8 int16 int32 uint8 uint16 uint32 float8_e4m3fn float8_e5m2 float16 bfloat16 "
    "float32 complex64".split(),
)
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    values = np.random.RandomState(0).randint(0, 256, 7 * 8 * 8).astype(np.uint8)
    if dtype == "bool":
        tree = jnp.asarray(values.reshape(8, -1) > 100)
    elif dtype == "int4":
        tree = jnp.asarray(values[:91].reshape(7, 13) % 16).astype(jnp.int4)  # an odd count
    else:
        tree = jnp.asarray(values.view(jnp.dtype(dtype)).reshape(7, -1))
    save(tmp_path / "tree", tree, metadata={})
    assert_same(tree, restore(tmp_path / "tree", abstract(tree)))


@pytest.mark.parametrize("tree", [{}, {"a": None}, {"a": jnp.zeros((0,))}], ids=str)
def test_nothing_to_store(tmp_path, tree):
    save(tmp_path / "tree", tree, metadata={})
    assert_same(tree, restore(tmp_path / "tree", abstract(tree)))


def test_64_bit_needs_x64_on_both_sides(tmp_path):
    tree = {"count": np.array([2**40 + 1], np.int64)}
    with pytest.raises(CheckpointError, match=r"\['count'\].*int64.*x64"):
        save(tmp_path / "tree", tree, metadata={})
    with jax.enable_x64(True):
        save(tmp_path / "tree", tree, metadata={})
        target = {"count": jax.ShapeDtypeStruct((1,), np.dtype(np.int64))}
        assert restore(tmp_path / "tree", target)["count"][0] == 2**40 + 1
    with pytest.raises(CheckpointError, match=r"\['count'\].*int64.*x64"):
        restore(tmp_path / "tree", target)


def test_a_dtype_is_never_cast(tmp_path):
    """Orbax by itself gives 16777216.0 here."""
    save(tmp_path / "tree", {"steps": {"count": jnp.array(2**24 + 1, jnp.int32)}}, metadata={})
    target = {"steps": {"count": jax.ShapeDtypeStruct((), jnp.float32)}}
    with pytest.raises(CheckpointError, match=r"\['steps'\]\['count'\].*int32.*float32"):
        restore(tmp_path / "tree", target)
    target = {"steps": {"count": jax.ShapeDtypeStruct((), jnp.int32)}}
    assert int(restore(tmp_path / "tree", target)["steps"]["count"]) == 2**24 + 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"a": [((2, 3), "float32")]}, r"not in the target: \['b'\]"),
        (
            {"a": [((2, 3), "float32"), ((), "int32")], "b": ((4,), "int8")},
            r"not in the checkpoint: \['a'\]\[1\]",
        ),
        ({"a": [((3, 2), "float32")], "b": ((4,), "int8")}, r"\['a'\]\[0\].*\[2, 3\].*\[3, 2\]"),
        ({"a": [((2, 3), "bfloat16")], "b": ((4,), "int8")}, r"\['a'\]\[0\].*float32.*bfloat16"),
        ({"a": [((2, 3), "float32")], "b": ((4, 1), "int8")}, r"\['b'\].*\[4\].*\[4, 1\]"),
    ],
)
def test_another_target_is_refused_by_leaf_before_reading(tmp_path, monkeypatch, target, message):
    save(tmp_path / "tree", {"a": [jnp.ones((2, 3))], "b": jnp.ones(4, jnp.int8)}, metadata={})
    monkeypatch.setattr("checkpoints.tree._checkpointer", None)
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(*leaf),
        target,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    with pytest.raises(CheckpointError, match=message):
        restore(tmp_path / "tree", target)


def test_a_target_must_be_abstract(tmp_path):
    save(tmp_path / "tree", {"a": jnp.ones(2)}, metadata={})
    with pytest.raises(TypeError, match=r"\['a'\].*ShapeDtypeStruct"):
        restore(tmp_path / "tree", {"a": jnp.ones(2)})


def test_a_key_of_another_kind_is_refused(tmp_path):
    save(tmp_path / "tree", jax.random.key(0, impl="rbg"), metadata={})
    with pytest.raises(CheckpointError, match=r"key<rbg>.*key<fry>"):
        restore(tmp_path / "tree", abstract(jax.random.key(0)))


@pytest.mark.parametrize(
    ("leaf", "error", "message"),
    [
        (3, TypeError, r"\['a'\]\[0\] is a int"),
        (2.5, TypeError, r"\['a'\]\[0\] is a float"),
        ("text", TypeError, r"\['a'\]\[0\] is a str"),
        (np.array(["x"]), CheckpointError, r"\['a'\]\[0\].*<U1"),
        (np.array([None]), CheckpointError, r"\['a'\]\[0\].*object"),
        (jnp.zeros(3, jnp.uint4), CheckpointError, r"\['a'\]\[0\].*uint4"),
        (np.array([1], ">i4"), CheckpointError, r"\['a'\]\[0\].*byte order"),
    ],
)
def test_leaves_that_cannot_be_kept_are_refused_by_name(tmp_path, leaf, error, message):
    with pytest.raises(error, match=message):
        save(tmp_path / "tree", {"a": [leaf]}, metadata={})
    assert not list(tmp_path.iterdir())


def test_a_donated_leaf_is_refused_by_name(tmp_path):
    leaf = jnp.ones(8)
    leaf.delete()
    with pytest.raises(CheckpointError, match=r"\['cache'\].*donated"):
        save(tmp_path / "tree", {"cache": leaf}, metadata={})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"x": {"eos": (1, 2)}}, "metadata.'x'.*come back"),
        ({"x": {1: 2}}, "metadata.'x'.*come back"),
        ({"x": jnp.ones(2)}, "metadata.'x'.*not JSON"),
        ({"x": float("nan")}, "metadata.'x'.*not JSON"),
        ([1], "must be a dict"),
    ],
)
def test_metadata_must_be_json(tmp_path, metadata, message):
    with pytest.raises(TypeError, match=message):
        save(tmp_path / "tree", {"a": jnp.ones(2)}, metadata=metadata)
    assert not list(tmp_path.iterdir())


def test_an_existing_place_is_refused_or_replaced(tmp_path):
    place = tmp_path / "tree"
    save(place, {"a": jnp.ones(2)}, metadata={"turn": 1})
    with pytest.raises(CheckpointError, match="already exists.*overwrite"):
        save(place, {"a": jnp.zeros(2)}, metadata={"turn": 2})
    assert read_metadata(place) == {"turn": 1}
    save(place, {"b": jnp.zeros(3)}, metadata={"turn": 2}, overwrite=True)
    assert read_metadata(place) == {"turn": 2}
    assert_same({"b": jnp.zeros(3)}, restore(place, abstract({"b": jnp.zeros(3)})))
    assert [p.name for p in tmp_path.iterdir()] == ["tree"]


def test_replacing_without_an_atomic_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr("checkpoints.commit._exchange", lambda a, b: False)
    save(tmp_path / "tree", {"a": jnp.ones(2)}, metadata={"turn": 1})
    save(tmp_path / "tree", {"a": jnp.ones(2)}, metadata={"turn": 2}, overwrite=True)
    assert read_metadata(tmp_path / "tree") == {"turn": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["tree"]


def test_only_checkpoints_are_ever_overwritten(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("years")
    with pytest.raises(CheckpointError, match="precious.*not overwritten"):
        save(tmp_path / "precious", {"a": jnp.ones(2)}, metadata={}, overwrite=True)
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "years"


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr("checkpoints.commit._publish", fails)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "tree", {"a": jnp.ones(2)}, metadata={})
    assert not list(tmp_path.iterdir())


CHILD = """
    import os, signal, sys, threading
    from pathlib import Path
    import jax.numpy as jnp
    from checkpoints import commit, tree

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def die_when_orbax_writes():
        while not any(Path(sys.argv[1]).glob(".tree.tmp-*/arrays*/**/d/*")):
            pass
        die()

    stage, overwrite = sys.argv[2], sys.argv[3] == "overwrite"
    if stage == "arrays":
        threading.Thread(target=die_when_orbax_writes, daemon=True).start()
    else:
        setattr(commit, stage, die)
    size = 1 << 24 if stage == "arrays" else 8  # enough that Orbax can't be done before it dies
    leaves = {str(i): jnp.full((size,), i, jnp.float32) for i in range(6)}
    tree.save(Path(sys.argv[1]) / "tree", leaves, metadata={"turn": 2}, overwrite=overwrite)
"""


def run_child(program: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *args],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    )


@pytest.mark.parametrize(
    ("stage", "overwrite"),
    [
        ("arrays", False),  # Orbax is at work
        ("arrays", True),
        ("_hash", True),  # the arrays are written
        ("_digest", True),  # and hashed
        ("_publish", True),  # and the manifest is written
    ],
)
def test_killed_while_saving(tmp_path, stage, overwrite):
    if overwrite:
        save(tmp_path / "tree", {"a": jnp.ones(2)}, metadata={"turn": 1})
    done = run_child(CHILD, str(tmp_path), stage, "overwrite" if overwrite else "")
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.glob(".tree.tmp-*")
    if stage != "_publish":  # after that, all that is missing is the name
        with pytest.raises(CheckpointError, match="did not finish"):
            restore(left, {"a": jax.ShapeDtypeStruct((2,), jnp.float32)})
    if overwrite:
        assert read_metadata(tmp_path / "tree") == {"turn": 1}
        assert_same({"a": jnp.ones(2)}, restore(tmp_path / "tree", abstract({"a": jnp.ones(2)})))
    else:
        with pytest.raises(CheckpointError, match="no such directory"):
            read_metadata(tmp_path / "tree")


def saved_files(place: Path) -> list[Path]:
    return sorted(p for p in place.rglob("*") if p.is_file() and p.name != MANIFEST)


@pytest.mark.parametrize("fault", ["deleted", "truncated", "changed"])
def test_every_damaged_file_is_found_out(tmp_path, fault):
    """Every single file of a checkpoint in turn, none of them optional."""
    tree = {"a": jnp.arange(1000.0), "b": {"c": jnp.ones((3, 4), jnp.bfloat16)}}
    save(tmp_path / "tree", tree, metadata={})
    files = saved_files(tmp_path / "tree")
    assert len(files) > 3
    for file in files:
        whole = file.read_bytes()
        if fault == "deleted":
            file.unlink()
        elif fault == "truncated":
            file.write_bytes(whole[:-1])
        else:
            middle = len(whole) // 2
            file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        with pytest.raises(CheckpointError, match=file.name):
            restore(tmp_path / "tree", abstract(tree))
        file.write_bytes(whole)
    assert_same(tree, restore(tmp_path / "tree", abstract(tree)))


def edit_manifest(place: Path, **changes: Any) -> None:
    from checkpoints.commit import _digest

    body = json.loads((place / MANIFEST).read_text()) | changes
    body["sha256"] = _digest(body)
    (place / MANIFEST).write_text(json.dumps(body))


def test_the_manifest_guards_itself(tmp_path):
    place = tmp_path / "tree"
    save(place, {"a": jnp.ones(2)}, metadata={"steps": 100})
    text = (place / MANIFEST).read_text()
    (place / MANIFEST).write_text(text.replace("100", "900"))
    with pytest.raises(CheckpointError, match="manifest.json.*digest"):
        read_metadata(place)
    (place / MANIFEST).write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match="manifest.json.*not valid JSON"):
        read_metadata(place)


@pytest.mark.parametrize(
    "changes", [{"format_version": 2}, {"format_version": None}, {"format": "other"}], ids=str
)
def test_other_formats_are_refused(tmp_path, changes):
    save(tmp_path / "tree", {"a": jnp.ones(2)}, metadata={})
    edit_manifest(tmp_path / "tree", **changes)
    for read in (read_metadata, read_target, lambda p: restore(p, abstract({"a": jnp.ones(2)}))):
        with pytest.raises(CheckpointError, match="version.*this version reads"):
            read(tmp_path / "tree")


def test_public_names():
    import checkpoints

    for name in checkpoints.__all__:
        assert callable(getattr(checkpoints, name))
    with pytest.raises(AttributeError, match="no attribute 'read_nothing'"):
        checkpoints.read_nothing  # noqa: B018


def test_importing_the_package_loads_no_library():
    done = run_child("import sys, checkpoints; print(*{'jax', 'numpy', 'orbax'} & {*sys.modules})")
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_read_target(tmp_path):
    params = {"layer_0": {"kernel": jnp.ones((2, 3), jnp.bfloat16)}, "scale": jnp.ones(3)}
    save(tmp_path / "tree", params, metadata={})
    target = read_target(tmp_path / "tree")
    assert target == abstract(params)
    assert_same(params, restore(tmp_path / "tree", target))
    save(tmp_path / "list", {"a": [jnp.ones(2)]}, metadata={})
    with pytest.raises(CheckpointError, match=r"\['a'\]\[0\].*build the target yourself"):
        read_target(tmp_path / "list")


MESHES = """
    import sys, warnings
    warnings.simplefilter("error")
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from checkpoints import CheckpointError
    from checkpoints.tree import restore, save

    devices = np.array(jax.devices())
    assert len(devices) == 4
    row = NamedSharding(Mesh(devices, ("x",)), P("x"))
    square = Mesh(devices.reshape(2, 2), ("x", "y"))
    host = {
        "kernel": np.arange(8 * 12, dtype=np.float32).reshape(8, 12),
        "packed": (np.arange(8 * 12) % 16 - 8).astype(jnp.int4).reshape(8, 12),
        "count": np.int32(2**24 + 1),
        "empty": np.zeros((0, 4), np.float32),
    }
    tree = {name: jax.device_put(x, row if x.ndim and x.size else None) for name, x in host.items()}
    tree["keys"] = jax.random.split(jax.random.key(0), 4)
    host["keys"] = tree["keys"]
    save(sys.argv[1] + "/tree", tree, metadata={})

    def target(**shardings):
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings.get(name))
            for name, x in host.items()
        }

    two = NamedSharding(Mesh(devices[2:], ("x",)), P("x"))
    cases = [
        {},
        dict(kernel=NamedSharding(square, P("y", "x")), packed=NamedSharding(square, P(None, "y"))),
        dict(kernel=NamedSharding(square, P()), count=NamedSharding(square, P())),
        dict(kernel=two, packed=two, keys=two, empty=two),
        dict(kernel=jax.sharding.SingleDeviceSharding(devices[3])),
    ]
    default = jax.sharding.SingleDeviceSharding(devices[0])
    for shardings in cases:
        back = restore(sys.argv[1] + "/tree", target(**shardings))
        for name, leaf in back.items():
            assert leaf.sharding == shardings.get(name, default), (name, leaf.sharding)
            if name == "keys":
                leaf, wanted = jax.random.key_data(leaf), jax.random.key_data(host[name])
            else:
                wanted = host[name]
            assert leaf.dtype == wanted.dtype
            assert np.array_equal(np.asarray(leaf), np.asarray(wanted)), name
    three = NamedSharding(Mesh(devices[:3], ("x",)), P("x"))
    try:
        restore(sys.argv[1] + "/tree", target(kernel=three))
    except CheckpointError as error:
        assert "['kernel']" in str(error) and "sharding" in str(error), error
    else:
        raise AssertionError("8 rows over 3 devices were accepted")
    print("restored", len(cases))
"""


def test_restoring_onto_another_mesh(tmp_path):
    done = run_child(MESHES, str(tmp_path), XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "restored 5"
    assert done.stderr == "", "Orbax is to be quiet"
