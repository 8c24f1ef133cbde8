"""SnapKV, PyramidKV and H2O beyond their budgets, in a model: turns, forks, padding, bytes, room,
compiles. What they keep by which rule is in test_evicting.py."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_methods import new_cache
from compiles import count_compiles, in_place
from tiny_models import batch, ints, random_params, random_prompts, rows_of

from sparse_jax import inference
from sparse_jax.caches import H2O, Dense, PyramidKV, SnapKV, empty_cache, fork
from sparse_jax.caches.budgets import most_tokens
from sparse_jax.caches.kept import KeptState, PromptState, held_positions
from sparse_jax.config import ModelConfig
from sparse_jax.generation import generate
from sparse_jax.inference import decode_step, finish_prefill, prefill
from sparse_jax.sampling import SamplingParams

CONFIG = ModelConfig.tiny(num_layers=2, num_heads=7, num_kv_heads=1)  # a group of 7
GREEDY = SamplingParams(max_new_tokens=6, logprobs=True)
METHODS = [
    SnapKV(budget=24, window=6, sinks=2, pool=3),
    PyramidKV(budget=24, window=6, sinks=2, pool=3, beta=4),
    H2O(budget=24, window=6, sinks=2, interval=5),
]
each = pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
PROMPTS = random_prompts(50, 37)


def run(prompts, cache: Any, config=CONFIG, **options):
    return generate(
        random_params(config), *batch(prompts), config=config, cache=cache, sampling=GREEDY,
        **options,
    )  # fmt: skip


def positions_of(cache, layer: int) -> np.ndarray:
    """[B, K, S] of what a layer holds; -1 elsewhere."""
    state = cache.state
    held = held_positions(state, layer) if isinstance(state, KeptState) else state.positions[layer]
    return np.asarray(held)


@each
def test_padded_rows_are_their_solo_runs(method):
    """With different kept tokens for each, in chunks or not."""
    together = run(PROMPTS, method, capacity=128)
    for row, prompt in enumerate(PROMPTS):
        solo = run([prompt], method, capacity=128, chunk=16)
        assert rows_of(solo)[0] == rows_of(together)[row]
        assert together.logprobs is not None
        np.testing.assert_allclose(
            np.asarray(solo.logprobs)[0], np.asarray(together.logprobs)[row], rtol=0, atol=1e-5
        )
        for layer in range(2):
            ours, theirs = positions_of(solo.cache, layer), positions_of(together.cache, layer)
            kept = [np.sort(x[x >= 0]) for x in (ours[0], theirs[row])]
            np.testing.assert_array_equal(*kept)
    dense = run(PROMPTS, Dense(), capacity=128)
    assert np.abs(np.asarray(dense.logprobs) - np.asarray(together.logprobs)).max() > 1e-2


@each
def test_sinks_and_window_are_always_held(method):
    """After every token, whatever is evicted; never more than the budget where there is one."""
    params = random_params(CONFIG)
    _, cache = prefill(params, new_cache(method, 2, 128, CONFIG), *batch(PROMPTS), config=CONFIG)
    cache = finish_prefill(cache, config=CONFIG)
    feed = functools.partial(decode_step, params, config=CONFIG)
    for step in range(12):
        for layer in range(2):
            positions = positions_of(cache, layer)
            for row, prompt in enumerate(PROMPTS):
                length = len(prompt) + step
                held = positions[row, 0][positions[row, 0] >= 0]
                assert len(set(held)) == len(held) and held.max() == length - 1
                assert {0, 1, *range(length - 6, length)} <= set(held.tolist())
                if isinstance(method, H2O):
                    assert 24 - 5 <= len(held) <= 24
                elif isinstance(method, SnapKV):
                    assert len(held) == 24 + step
        _, cache = feed(cache, ints([step, 60 - step]))


@each
def test_two_questions_on_one_compressed_context(method):
    """A fork of the cache answers as the cache itself would, and neither sees the other's turn."""
    first = run(PROMPTS, method, capacity=160)
    one, two = random_prompts(9, 5, seed=1), random_prompts(9, 5, seed=2)
    branch = fork(first.cache)
    before = jax.tree.map(np.array, branch)
    answers = [run(questions, fork(branch)) for questions in (one, two)]
    assert rows_of(answers[0]) != rows_of(answers[1])
    again = run(one, first.cache)
    jax.tree.map(np.testing.assert_array_equal, again, answers[0])
    jax.tree.map(np.testing.assert_array_equal, branch, before)
    # A third turn on top of the second, token for token in one more branch.
    third = [run(two, fork(answers[0].cache)), run(two, again.cache)]
    jax.tree.map(np.testing.assert_array_equal, *third)
    np.testing.assert_array_equal(third[0].cache.lengths, [50 + 9 + 9 + 18, 37 + 5 + 5 + 18])


