"""Hugging Face directories: `config.json` and safetensors, one file or shards with an index.

Reading checks everything that the headers tell (every file there, every tensor once, every shape)
before the first weight is read, then places one tensor at a time; see `checkpoints.raw` for why the
host never holds more than the result and a megabyte.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from checkpoints import keys
from checkpoints.errors import CheckpointError
from checkpoints.raw import CHUNK_BYTES, RawTensor, checked_dtype, equal_bytes, place
from checkpoints.safetensors_file import DTYPES, read_header, read_json, write_file

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_hf(
    path: str | os.PathLike[str], *, dtype: Any = None, progress: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a Llama, Mistral, Qwen2 or Qwen3 checkpoint.

    Args:
      path: directory with `config.json` and `model.safetensors`, or shards and their index.
      dtype: float32, bfloat16 or float16 to read every weight as; None keeps each tensor's bits.
      progress: whether to show a bar of the bytes read.

    Returns:
      (config, params): `config.json` as it stands, and the parameter tree, kernels [in, out], on
      the default device.

    Raises:
      CheckpointError: names the file and the tensor; before any weight is read, except where a file
        changes meanwhile or a value does not fit the dtype asked for.
      ValueError: `dtype` is no dtype for weights.
    """
    wanted = checked_dtype(dtype)
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a directory; give the one that holds {CONFIG}")
    config = read_json(path / CONFIG)
    entries = keys.table(config)
    tensors = [t for t in find_tensors(path) if not keys.IGNORED.fullmatch(t.name)]
    tensors = resolve_tie(tensors, keys.EMBEDDING, keys.LM_HEAD, keys.is_tied(config), path)
    keys.match(
        {entry.key: entry.shape for entry in entries},
        [(tensor.name, tensor.shape) for tensor in tensors],
        where=str(path),
    )
    found = {tensor.name: tensor for tensor in tensors}
    params: dict[str, Any] = {}
    with progress_bar(sum(tensor.nbytes for tensor in tensors), path, progress) as bar:
        for entry in entries:
            tensor = found[entry.key]
            leaf = place([tensor], transpose=entry.transpose, dtype=wanted)
            keys.put(params, entry.path, leaf)
            bar.update(tensor.nbytes)
    return config, params


def progress_bar(nbytes: int, path: Path, shown: bool) -> tqdm:
    return tqdm(
        total=nbytes, desc=f"reading {path.name}", unit="B", unit_scale=True, disable=not shown
    )


def resolve_tie(
    tensors: list[RawTensor], embedding: str, head: str, tied: bool, path: Path
) -> list[RawTensor]:
    """The tensors without a tied model's spare copy of its embedding.

    The four cases: tied without a head, and untied with one, are complete; tied with one is fine
    only where the head is the embedding bit for bit; untied without one lacks weights.
    """
    found = {tensor.name: tensor for tensor in tensors}
    if not tied:
        if head not in found and embedding in found:
            raise CheckpointError(
                f"{path}: {head!r} is missing and config.json says tie_word_embeddings = false (or "
                "leaves it out); a file is missing, or the field must be true"
            )
        return tensors
    if head not in found:
        return tensors
    if embedding in found and not equal_bytes([found[embedding]], [found[head]]):
        raise CheckpointError(
            f"{path}: config.json says tie_word_embeddings = true but {head!r} "
            f"({found[head].file.name}) differs from {embedding!r}; one of the two is wrong"
        )
    return [tensor for tensor in tensors if tensor.name != head]


def find_tensors(path: Path) -> list[RawTensor]:
    """Every tensor of a directory, after checking that index and files agree.

    Raises CheckpointError that names file and tensor: no weights, a shard missing, a tensor that
    is listed and absent, present and not listed, or in two files.
    """
    index, single = path / INDEX, path / SINGLE
    if not index.exists():
        if single.exists():
            return read_header(single)
        others = sorted(p.name for p in path.glob("model-*-of-*.safetensors"))
        if others:
            raise CheckpointError(f"{index}: no such file, but there are shards ({others[0]} ...)")
        raise CheckpointError(
            f"{path}: neither {SINGLE} nor {INDEX} is there; other formats (pytorch_model.bin) "
            "must be converted to safetensors first"
        )

    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    for name, file in listed.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise CheckpointError(
                f"{index}: tensor {name!r} is listed in {file!r}, which is not a plain file name"
            )
    if single.exists() and SINGLE not in listed.values():
        raise CheckpointError(
            f"{path}: holds both {SINGLE} and shards listed in {INDEX}; remove one of the two"
        )
    for file in sorted(set(listed.values())):
        if not (path / file).is_file():
            first = next(name for name, shard in listed.items() if shard == file)
            raise CheckpointError(
                f"{path / file}: no such file, but {INDEX} lists tensor {first!r} (and maybe "
                "others) in it; fetch the missing shard"
            )

    tensors: dict[str, RawTensor] = {}
    for file in sorted(set(listed.values())):
        for tensor in read_header(path / file):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"tensor {tensor.name!r} is in two shards: {tensors[tensor.name].file} and "
                    f"{tensor.file}"
                )
            tensors[tensor.name] = tensor
    for name, file in listed.items():
        if name not in tensors:
            raise CheckpointError(
                f"{path / file}: tensor {name!r} is not in it, but {INDEX} lists it there"
            )
        if tensors[name].file.name != file:
            raise CheckpointError(
                f"{path / file}: tensor {name!r} is not in it, but in {tensors[name].file.name}; "
                f"{INDEX} is wrong"
            )
    for name, tensor in tensors.items():
        if name not in listed:
            raise CheckpointError(f"{tensor.file}: tensor {name!r} is not listed in {INDEX}")
    return list(tensors.values())


