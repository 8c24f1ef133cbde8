"""Small checkpoints for the tests, written without the package under test."""

import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from golden.weights import weight

GOLDEN = Path(__file__).parent / "golden"
BF16 = np.dtype(jnp.bfloat16)


def hf_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """key -> shape of what transformers stores for a model of `golden/cases.py`."""
    shapes = json.loads((GOLDEN / "hf_keys.json").read_text())[name]
    return {key: tuple(shape) for key, shape in shapes.items()}


def hf_state(name: str, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """key -> weights of such a model."""
    return {key: weight(key, shape).astype(dtype) for key, shape in hf_shapes(name).items()}


def header_of(state: dict[str, np.ndarray]) -> dict[str, Any]:
    """The safetensors header of these tensors, one after the other."""
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32"}
    header, position = {}, 0
    for name, tensor in state.items():
        header[name] = {
            "dtype": names[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    return header


def write_tensors(file: Path, state: dict[str, np.ndarray], header: str | None = None) -> None:
    """A safetensors file, with its own header or a (faulty) one that is given."""
    text = (json.dumps(header_of(state)) if header is None else header).encode()
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in state.values():
            stream.write(np.ascontiguousarray(tensor).tobytes())


def write_hf_directory(
    folder: Path, config: dict[str, Any], shards: list[dict[str, np.ndarray]]
) -> Path:
    """config.json and one file, or several and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        write_tensors(folder / "model.safetensors", shards[0])
        return folder
    listed = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard)
        listed |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": listed})
    )
    return folder


def assert_same(left: Any, right: Any) -> None:
    """Equal structure, shapes, dtypes and bits, of two parameter trees."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for path, a in jax.tree.leaves_with_path(left):
        b = right
        for key in path:
            b = b[key.key]
        where = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), where
