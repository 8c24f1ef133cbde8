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
from sparse_jax.caches.h2o import H2O
from sparse_jax.caches.pyramidkv import PyramidKV
from sparse_jax.caches.snapkv import SnapKV
from sparse_jax.caches.strided import Strided
from sparse_jax.caches.window import Window

__all__ = [
    "Cache",
    "CacheMethod",
    "Dense",
    "H2O",
    "Projections",
    "PyramidKV",
    "SnapKV",
    "Span",
    "Strided",
    "Window",
    "empty_cache",
    "fork",
    "truncate",
]
