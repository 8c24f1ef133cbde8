"""Measures of a cache method, each taken through the cache that the method really keeps.

- `perplexity`: of a text, teacher-forced;
- `needle`: is a hidden word or number found, over a grid of depths and lengths;
- `copy_recall`: the NLL of a passage to be repeated, the most sensitive of the three.
"""

from sparse_jax.evaluate.copying import copy_recall
from sparse_jax.evaluate.memory import cache_bytes, dense_bytes_bf16
from sparse_jax.evaluate.needle import needle
from sparse_jax.evaluate.perplexity import PerplexityResult, perplexity
from sparse_jax.evaluate.recall import RecallResult, Trial
from sparse_jax.evaluate.report import as_dict, describe, heat_map

__all__ = [
    "PerplexityResult",
    "RecallResult",
    "Trial",
    "as_dict",
    "cache_bytes",
    "copy_recall",
    "dense_bytes_bf16",
    "describe",
    "heat_map",
    "needle",
    "perplexity",
]
