"""Checkpoint files in, plain trees out, and back.

Every reader returns a config dict in the vocabulary of Hugging Face's `config.json` and a
parameter tree (nested dict of jax arrays). Each format is a module of its own, loaded when one of
its names is first used, so that importing this package costs nothing:

- `checkpoints.hf`: Hugging Face safetensors, one file or shards, both ways
- `checkpoints.meta`: Meta's original layout (`params.json` + `consolidated.*`)
- `checkpoints.tree`: any pytree, through Orbax
- `checkpoints.keys`: Hugging Face key <-> path in the parameter tree
"""

import importlib
from typing import TYPE_CHECKING, Any

from checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    from checkpoints.hf import read_hf, write_hf
    from checkpoints.meta import read_meta
    from checkpoints.tree import read_metadata, read_target, restore, save

__all__ = [
    "CheckpointError",
    "read_hf",
    "read_meta",
    "read_metadata",
    "read_target",
    "restore",
    "save",
    "write_hf",
]

_MODULES = {
    "read_hf": "hf",
    "write_hf": "hf",
    "read_meta": "meta",
    "read_metadata": "tree",
    "read_target": "tree",
    "restore": "tree",
    "save": "tree",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
