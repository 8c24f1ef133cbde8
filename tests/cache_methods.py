"""The cache methods under test: a new one enrols by a line in METHODS, with a budget that covers
208 tokens a row. There it must be dense."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TOLERANCE

from sparse_jax.caches import (
    H2O,
    Cache,
    Dense,
    PyramidKV,
    SnapKV,
    Strided,
    Window,
    empty_cache,
)
from sparse_jax.config import ModelConfig
from sparse_jax.sampling import SamplingParams

METHODS = [
    Dense(),
    Dense(page=16),
    Window(window=204),
    Strided(window=16, stride=1, sinks=2),
    SnapKV(budget=208),
    PyramidKV(budget=208, window=16),
    H2O(budget=208, window=64),
]
every_method = pytest.mark.parametrize("method", METHODS, ids=repr)


def with_values(names: str, common: list, more: list):
    """Every method with the common values, and Dense(), the oracle of the others, with more: each
    value is a compile, and each method is to cost about half a minute."""
    cases = [(method, value) for method in METHODS for value in common]
    cases += [(Dense(), value) for value in more]
    flat = [(m, *(v if isinstance(v, tuple) else (v,))) for m, v in cases]
    return pytest.mark.parametrize("method," + names, flat, ids=str)


# One layer: compiles take half the time. `test_windows_of_the_model` has two.
CONFIG = ModelConfig.tiny(num_layers=1)
GREEDY = SamplingParams(max_new_tokens=8, logprobs=True)


def new_cache(method, rows: int, capacity: int = 80, config: ModelConfig = CONFIG) -> Cache:
    """Empty, and all memory that will hold keys or values is NaN until written."""
    cache = empty_cache(method, config, rows, capacity, jnp.float32)

    def poison(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.asarray(np.full(leaf.shape, np.nan, leaf.dtype))

    return dataclasses.replace(cache, state=jax.tree.map(poison, cache.state))


def near(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
