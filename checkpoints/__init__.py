"""Checkpoint files in, plain trees out, and back.

Every reader returns a config dict in the vocabulary of Hugging Face's `config.json` and a
parameter tree (nested dict of jax arrays). The formats live in modules of their own, imported
where they are used, so that importing this package costs nothing:

- `checkpoints.hf`: Hugging Face safetensors, one file or shards, both ways
- `checkpoints.meta`: Meta's original layout (`params.json` + `consolidated.*`)
- `checkpoints.tree`: any pytree, through Orbax
- `checkpoints.keys`: Hugging Face key <-> path in the parameter tree
"""

from checkpoints.errors import CheckpointError

__all__ = ["CheckpointError"]
