"""Refusals shared by the evaluations, all of them before anything is compiled."""

from collections.abc import Sequence

import numpy as np

from sparse_jax.caches.base import context_limit
from sparse_jax.checks import check_ids
from sparse_jax.config import ModelConfig


def check_text(tokens: Sequence[int] | np.ndarray, config: ModelConfig) -> np.ndarray:
    """A text's ids as int32 [N]; refuses anything but one row of ids of the vocabulary."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(f"a text is one row of token ids, at least one; got shape {ids.shape}")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"token ids are integers; got {ids.dtype}")
    check_ids(ids, config)
    return ids.astype(np.int32)


def check_context(context: int, config: ModelConfig) -> None:
    """Refuses a context without room to predict a token, and one longer than the model's."""
    limit = context_limit(config)
    if not 2 <= context <= limit:
        raise ValueError(f"context={context} must lie between 2 and the model's {limit} tokens")
