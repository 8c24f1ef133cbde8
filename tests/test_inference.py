"""`forward`, `prefill` and `decode_step`: agreement, and refusals before anything compiles."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiles import count_compiles
from tiny_models import random_params

from sparse_jax.caches import Dense, empty_cache
from sparse_jax.config import ModelConfig, RopeConfig
from sparse_jax.inference import decode_step, finish_prefill, forward, prefill
from sparse_jax.model import abstract_params, init_params

CONFIG = ModelConfig.tiny(num_layers=1)
ONE = jnp.ones(1, jnp.int32)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


def batch_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab_size, (len(lengths), max(lengths))).astype(np.int32)
    return jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)


def new_cache(config=CONFIG, rows=1, capacity=32, dtype=jnp.float32):
    return empty_cache(Dense(page=16), config, rows, capacity, dtype)


def test_the_abstract_tree_is_the_parameters_own():
    abstract = abstract_params(CONFIG, jnp.float32)
    made = init_params(jax.random.key(0), CONFIG, jnp.float32)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), made) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract
    )


@pytest.mark.parametrize("chunk", [None, 3])
def test_last_logits_are_those_of_each_rows_last_token(params, chunk):
    tokens, counts = batch_of([9, 4])
    every, _ = prefill(params, new_cache(rows=2), tokens, counts, config=CONFIG, logits="all",
                       chunk=chunk)  # fmt: skip
    last, cache = prefill(params, new_cache(rows=2), tokens, counts, config=CONFIG, chunk=chunk)
    assert every.shape == (2, 9, CONFIG.vocab_size)
    for row, count in enumerate([9, 4]):
        np.testing.assert_allclose(last[row], every[row, count - 1], atol=1e-6)
    assert cache.lengths.tolist() == [9, 4]
    assert finish_prefill(cache, config=CONFIG).lengths.tolist() == [9, 4]


def test_bfloat16_is_near_float32(params):
    tokens, counts = batch_of([9])
    exact = forward(params, tokens, counts, config=CONFIG)
    half = random_params(CONFIG, "bfloat16")
    logits, cache = prefill(half, new_cache(dtype=jnp.bfloat16), tokens, counts, config=CONFIG,
                            logits="all")  # fmt: skip
    assert logits.dtype == jnp.float32
    # bfloat16 keeps 8 bits: 2^-8 of the largest logit for each of a handful of roundings.
    assert float(jnp.abs(logits - exact).max()) < 0.03 * float(jnp.abs(exact).max())
    stepped, cache = decode_step(half, cache, ONE, config=CONFIG)
    assert stepped.dtype == jnp.float32 and cache.lengths.tolist() == [10]


def test_dynamic_rope_is_fixed_for_a_length_and_then_chunks_do_not_matter(params):
    rope = RopeConfig(kind="dynamic", factor=4.0)
    config = ModelConfig.tiny(num_layers=1, max_positions=16, rope=rope)
    tokens, counts = batch_of([24])
    with pytest.raises(ValueError, match="capacity = 32 .* context is 16"):
        new_cache(config)
    fixed = config.at_context(32)
    whole, _ = prefill(params, new_cache(fixed), tokens, counts, config=fixed, logits="all")
    parts, _ = prefill(params, new_cache(fixed), tokens, counts, config=fixed, logits="all",
                       chunk=5)  # fmt: skip
    np.testing.assert_allclose(whole, parts, atol=1e-5)
    oracle = forward(params, tokens, counts, config=fixed)
    np.testing.assert_allclose(whole, oracle, atol=1e-5)
    # The plain config stretches by the row's own length, 24: another result.
    assert float(jnp.abs(forward(params, tokens, counts, config=config) - oracle).max()) > 1e-3


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda p, c: prefill(p, c, cast(Any, np.ones((1, 3))), ONE, config=CONFIG),
         "tokens is float64"),
        (lambda p, c: prefill(p, c, jnp.full((1, 3), 64), ONE, config=CONFIG), "token id 64"),
        (lambda p, c: prefill(p, c, jnp.full((2, 3), 1), jnp.ones(2, jnp.int32), config=CONFIG),
         "2 rows of tokens for a cache of 1"),
        (lambda p, c: prefill(p, c, jnp.ones((1, 40), jnp.int32), 40 * ONE, config=CONFIG),
         "0 tokens held \\+ 40 given \\+ 0 to generate = 40, beyond the cache's capacity of 32"),
        (lambda p, c: prefill(p, c, jnp.ones((1, 3), jnp.int32), ONE, config=CONFIG,
                              logits=cast(Any, "no")),
         "logits = 'no'"),
        (lambda p, c: prefill(p, c, jnp.ones((1, 3), jnp.int32), ONE, config=CONFIG, chunk=-1),
         "chunk = -1"),
        (lambda p, c: decode_step(p, c, jnp.full(1, -5), config=CONFIG), "token id -5"),
        (lambda p, c: decode_step(p, c, jnp.ones((1, 1), jnp.int32), config=CONFIG),
         r"tokens has shape \(1, 1\); expected \[B\]"),
        (lambda p, c: forward(p, jnp.full((1, 2), 99), ONE, config=CONFIG), "token id 99"),
        (lambda p, c: forward({**p, "final_norm": {"scale": jnp.ones(64, jnp.int8)}},
                              jnp.ones((1, 2), jnp.int32), ONE, config=CONFIG),
         "params hold float32, int8"),
    ],
)  # fmt: skip
def test_bad_input_is_named_before_anything_compiles(params, call, named):
    cache = new_cache()
    jax.block_until_ready(cache)
    with pytest.raises((ValueError, TypeError), match=named):
        call(params, cache)
    # Nothing ran: the cache wasn't donated, and is still empty.
    assert cache.lengths.tolist() == [0]


def test_a_refused_call_compiles_nothing(params):
    cache, tokens, counts = new_cache(), np.full((1, 3), 64, np.int32), np.ones(1, np.int32)
    with count_compiles() as compiles, pytest.raises(ValueError, match="token id 64"):
        prefill(params, cache, tokens, counts, config=CONFIG)  # type: ignore[arg-type]
    assert compiles.value == 0


def test_a_cache_of_another_dtype_is_refused(params):
    tokens, counts = batch_of([4])
    with pytest.raises(TypeError, match="the model's keys are float32, the cache is bfloat16"):
        prefill(params, new_cache(dtype=jnp.bfloat16), tokens, counts, config=CONFIG)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"batch": 0}, "batch = 0"), ({"capacity": 0}, "capacity = 0"),
        ({"capacity": 1025}, "capacity = 1025 tokens, but the model's context is 1024"),
        ({"dtype": jnp.int8}, "cache dtype"),
    ],
)  # fmt: skip
def test_a_cache_that_cannot_be_is_refused(options, named):
    wanted = {"batch": 1, "capacity": 16, "dtype": jnp.float32, **options}
    with pytest.raises((ValueError, TypeError), match=named):
        empty_cache(Dense(), CONFIG, wanted["batch"], wanted["capacity"], wanted["dtype"])
    with pytest.raises(ValueError, match="page = 0"):
        Dense(page=0)
