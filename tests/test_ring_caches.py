"""Window and Strided beyond their budget: exactly dense attention under the mask of the kept."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_numpy import visible
from cache_methods import new_cache
from feeding import feed_rows

from sparse_jax.caches import Projections, Span, Strided, Window
from sparse_jax.config import ModelConfig

LENGTH = 74

CASES = [
    (Window(window=8, sinks=4), None),
    (Window(window=8, sinks=0), None),
    (Window(window=1, sinks=1), None),
    (Window(window=8, sinks=4), 5),  # the model's own window is the smaller one
    (Window(window=8, sinks=12), 20),  # and the larger one: some sinks are within it
    (Strided(window=8, stride=5, sinks=4), None),
    (Strided(window=3, stride=4, sinks=0), None),
    (Strided(window=8, stride=32, sinks=2), None),
    (Strided(window=8, stride=5, sinks=4), 6),
    (Strided(window=8, stride=5, sinks=4), 21),
    (Window(window=68, sinks=2), None),  # slots on more than one page
    (Strided(window=60, stride=1, sinks=0), 63),
]
each = pytest.mark.parametrize("method,limit", CASES, ids=str)


@functools.cache
def projections(heads=6, kv_heads=2, dim=16, rows=2):
    rng = np.random.default_rng(0)
    shapes = [(heads,), (kv_heads,), (kv_heads,)]
    return [rng.normal(size=(rows, LENGTH, *s, dim)).astype(np.float32) for s in shapes]


def expected(method, limit):
    """Query by query over the positions that the rule leaves, in float64."""
    query, key, value = projections()
    out = np.zeros(query.shape)
    for t in range(LENGTH):
        seen = visible(t, method.window, method.sinks, method.stride)
        seen = [s for s in seen if limit is None or t - s < limit]
        for h in range(6):
            scores = np.einsum("bd,bsd->bs", query[:, t, h], key[:, seen, h // 3]) / 4.0
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            out[:, t, h] = np.einsum("bs,bsd->bd", weights, value[:, seen, h // 3])
    return out


@functools.cache
def run(method, limit, chunk, steps, ends=(LENGTH, 50)):
    """Feeds rows of 74 and 50 tokens in chunks, the last `steps` of them one by one."""
    config = ModelConfig.tiny(
        num_layers=1, windows=(limit,), num_heads=6, num_kv_heads=2, hidden_size=96
    )
    state = new_cache(method, 2, 80, config).state
    return feed_rows(method, config, state, projections(), ends, chunk=chunk, steps=steps)


# Chunk and steps of decode behind the chunks.
WAYS = [(80, 0), (7, 0), (7, 54)]


@each
def test_attention_is_dense_under_the_mask(method, limit):
    """By one chunk, by several, and token by token; float32 sums in another order."""
    right = expected(method, limit)
    for way in WAYS:
        out, state = run(method, limit, *way)
        np.testing.assert_allclose(out[0], right[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(out[1, :50], right[1, :50], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(state.lengths, [74, 50])


@each
def test_chunks_leave_the_same_state(method, limit):
    first, *others = (run(method, limit, *way)[1] for way in WAYS)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


def test_kept_tokens_are_bit_equal_to_those_they_came_from():
    """300 tokens through a budget of 128: position 300, and each slot holds its own token."""
    method = Window(window=124, sinks=4)
    config = ModelConfig.tiny(num_layers=1, max_positions=512)
    state = new_cache(method, 1, 304, config).state
    rng = np.random.default_rng(0)
    key = rng.normal(size=(1, 300, config.num_kv_heads, config.head_dim)).astype(np.float32)
    query = rng.normal(size=(1, 300, config.num_heads, config.head_dim)).astype(np.float32)
    decode = jax.jit(functools.partial(method.decode, config, layer=0))
    one = jnp.ones(1, jnp.int32)
    for t in range(300):
        part = [jnp.asarray(x[:, t : t + 1]) for x in (query, key)]
        _, state = decode(
            state=state,
            projected=Projections(part[0], part[1], part[1], part[1]),
            span=Span(state.lengths, one),
        )
        state = method.advance(config, state, one)
    assert int(state.lengths[0]) == 300
    held = np.asarray(state.keys[0]).reshape(-1, config.num_kv_heads, 128, config.head_dim)
    kept = {tuple(row) for row in held[0, 0]}
    assert kept == {tuple(row) for row in key[0, [*range(4), *range(176, 300)], 0]}


def test_sinks_are_seen_in_prefill():
    """Sinks 4, window 8, uniform scores: query 31 weighs 1/12 on 0 ... 3 and 24 ... 31."""
    method = Window(window=8, sinks=4)
    config = ModelConfig.tiny(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32)
    values: Any = np.eye(32, dtype=np.float32)[None, :, None]
    zeros: Any = np.zeros_like(values)
    weights = np.zeros(32)
    weights[[*range(4), *range(24, 32)]] = 1 / 12
    prefill = jax.jit(functools.partial(method.prefill, config, layer=0))
    for chunk in (1, 3, 32):
        state = new_cache(method, 1, 32, config).state
        for at in range(0, 32, chunk):
            part = slice(at, at + chunk)
            size = values[:, part].shape[1]
            span = Span(state.lengths, jnp.full(1, size, jnp.int32))
            out, state = prefill(
                state=state,
                projected=Projections(*(x[:, part] for x in (zeros, zeros, zeros, values))),
                span=span,
            )
            state = method.advance(config, state, span.counts)
            if at == 0 and chunk == 3:  # a prompt shorter than the sinks
                np.testing.assert_allclose(out[0, 2, 0, :4], [1 / 3, 1 / 3, 1 / 3, 0], atol=1e-6)
        np.testing.assert_allclose(out[0, -1, 0], weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Window(window=0), "Window: window = 0"),
        (lambda: Window(sinks=-1), "Window: sinks = -1"),
        (lambda: Window(window=1.5),  # type: ignore[arg-type]
         "Window: window = 1.5"),
        (lambda: Strided(stride=0), "Strided: stride = 0"),
        (lambda: new_cache(Window(window=10**6), 1), "window = 1000000 tokens, but the model's"),
    ],
)
def test_bad_options_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
