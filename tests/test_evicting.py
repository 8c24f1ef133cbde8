"""SnapKV, PyramidKV and H2O beyond their budgets: what they keep is what the papers' rules say, and
attention is dense attention under the mask of what is kept."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_methods import new_cache
from feeding import feed_rows, feeder

from sparse_jax.caches import H2O, Projections, PyramidKV, SnapKV, Span
from sparse_jax.caches.choosing import best_positions
from sparse_jax.caches.kept import held_positions
from sparse_jax.config import ModelConfig

HEADS, KV_HEADS, DIM = 6, 2, 16
LENGTHS = (300, 171)


def config(layers=1, limit=None) -> ModelConfig:
    return ModelConfig.tiny(
        num_layers=layers,
        windows=(limit,) * layers,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        hidden_size=96,
        max_positions=512,
    )


@functools.cache
def projections() -> Any:
    """Queries, keys, values of two rows; scores with a spread, so that choices have margins."""
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.normal(size=(2, LENGTHS[0], heads, DIM)).astype(np.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return 2 * query, key, value


def weights_of(query, keys):
    """Softmax of one query over keys, float64: [s]."""
    scores = keys.astype(np.float64) @ query.astype(np.float64) / np.sqrt(DIM)
    each = np.exp(scores - scores.max())
    return each / each.sum()


def run(method, model, chunk, steps=0):
    """The two rows in chunks, the last `steps` tokens one by one (of the first row only)."""
    state = new_cache(method, 2, 304, model).state
    return feed_rows(method, model, state, projections(), LENGTHS, chunk=chunk, steps=steps)


def h2o_reference(method, row, length, limit):
    """Token by token, head by head, with lists: outputs [T, H, D] and what is held at the end."""
    query, key, value = (each[row] for each in projections())
    out = np.zeros((length, HEADS, DIM))
    kept = []
    group = HEADS // KV_HEADS
    for head in range(KV_HEADS):
        held: list[int] = []
        mass: dict[int, float] = {}
        for t in range(length):
            if len(held) == method.budget:
                free = [p for p in held if p >= method.sinks and p < t - method.window]
                gone = {p for p in free if limit is not None and p <= t - limit}
                free.sort(key=lambda p: (-1.0 if p in gone else mass[p], p))
                for p in free[: method.interval]:
                    held.remove(p)
            held.append(t)
            mass[t] = 0.0
            seen = [p for p in held if limit is None or t - p < limit]
            for h in range(head * group, (head + 1) * group):
                each = weights_of(query[t, h], key[seen, head])
                out[t, h] = each @ value[seen, head].astype(np.float64)
                for p, weight in zip(seen, each, strict=True):
                    mass[p] += weight
        kept.append(sorted(held))
    return out, kept


def assert_kept_rows_are_the_tokens(pools, positions, row):
    """Bit-equal to the rows they came from."""
    _, key, value = projections()
    pages = positions.shape[2] // pools[0].shape[1]
    for pool, tokens in zip(pools, (key, value), strict=True):
        size = pool.shape[1]
        apart = np.asarray(pool).reshape(2, pages, KV_HEADS, size, DIM).swapaxes(1, 2)
        apart = apart.reshape(2, KV_HEADS, -1, DIM)
        for head in range(KV_HEADS):
            at = positions[row, head]
            np.testing.assert_array_equal(apart[row, head][at >= 0], tokens[row, at[at >= 0], head])


H2OS = [(H2O(budget=128, window=32, sinks=4, interval=16), None),
        (H2O(budget=61, window=8, sinks=0, interval=7), 40)]  # fmt: skip


@pytest.mark.parametrize("method,limit", H2OS, ids=str)
def test_h2o_is_its_rule(method, limit):
    """300 tokens through the budget, by chunks and by steps: outputs, kept tokens and positions."""
    expected = [h2o_reference(method, row, LENGTHS[row], limit) for row in range(2)]
    states = []
    for chunk, steps in [(300, 0), (48, 60)]:
        out, state = run(method, config(limit=limit), chunk, steps)
        states.append(state)
        np.testing.assert_array_equal(state.lengths, LENGTHS)
        positions = np.asarray(state.positions[0])
        for row, (right, kept) in enumerate(expected):
            np.testing.assert_allclose(out[row, : LENGTHS[row]], right, rtol=0, atol=2e-5)
            for head in range(KV_HEADS):
                held = positions[row, head]
                assert sorted(held[held >= 0]) == kept[head]
            assert_kept_rows_are_the_tokens((state.keys[0], state.values[0]), positions, row)
    first, second = (sorted_state(state) for state in states)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_allclose(first[1], second[1], rtol=0, atol=1e-4)


def sorted_state(state):
    positions, mass = np.asarray(state.positions[0]), np.asarray(state.mass[0])
    order = np.argsort(positions, axis=-1)
    mass = np.where(positions >= 0, mass, 0)
    return np.take_along_axis(positions, order, -1), np.take_along_axis(mass, order, -1)


def snapkv_reference(method, budget, row, length):
    """Positions kept by each head, by the paper's rule in float64."""
    query, key, _ = (each[row] for each in projections())
    group = HEADS // KV_HEADS
    kept = []
    for head in range(KV_HEADS):
        mass = np.zeros(length)
        for t in range(length - min(method.window, length), length):
            for h in range(head * group, (head + 1) * group):
                mass[: t + 1] += weights_of(query[t, h], key[: t + 1, head])
        early = length - method.window
        pooled = np.array([
            mass[max(0, p - method.pool // 2) : min(early, p + method.pool // 2 + 1)].max()
            for p in range(max(early, 0))
        ])  # fmt: skip
        always = {*range(min(method.sinks, length)), *range(max(early, 0), length)}
        others = [p for p in range(max(early, 0)) if p not in always]
        others.sort(key=lambda p: (-pooled[p], p))
        kept.append(sorted(always | set(others[: max(0, budget - len(always))])))
    return kept


@pytest.mark.parametrize(
    "method,budgets",
    [
        (SnapKV(budget=128, window=32), [128]),
        (SnapKV(budget=50, window=5, sinks=0, pool=1), [50]),
        (SnapKV(budget=0.25, window=8), [0.25]),
    ],
    ids=str,
)
def test_snapkv_keeps_what_its_rule_says(method, budgets):
    model = config()
    for chunk in (300, 37):
        _, state = run(method, model, chunk)
        before = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        state = method.finish_prefill(model, state, 16)
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert held == method.kept_bytes(model, 2, 304, 16, jnp.float32)
        assert held < 0.65 * before
        positions = np.asarray(held_positions(state, 0))
        for row, length in enumerate(LENGTHS):
            (budget,) = budgets
            budget = min(length, int(np.ceil(budget * length)) if budget < 1 else budget)
            expected = snapkv_reference(method, budget, row, length)
            for head in range(KV_HEADS):
                at = positions[row, head]
                assert at[at >= 0].tolist() == expected[head]
            assert_kept_rows_are_the_tokens((state.keys[0], state.values[0]), positions, row)


def test_neighbours_and_ties():
    """The window's mass helps no token before it, sinks' does; of equals the earlier are kept."""
    mass = np.zeros((1, 3, 16), np.float32)
    mass[0, 0, [6, 12, 13]] = 1, 9, 9  # of 14 tokens the last two are the window
    mass[0, 1, [0, 8]] = 9, 1
    mass[0, 2, 5:12] = 1
    mass[0, 2, 14:] = np.nan  # no tokens
    lengths, counts = np.array([14], np.int32), np.array([7], np.int32)
    kept = best_positions(
        jnp.asarray(mass), jnp.asarray(lengths), jnp.asarray(counts), most=9, window=2, sinks=1,
        pool=3,
    )  # fmt: skip
    assert np.asarray(kept)[0].tolist() == [
        [0, 1, 5, 6, 7, 12, 13, -1, -1],
        [0, 1, 7, 8, 9, 12, 13, -1, -1],
        [0, 4, 5, 6, 7, 12, 13, -1, -1],
    ]


@pytest.mark.parametrize("limit", [None, 60])
def test_after_snapkv_attention_is_dense_under_the_mask(limit):
    """Further turns in chunks of any size and steps, in place; a fork sees nothing of another."""
    method, model = SnapKV(budget=64, window=16), config(limit=limit)
    query, key, value = projections()
    feed = feeder(method, model)

    def prompt():
        state = new_cache(method, 2, 304, model).state
        parts = [x[:, :200] for x in (query, key, key, value)]
        counts = jnp.array([200, 120], jnp.int32)
        _, state = feed(state, Projections(*parts), Span(state.lengths, counts), "prefill")
        return method.finish_prefill(model, method.advance(model, state, counts), 32)

    kept = np.asarray(held_positions(prompt(), 0))

    def expected(row, start, token, heads):
        t = start + token
        out = np.zeros((HEADS, DIM))
        for h in range(HEADS):
            head = h // (HEADS // KV_HEADS)
            at = kept[row, head]
            seen = [*at[at >= 0], *range(start, t + 1)]
            seen = [p for p in seen if limit is None or t - p < limit]
            each = weights_of(query[row, t, h], key[row, seen, head])
            out[h] = each @ value[row, seen, head].astype(np.float64)
        return out

    for sizes in ([20], [7, 13], [13, *[1] * 7]):
        state, at, outs = prompt(), 0, []
        for size in sizes:
            rows: Any = [
                np.stack([x[0, 200 + at : 200 + at + size], x[1, 120 + at : 120 + at + size]])
                for x in (query, key, key, value)
            ]
            span = Span(state.lengths, jnp.full(2, size, jnp.int32))
            name = "decode" if size == 1 else "prefill"
            out, state = feed(state, Projections(*rows), span, name)
            state = method.advance(model, state, span.counts)
            outs.append(np.asarray(out))
            at += size
        out = np.concatenate(outs, 1)
        np.testing.assert_array_equal(state.lengths, [220, 140])
        again = method.finish_prefill(model, state, 32)
        jax.tree.map(np.testing.assert_array_equal, again, state)
        for row, start in enumerate((200, 120)):
            for token in range(20):
                np.testing.assert_allclose(
                    out[row, token], expected(row, start, token, HEADS), rtol=0, atol=2e-5
                )


def test_pyramid_budgets_fall_and_have_the_same_total():
    method, model = PyramidKV(budget=64, window=8), config(layers=4)
    _, state = run(method, model, 300)
    state = method.finish_prefill(model, state, 0)
    sizes = []
    for layer in range(4):
        positions = np.asarray(held_positions(state, layer))
        sizes.append((positions >= 0).sum(-1))
        assert (sizes[-1] == sizes[-1][0, 0]).all()
        expected = snapkv_reference(method, int(sizes[-1][0, 0]), 0, 300)
        assert [p[p >= 0].tolist() for p in positions[0]] == expected
    sizes = [int(each[0, 0]) for each in sizes]
    assert sum(sizes) == 4 * 64
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] + 8
    steps = -np.diff(sizes)
    assert steps.max() - steps.min() <= 2  # linear, in whole tokens


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: SnapKV(budget=35), "SnapKV: budget = 35 tokens, but sinks . window .* 36"),
        (lambda: SnapKV(pool=4), "SnapKV: pool = 4"),
        (lambda: SnapKV(budget=1.5), r"SnapKV: budget = 1.5; a share .* \(0, 1\]"),
        (lambda: SnapKV(window=0), "SnapKV: window = 0"),
        (lambda: H2O(budget=300), "H2O: budget = 300 tokens, but sinks . window . interval .* 324"),
        (lambda: H2O(interval=0), "H2O: interval = 0"),
        (lambda: PyramidKV(budget=10), "PyramidKV: budget = 10"),
        (lambda: new_cache(H2O(budget=(1024, 512)), 1), "2 budgets, but the model has 1 layers"),
    ],
)
def test_bad_options_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