@each
def test_within_the_budget_it_is_dense_though_the_capacity_is_beyond(method):
    prompts = random_prompts(9, 12)  # and 6 more, below 24; 12 is the least budget of PyramidKV
    ours, theirs = (run(prompts, each, capacity=128) for each in (method, Dense()))
    assert rows_of(ours) == rows_of(theirs)
    ours, theirs = (np.asarray(out.logprobs) for out in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_a_question_that_is_seen_steers_the_choice():
    """One prompt or two: SnapKV's choice depends on the queries at the end of the first."""
    method, question = METHODS[0], random_prompts(9, 9, seed=1)
    seen = run([a + b for a, b in zip(PROMPTS, question, strict=True)], method, capacity=160)
    unseen = run(question, run(PROMPTS, method, capacity=160).cache)
    ours, theirs = (np.unique(positions_of(out.cache, 0)[0]) for out in (seen, unseen))
    ours, theirs = ours[(ours >= 0) & (ours < 50)], theirs[(theirs >= 0) & (theirs < 50)]
    assert len(ours) == 24 - 6 and len(theirs) == 24  # the window is the question's last 6 tokens
    assert not set(ours) <= set(theirs)


@pytest.mark.parametrize("method,dtype", [(METHODS[0], "float32"), (METHODS[1], "bfloat16")])
def test_what_is_dropped_is_freed(method, dtype):
    """The state's own bytes before and after, as promised; more room takes more."""
    held = []
    for room in (0, 40, 512):
        cache = empty_cache(method, CONFIG, 2, 512, jnp.dtype(dtype))
        assert cache.nbytes == method.nbytes(CONFIG, 2, 512, jnp.dtype(dtype))
        assert isinstance(cache.state, PromptState)
        whole = cache.nbytes
        cache = finish_prefill(cache, config=CONFIG, room=room)
        assert cache.nbytes == method.kept_bytes(CONFIG, 2, 512, room, jnp.dtype(dtype))
        held.append(cache.nbytes)
    assert held[0] < held[1] < whole / 4
    # Never more slots than the prompt had; the queries are gone.
    assert whole / 2 < held[2] < whole


@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: type(method).__name__)
def test_beyond_the_room_is_refused(method):
    params = random_params(CONFIG)
    _, cache = prefill(params, new_cache(method, 2, 256, CONFIG), *batch(PROMPTS), config=CONFIG)
    cache = finish_prefill(cache, config=CONFIG, room=8)
    (room,) = {int(each) for each in method.room(cache.state)}
    free = [(positions_of(cache, layer) < 0).sum(-1).min() for layer in range(2)]
    assert 8 <= room == min(free) < 32
    before = jax.tree.map(np.array, cache)
    with pytest.raises(ValueError, match=f"{type(method).__name__} made room for {room} when"):
        prefill(params, cache, *batch(random_prompts(room + 1, 1)), config=CONFIG)
    jax.tree.map(np.testing.assert_array_equal, cache, before)
    _, cache = prefill(params, cache, *batch(random_prompts(room, 1)), config=CONFIG)
    with pytest.raises(ValueError, match="row 0: 1 tokens to come, .* made room for 0"):
        decode_step(params, cache, ints([1, 1]), config=CONFIG)