def write_hf(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    params: Mapping[str, Any],
    *,
    max_shard_bytes: int = 5_000_000_000,
    progress: bool = False,
) -> None:
    """Writes a directory that `read_hf` and transformers read back, bit for bit.

    `config.json` is the config as given, except that a `dtype` or `torch_dtype` in it that is not
    the weights' is corrected, since transformers would cast to it. It is written last: without it
    a directory is not complete.

    Args:
      path: a directory, made if need be; it must not hold a model yet.
      config: Hugging Face vocabulary; must be JSON.
      params: the parameter tree, float32, bfloat16 or float16.
      max_shard_bytes: files are split so as to stay below this, one tensor each at least.
      progress: whether to show a bar of the bytes written.

    Raises:
      CheckpointError: the tree is not what the config describes, or `path` holds a model.
      ValueError: `max_shard_bytes` is not positive.
      TypeError: the config is not JSON.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes}: must be positive")
    path = Path(path)
    entries = keys.table(config)
    leaves = {"/".join(place): leaf for place, leaf in keys.leaves(params)}
    keys.match(
        {"/".join(entry.path): entry.tree_shape for entry in entries},
        [(name, leaf.shape) for name, leaf in leaves.items()],
        where="the parameter tree",
    )
    for name, leaf in leaves.items():
        if np.dtype(leaf.dtype) not in DTYPES.values():
            raise CheckpointError(
                f"parameter tree: {name} is {leaf.dtype}; only float32, bfloat16 and float16 can "
                "be written"
            )
    text = json.dumps(_with_true_dtype(config, leaves), indent=2, sort_keys=True) + "\n"
    _check_free(path)
    path.mkdir(parents=True, exist_ok=True)

    shards: list[list[keys.Entry]] = []
    filled = max_shard_bytes
    for entry in entries:
        nbytes = leaves["/".join(entry.path)].nbytes
        if not shards or filled + nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += nbytes
    total = sum(leaf.nbytes for leaf in leaves.values())
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE]
    with tqdm(
        total=total, desc=f"writing {path.name}", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for name, shard in zip(names, shards, strict=True):
            mine = {entry.key: leaves["/".join(entry.path)] for entry in shard}
            write_file(
                path / name,
                {entry.key: (np.dtype(mine[entry.key].dtype), entry.shape) for entry in shard},
                (_pieces(mine[entry.key], entry.transpose, bar) for entry in shard),
            )
    if len(shards) > 1:
        listed = {e.key: name for name, shard in zip(names, shards, strict=True) for e in shard}
        index = {"metadata": {"total_size": total}, "weight_map": listed}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    part = path / (CONFIG + ".part")
    part.write_text(text)
    os.replace(part, path / CONFIG)


def _check_free(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path}: is a file; give a directory")
    if path.is_dir():
        taken = [
            p.name
            for p in sorted(path.iterdir())
            if p.name in (CONFIG, INDEX) or p.suffix == ".safetensors"
        ]
        if taken:
            raise CheckpointError(
                f"{path}: already holds {taken[0]}; give another directory or remove the model"
            )


def _with_true_dtype(config: Mapping[str, Any], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its note on the weights' dtype corrected; where weights are of several, the
    one that holds them all (transformers casts a model to one dtype)."""
    result = dict(config)
    dtypes = {str(np.dtype(leaf.dtype)) for leaf in leaves.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    stated = [result[name] for name in ("dtype", "torch_dtype") if name in result]
    if any(value != dtype for value in stated):
        result.pop("torch_dtype", None)
        result["dtype"] = dtype
    return result


def _pieces(leaf: Any, transpose: bool, bar: tqdm) -> Iterator[np.ndarray]:
    # A copy, since `np.asarray` of a jax array keeps the host's copy alive as long as the array.
    host = np.asarray(leaf.copy())
    rows = host.T if transpose else host.reshape(host.shape[0], -1)
    step = max(CHUNK_BYTES // max(rows[:1].nbytes, 1), 1)
    for start in range(0, len(rows), step):
        piece = np.ascontiguousarray(rows[start : start + step])
        yield piece
        bar.update(piece.nbytes)
