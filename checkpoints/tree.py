"""Any pytree of arrays, saved and restored through Orbax. The only file that imports Orbax.

Orbax stores what it is given and casts to whatever it is asked for: an int32 asked for as float32
loses counts above 2^24 without a word, and a structure is matched by names of its own making. So
the leaves go to Orbax as a flat list, and what they are (path, shape, dtype) stands in the manifest
of `checkpoints.commit`, next to the caller's metadata; `restore` compares all of it with the target
before a byte of an array is read.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.tree_util import DictKey, keystr, tree_flatten_with_path, tree_unflatten

from checkpoints.commit import check_destination, read_manifest, verify_contents, write_directory
from checkpoints.errors import CheckpointError

FORMAT = "sparse-jax tree"
FORMAT_VERSION = 1
_ARRAYS = "arrays"

# What Orbax keeps bit for bit (tested one by one). PRNG keys are kept as their uint32 data.
_DTYPES = frozenset(
    "bool int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float16 "
    "bfloat16 float32 float64 complex64 complex128".split()
)


def save(
    path: str | os.PathLike[str], tree: Any, *, metadata: dict[str, Any], overwrite: bool = False
) -> None:
    """Saves a pytree; `path` appears, complete, at the end, or not at all.

    Args:
      path: a directory that does not exist yet.
      tree: any pytree: dicts, lists, tuples, NamedTuples, registered dataclasses. Its leaves are
        jax or NumPy arrays of any shape (also 0-d, also empty) or PRNG keys. Static fields of nodes
        are not saved: they come from the target at restore.
      metadata: JSON, kept with the tree and given back by `read_metadata` as it is.
      overwrite: whether to replace a checkpoint that is already there, in one step at the end.

    Raises:
      TypeError: a leaf is no array, or the metadata is not plain JSON.
      CheckpointError: a leaf can't be kept bit for bit, or `path` is taken.
    """
    path = _absolute(path)
    check_destination(path, overwrite)
    _check_json(metadata)
    described: dict[str, dict[str, Any]] = {}
    arrays: dict[str, jax.Array] = {}
    for i, (place, leaf) in enumerate(tree_flatten_with_path(tree)[0]):
        name = keystr(place)
        array = _checked_leaf(name, leaf)
        if name in described:
            raise CheckpointError(f"two leaves are called {name}; their keys print the same")
        entry = {"path": name, "dtype": str(array.dtype), "shape": list(array.shape)}
        if all(isinstance(key, DictKey) and isinstance(key.key, str) for key in place):
            entry["keys"] = [key.key for key in place]
        if _is_key(array.dtype):
            entry["key_impl"] = jax.random.key_impl(array)
        if array.size:  # Orbax refuses empty arrays; their shape is all there is to them
            entry["stored"] = f"{i:05d}" + re.sub(r"[^A-Za-z0-9]+", "_", name)
            arrays[entry["stored"]] = _data(array)
        described[name] = entry

    def fill(folder: Path) -> dict[str, Any]:
        if arrays:
            with _quiet(), _checkpointer() as checkpointer:
                checkpointer.save(folder / _ARRAYS, args=ocp.args.PyTreeSave(arrays))
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "metadata": metadata,
            "leaves": list(described.values()),
        }

    write_directory(path, fill, overwrite=overwrite)


def restore(path: str | os.PathLike[str], target: Any) -> Any:
    """Restores a pytree into exactly the structure, shapes, dtypes and placement of `target`.

    Args:
      path: a directory made by `save`.
      target: pytree of `jax.ShapeDtypeStruct`. A leaf with a sharding is put there, whatever
        devices it was saved from; one without is put on the default device.

    Returns:
      The tree of jax arrays, nodes of the target's types.

    Raises:
      TypeError: a leaf of the target is not a ShapeDtypeStruct.
      CheckpointError: names the leaf or the file: another structure, shape or dtype than saved
        (nothing is ever cast), a sharding that does not divide a shape, an unfinished save, a file
        missing or changed, a format of another version.
    """
    path = _absolute(path)
    manifest = _manifest(path)
    wanted, treedef = tree_flatten_with_path(target)
    default = jax.device_put(np.zeros((), np.bool_)).sharding
    saved = {entry["path"]: entry for entry in manifest["leaves"]}
    _check_structure(path, saved, [keystr(place) for place, _ in wanted])
    for place, leaf in wanted:
        _check_target(path, keystr(place), leaf, saved[keystr(place)])
    verify_contents(path, manifest)

    stored = {
        saved[keystr(place)]["stored"]: jax.eval_shape(_data, leaf)
        for place, leaf in wanted
        if leaf.size
    }
    shardings = {
        saved[keystr(place)]["stored"]: default
        if leaf.sharding is None or _is_key(leaf.dtype)
        else leaf.sharding
        for place, leaf in wanted
        if leaf.size
    }
    arrays = {}
    if stored:
        with _quiet(), _checkpointer() as checkpointer:
            arrays = checkpointer.restore(
                path / _ARRAYS,
                args=ocp.args.PyTreeRestore(
                    item=stored,
                    restore_args={
                        name: ocp.ArrayRestoreArgs(
                            sharding=shardings[name], global_shape=leaf.shape, dtype=leaf.dtype
                        )
                        for name, leaf in stored.items()
                    },
                ),
            )

    def finish(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        sharding = default if leaf.sharding is None else leaf.sharding
        if not leaf.size:
            return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), sharding)
        array = arrays.pop(saved[name]["stored"])
        if _is_key(leaf.dtype):
            array = jax.random.wrap_key_data(array, impl=saved[name]["key_impl"])
        if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            raise AssertionError(f"{path}: leaf {name} came back as {array.dtype}{array.shape}")
        return array if array.sharding == sharding else jax.device_put(array, sharding)

    return tree_unflatten(treedef, [finish(keystr(place), leaf) for place, leaf in wanted])


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata that a tree was saved with, without reading the tree.

    Raises CheckpointError as `restore` does, but notices files of a wrong size only, not changed
    contents.
    """
    return _manifest(_absolute(path))["metadata"]