def test_room_for_turns_up_to_the_capacity():
    """A prompt and its bucket leave room for all that the capacity allows behind the bucket."""
    cache = run(PROMPTS, METHODS[0], capacity=128).cache  # bucket 64
    assert int(np.min(METHODS[0].room(cache.state) + cache.state.lengths)) >= 50 + 64
    for _ in range(3):
        cache = run(random_prompts(14, 14), cache).cache
    np.testing.assert_array_equal(cache.lengths, [50 + 6 + 60, 37 + 6 + 60])


@each
def test_a_turn_compiles_once(method):
    def conversation(seed):
        cache = run(random_prompts(50 - seed, 37, seed=seed), method, capacity=160).cache
        for turn in range(3):
            cache = run(random_prompts(9 + seed, 5, seed=turn), cache).cache
        return cache

    conversation(0)
    with count_compiles() as count:
        conversation(1)
    assert count.value == 0


def test_compressing_takes_the_prompts_memory_over():
    """With room for all of the capacity, the kept tokens move within the prompt's own pools."""
    method = SnapKV(budget=128, window=8)
    config = ModelConfig.tiny(num_heads=3, num_kv_heads=3, head_dim=64, max_positions=8192)
    cache: Any = jax.eval_shape(lambda: empty_cache(method, config, 2, 8192, jnp.float32))
    with inference.shrinking_allowed():
        finish = inference._finish_prefill.lower(cache, config=config, room=8192).compile()
    aliased, temporary = in_place(finish)
    pools = sum(leaf.size * 4 for leaf in jax.tree.leaves((cache.state.keys, cache.state.values)))
    assert aliased >= pools
    assert temporary < pools / 4


def test_pyramids():
    """Equal steps to the same total, within the capacity; shares alike."""
    config = ModelConfig.tiny(num_layers=30)
    for budget, beta, capacity in [
        (1024, 20, 8192), (1024, 1, 8192), (1001, 3.7, 8192), (40, 20, 8192), (1024, 20, 1500),
        (1024, 20, 1024), (1024, 20, 20), (0.25, 20, 2048), (0.9, 20, 2048), (1.0, 2, 77),
    ]:  # fmt: skip
        method = PyramidKV(budget=budget, beta=beta)
        sizes = [most_tokens(each, capacity, 36) for each in method.budgets(config, capacity)]
        mean = min(capacity, budget if isinstance(budget, int) else int(np.ceil(budget * capacity)))
        assert sum(sizes) == 30 * mean
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] <= capacity and sizes[-1] >= min(36, mean)
        assert np.ptp(np.diff(sizes)) <= 2
        wanted = min(capacity, 36 + (mean - 36) * (2 - 1 / beta)) if mean > 36 else mean
        assert abs(sizes[0] - wanted) <= 1


def test_layers_may_have_budgets_of_their_own():
    method = SnapKV(budget=(20, 40), window=6)
    _, cache = prefill(
        random_params(CONFIG), new_cache(method, 2, 128, CONFIG), *batch(PROMPTS), config=CONFIG
    )
    cache = finish_prefill(cache, config=CONFIG)
    counts = [(positions_of(cache, layer) >= 0).sum(-1)[:, 0].tolist() for layer in range(2)]
    assert counts == [[20, 20], [40, 37]]


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: SnapKV(sinks=-1), "SnapKV: sinks = -1"),
        (lambda: PyramidKV(beta=0.5), "PyramidKV: beta = 0.5"),
        (lambda: PyramidKV(beta="steep"),  # type: ignore[arg-type]
         "PyramidKV: beta = 'steep'"),
        (lambda: PyramidKV(budget=(64, 64)),  # type: ignore[arg-type]
         r"PyramidKV: budget = \(64, 64\)"),
        (lambda: H2O(window=0), "H2O: window = 0"),
        (lambda: new_cache(SnapKV(budget=(64,) * 3), 1, 80, CONFIG), "3 budgets, .* 2 layers"),
    ],
)  # fmt: skip
def test_bad_options_are_named(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
