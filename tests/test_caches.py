"""What every cache method answers: within its budget exactly what `forward` does, whatever the
padding and the chunks."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_methods import CONFIG, GREEDY, every_method, near, new_cache, with_values
from tiny_models import (
    assert_follows_forward,
    batch,
    forward_logits,
    ints,
    random_params,
    random_prompts,
    rows_of,
)

from sparse_jax.caches import Dense, Projections, Span, empty_cache, fork, truncate
from sparse_jax.config import ModelConfig
from sparse_jax.generation import generate
from sparse_jax.inference import decode_step, finish_prefill, prefill


def columns(rows: list[list[int]], first: int, last: int) -> tuple[Any, Any]:
    """Tokens first ... last - 1 of each row, of those that have them."""
    return batch([row[first:last] for row in rows], width=last - first)


# Within the budget: dense, token for token.


@with_values("heads,kv_heads", [(4, 2), (3, 1)], [(2, 2), (8, 2), (7, 1)])
def test_every_group_of_heads(method, heads, kv_heads):
    """Groups of 2 and 3, and of 1, 4 and 7; in a program of the caller's own, too."""
    config = ModelConfig.tiny(num_layers=1, num_heads=heads, num_kv_heads=kv_heads)
    rows = random_prompts(37, 20)
    expected = forward_logits(config, random_params(config), rows)

    @jax.jit
    def program(params, tokens, counts, following):
        cache = empty_cache(method, config, 2, 48, jnp.float32)
        logits, cache = prefill(params, cache, tokens, counts, config=config)
        cache = finish_prefill(cache, config=config)
        return logits, *decode_step(params, cache, following, config=config)

    first, second, cache = program(
        random_params(config),
        columns(rows, 0, 36)[0],
        ints([36, 19]),
        ints([rows[0][36], rows[1][19]]),
    )
    near(first, [expected[0, 35], expected[1, 18]])
    near(second, [expected[0, 36], expected[1, 19]])
    np.testing.assert_array_equal(cache.lengths, [37, 20])


@every_method
def test_windows_of_the_model(method):
    """A layer that sees 4 tokens, in the prompt and in every step after it."""
    config = ModelConfig.tiny(windows=(4, None))
    prompts = random_prompts(5, 12)
    params = random_params(config)
    out = generate(params, *batch(prompts), config=config, cache=method, sampling=GREEDY)
    assert_follows_forward(config, params, prompts, out)
    with pytest.raises(AssertionError):
        assert_follows_forward(ModelConfig.tiny(), params, prompts, out)


@every_method
def test_a_window_counts_the_current_token(method):
    """Window 4, q = k = 0, V one-hot of the position: query 9 weighs 1/4 on 6 ... 9, be it in a
    prompt, in a later chunk of one, or decoded."""
    config = ModelConfig.tiny(
        num_layers=1, windows=(4,), num_heads=1, num_kv_heads=1, hidden_size=16
    )
    values = np.eye(10, 16, dtype=np.float32)[None, :, None]

    @functools.partial(jax.jit, static_argnames="name")
    def feed(state, value, name):
        zeros = jnp.zeros_like(value)
        span = Span(state.lengths, jnp.full(1, value.shape[1], jnp.int32))
        call = getattr(method, name)
        out, state = call(config, state, 0, Projections(zeros, zeros, zeros, value), span)
        return out, method.advance(config, state, span.counts)

    out, nine = feed(new_cache(method, 1, 16, config).state, values[:, :9], "prefill")
    np.testing.assert_allclose(out[0, 8, 0], np.eye(16)[5:9].sum(0) / 4, rtol=0, atol=1e-6)
    np.testing.assert_allclose(out[0, 1, 0, :3], [0.5, 0.5, 0], rtol=0, atol=1e-6)
    for name in ("prefill", "decode"):
        out, _ = feed(nine, values[:, 9:], name)
        np.testing.assert_allclose(out[0, 0, 0], np.eye(16)[6:10].sum(0) / 4, rtol=0, atol=1e-6)


# Padding does not exist.


@every_method
def test_padded_rows_are_their_solo_runs(method):
    """And what `forward` says; padded left or right, with an id of the vocabulary or with none."""
    prompts = random_prompts(5, 12)
    params = random_params(CONFIG)
    run = functools.partial(generate, params, config=CONFIG, cache=method, sampling=GREEDY)
    solo = [run(*batch([prompt])) for prompt in prompts]
    assert_follows_forward(CONFIG, params, prompts, run(*batch(prompts)))
    for left in (False, True):
        for pad in (0, 63, -1, 10**6):
            tokens, counts = batch(prompts, pad=pad, left=left)
            out = run(tokens, counts, padding="left" if left else "right")
            assert rows_of(out) == [rows_of(each)[0] for each in solo]
            near(out.logprobs, np.concatenate([np.asarray(each.logprobs) for each in solo]))
            np.testing.assert_array_equal(out.cache.lengths, counts + 8)


@every_method
def test_pad_ids_leave_no_trace_in_a_chunk(method):
    rows = random_prompts(37, 20)
    results = []
    for pad in (0, 63, -1, 10**6):
        results.append(
            prefill(
                random_params(CONFIG), new_cache(method, 2), *batch(rows, pad=pad), config=CONFIG,
                logits="last", chunk=5,
            )
        )  # fmt: skip
    for logits, cache in results[1:]:
        np.testing.assert_array_equal(logits, results[0][0])
        jax.tree.map(np.testing.assert_array_equal, cache, results[0][1])


# Chunks do not matter.


@pytest.fixture(scope="module")
def seventy_four():
    """Two rows of tokens and their logits by `forward`; the second has 20 of each 37."""
    rows = random_prompts(74, 40)
    return rows, forward_logits(CONFIG, random_params(CONFIG), rows)