def read_target(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a saved tree of dicts looks like: the same nested dict, of `jax.ShapeDtypeStruct`.

    For a reader which does not know the dtypes yet. It still has to compare them with what it
    expects: a target made from the checkpoint always fits the checkpoint.

    Raises CheckpointError where the tree is not made of dicts with string keys and plain arrays.
    """
    path = _absolute(path)
    result: dict[str, Any] = {}
    for entry in _manifest(path)["leaves"]:
        keys = entry.get("keys")
        if not keys or entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"{path}: leaf {entry['path'] or 'at the top'} ({entry['dtype']}) is not an array "
                "in dicts with string keys; build the target yourself"
            )
        node = result
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = jax.ShapeDtypeStruct(tuple(entry["shape"]), jnp.dtype(entry["dtype"]))
    return result


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(path))


def _manifest(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    found = (manifest.get("format"), manifest.get("format_version"))
    if found != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(
            f"{path}: format {found[0]!r} version {found[1]!r}; this version reads {FORMAT!r} "
            f"version {FORMAT_VERSION}: update, or save the tree again"
        )
    return manifest


def _checkpointer() -> ocp.Checkpointer:
    # Weights hardly compress (8 % with zstd) and loading them is held up by it.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)
    return ocp.Checkpointer(handler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs what it then raises as well; only the exception is of use to a caller."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _data(array: Any) -> Any:
    return jax.random.key_data(array) if _is_key(array.dtype) else array


def _check_json(metadata: Any) -> None:
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata is a {type(metadata).__name__}; it must be a dict")
    for name, value in metadata.items():
        try:
            same = json.loads(json.dumps({name: value}, allow_nan=False)) == {name: value}
        except (TypeError, ValueError) as error:
            raise TypeError(f"metadata[{name!r}] is not JSON: {error}") from None
        if not same:
            raise TypeError(
                f"metadata[{name!r}] = {value!r} would come back from JSON as something else; use "
                "lists for tuples and strings for keys"
            )


def _checked_leaf(name: str, leaf: Any) -> jax.Array:
    """The leaf as a jax array of the same bits."""
    if isinstance(leaf, np.ndarray | np.generic):
        if not leaf.dtype.isnative:
            raise CheckpointError(f"leaf {name} has dtype {leaf.dtype!r}, of another byte order")
        if leaf.dtype.name in _DTYPES and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise CheckpointError(
                f"leaf {name} is a NumPy array of {leaf.dtype}, which JAX would cast; cast it "
                "yourself or enable jax_enable_x64"
            )
    elif not isinstance(leaf, jax.Array):
        raise TypeError(
            f"leaf {name} is a {type(leaf).__name__}, not an array; give it a dtype with "
            "jnp.asarray(value, dtype), or make it a static field"
        )
    elif leaf.is_deleted():
        raise CheckpointError(f"leaf {name} was deleted or donated; save it before that")
    elif not leaf.is_fully_addressable:
        raise CheckpointError(f"leaf {name} lies on devices of other processes; gather it first")
    if leaf.dtype.name not in _DTYPES and not _is_key(leaf.dtype):
        raise CheckpointError(
            f"leaf {name} has dtype {leaf.dtype}, which can't be stored bit for bit; view it as an "
            "integer type first"
        )
    if _is_key(leaf.dtype) and not isinstance(jax.random.key_impl(cast(Any, leaf)), str):
        raise CheckpointError(f"leaf {name} is a PRNG key of an implementation without a name")
    return leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf)


def _check_structure(path: Path, saved: dict[str, Any], wanted: list[str]) -> None:
    faults = []
    if len(set(wanted)) < len(wanted):
        faults.append("two leaves of the target have the same name")
    if missing := sorted(set(wanted) - saved.keys()):
        faults.append(f"not in the checkpoint: {missing[0]} ({len(missing)} in all)")
    if unexpected := sorted(saved.keys() - set(wanted)):
        faults.append(f"not in the target: {unexpected[0]} ({len(unexpected)} in all)")
    if faults:
        raise CheckpointError(f"{path}: another tree than the target; {'; '.join(faults)}")


def _check_target(path: Path, name: str, leaf: Any, saved: dict[str, Any]) -> None:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError(
            f"target leaf {name} is a {type(leaf).__name__}; it must be a jax.ShapeDtypeStruct "
            "(jax.eval_shape makes a tree of them)"
        )
    if list(leaf.shape) != saved["shape"] or str(leaf.dtype) != saved["dtype"]:
        raise CheckpointError(
            f"{path}: leaf {name} was saved as {saved['dtype']}{saved['shape']} but the target "
            f"asks for {leaf.dtype}{list(leaf.shape)}; nothing is cast or reshaped on the way, do "
            "that after restoring"
        )
    if not _is_key(leaf.dtype) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        raise CheckpointError(
            f"{path}: leaf {name} is {leaf.dtype}, which JAX holds only with jax_enable_x64"
        )
    if leaf.sharding is not None:
        try:
            leaf.sharding.shard_shape(leaf.shape)
        except ValueError as error:
            raise CheckpointError(
                f"{path}: leaf {name} of shape {list(leaf.shape)} does not fit its sharding: "
                f"{error}"
            ) from None
