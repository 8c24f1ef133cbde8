"""Cache methods, one a file, behind the protocol of `base.py`."""

from sparse_jax.caches.base import (
    Cache,
    CacheMethod,
    Projections,
    Span,
    empty_cache,
    fork,
    truncate,
)
from sparse_jax.caches.dense import Dense
from sparse_jax.caches.strided import Strided
from sparse_jax.caches.window import Window

__all__ = [
    "Cache",
    "CacheMethod",
    "Dense",
    "Projections",
    "Span",
    "Strided",
    "Window",
    "empty_cache",
    "fork",
    "truncate",
]