@pytest.fixture(scope="module")
def whole(seventy_four):
    """For a method: logits of the first 37 tokens at once, and the cache with them."""
    return functools.cache(lambda method: at_once(method, *seventy_four))


def at_once(method, rows, expected):
    tokens, _ = columns(rows, 0, 37)
    counts = ints([37, 20])
    logits, cache = prefill(
        random_params(CONFIG), new_cache(method, 2), tokens, counts, config=CONFIG,
        logits="all", chunk=64,
    )  # fmt: skip
    near(logits[0], expected[0, :37])
    near(logits[1, :20], expected[1, :20])
    return logits, cache


@with_values("chunk", [5, 16], [1, 8, 36, 37])
def test_chunks_do_not_matter(method, chunk, whole, seventy_four):
    """Same logits and same state; then 37 and 20 more behind those, which stand in the cache."""
    logits, cache = whole(method)
    rows, expected = seventy_four
    tokens, _ = columns(rows, 0, 37)
    counts = ints([37, 20])
    run = functools.partial(
        prefill, random_params(CONFIG), config=CONFIG, logits="all", chunk=chunk
    )
    ours, piecewise = run(new_cache(method, 2), tokens, counts)
    for row, count in enumerate(counts):
        near(ours[row, :count], logits[row, :count])
    jax.tree.map(near, piecewise, cache)

    rest, _ = batch([rows[0][37:74], rows[1][20:40]], width=37)
    ours, _ = run(piecewise, rest, counts)
    near(ours[0], expected[0, 37:74])
    near(ours[1, :20], expected[1, 20:40])


@every_method
def test_the_last_logits_of_chunks(method, seventy_four):
    """Rows that end in different chunks; one that is given nothing keeps its state."""
    rows, expected = seventy_four
    run = functools.partial(prefill, random_params(CONFIG), config=CONFIG, chunk=5)
    tokens, _ = columns(rows, 0, 37)
    logits, cache = run(new_cache(method, 2), tokens, ints([37, 3]))
    assert logits.dtype == jnp.float32
    near(logits, [expected[0, 36], expected[1, 2]])
    rest, _ = batch([[], rows[1][3:40]], width=37)
    logits, cache = run(cache, rest, ints([0, 36]))
    near(logits[1], expected[1, 38])
    logits, cache = run(cache, *batch([rows[0][37:40], rows[1][39:40]], width=37))
    near(logits, [expected[0, 39], expected[1, 39]])


@every_method
def test_one_token_behind_36_and_a_full_hit(method, seventy_four):
    """All but one token cached; all cached, the newest pending: logits come all the same."""
    rows, expected = seventy_four
    rows = [rows[0], rows[0][:20]]  # 37 of one row, 20 of the other
    run = functools.partial(prefill, random_params(CONFIG), config=CONFIG, chunk=5)
    _, cache = run(new_cache(method, 2), *batch([rows[0][:36], rows[1][:19]], width=37))
    last, _ = batch([rows[0][36:37], rows[1][19:20]])
    wanted = expected[0, [36, 19]]
    logits, _ = run(fork(cache), last, ints([1, 1]))
    near(logits, wanted)
    logits, _ = decode_step(random_params(CONFIG), fork(cache), last[:, 0], config=CONFIG)
    near(logits, wanted)

    at = np.asarray(cache.state.lengths)
    history = cache.history.at[np.arange(2), at].set(last[:, 0])
    hit = dataclasses.replace(cache, history=history, pending=True)
    np.testing.assert_array_equal(hit.lengths, [37, 20])
    logits, hit = run(hit, ints([[0], [0]]), ints([0, 0]))
    near(logits, wanted)
    assert not hit.pending
    np.testing.assert_array_equal(hit.lengths, [37, 20])


# Taking tokens back.


@every_method
def test_truncated_is_as_if_never_fed(method, seventy_four):
    if not hasattr(method, "truncate"):
        pytest.skip("the method can't take tokens back")
    rows, expected = seventy_four
    run = functools.partial(prefill, random_params(CONFIG), config=CONFIG, chunk=5)
    wrong = [[1] * 37, [2] * 37]
    _, cache = run(new_cache(method, 2), *batch([rows[0][:7] + wrong[0][7:], wrong[1]]))
    cache = truncate(cache, ints([7, 0]))
    np.testing.assert_array_equal(cache.lengths, [7, 0])
    np.testing.assert_array_equal(cache.history[:, :9], [[*rows[0][:7], -1, -1], [-1] * 9])
    logits, cache = run(cache, *batch([rows[0][7:30], rows[1][:30]], width=37))
    near(logits, expected[:, 29])


def test_truncate_and_pending_tokens():
    """The pending token goes with the first token taken back; halves of a batch are refused."""
    rows, params = random_prompts(5, 12), random_params(CONFIG)
    out = generate(params, *batch(rows), config=CONFIG, cache=Dense(), sampling=GREEDY)
    lengths = np.asarray(out.cache.lengths)
    same = truncate(fork(out.cache), lengths)
    assert same.pending
    jax.tree.map(np.testing.assert_array_equal, same, out.cache)
    less = truncate(fork(out.cache), lengths - 1)
    assert not less.pending
    np.testing.assert_array_equal(less.lengths, lengths - 1)
    np.testing.assert_array_equal(less.state.lengths, lengths - 1)
    for wrong, message in [
        (lengths - ints([0, 1]), "some rows would keep their pending token"),
        (lengths + ints([0, 1]), "the rows hold"),
        (ints([-1, 0]), "the rows hold"),
        (lengths[:1], r"lengths has shape \(1,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            truncate(out.cache, wrong)
