"""What every cache method costs: bytes, copies, compiles; and what it refuses."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_methods import CONFIG, GREEDY, METHODS, every_method, near, new_cache, with_values
from compiles import count_compiles, in_place
from tiny_models import (
    batch,
    forward_logits,
    ints,
    random_params,
    random_prompts,
    rows_of,
)

from sparse_jax import generation
from sparse_jax.caches import Dense, empty_cache, fork, truncate
from sparse_jax.config import ModelConfig
from sparse_jax.generation import generate
from sparse_jax.inference import (
    CHUNK,
    decode_step,
    finish_prefill,
    prefill,
    run_prompt,
    run_token,
)
from sparse_jax.sampling import SamplingParams

# Bytes.


@every_method
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows,capacity", [(1, 1), (3, 16), (2, 17), (1, 100), (4, 600)])
def test_promised_bytes_are_the_buffers(method, dtype, rows, capacity):
    promised = method.nbytes(CONFIG, rows, capacity, jnp.dtype(dtype))
    cache: Any = jax.eval_shape(
        lambda: empty_cache(method, CONFIG, rows, capacity, jnp.dtype(dtype))
    )
    leaves = jax.tree.leaves(cache.state)
    assert promised == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def test_a_dense_cache_is_cut_into_long_pages_where_they_fit():
    """The longest page that rounds the capacity up by a 32nd at the most."""
    found = {}
    for capacity in (1, 40, 64, 300, 576, 2000, 2148, 8192):
        state = jax.eval_shape(lambda c=capacity: Dense().init(CONFIG, 1, c, jnp.float32))
        pages, size, _ = state.keys[0].shape
        found[capacity] = (pages // CONFIG.num_kv_heads, size)
    assert found == {
        1: (1, 16), 40: (1, 48), 64: (1, 64), 300: (5, 64), 576: (9, 64), 2000: (8, 256),
        2148: (17, 128), 8192: (32, 256),
    }  # fmt: skip


@every_method
def test_bytes_stay_what_was_promised(method):
    """Real buffers, before and after use."""
    cache = new_cache(method, 2)
    promised = method.nbytes(CONFIG, 2, 80, jnp.float32)
    for _ in range(2):
        assert cache.nbytes == promised
        assert promised == sum(leaf.nbytes for leaf in jax.tree.leaves(cache.state))
        _, cache = decode_step(random_params(CONFIG), cache, ints([1, 2]), config=CONFIG)


# In place.


def a_step(method, config, rows, dtype, capacity):
    """The compiled decode step, its cache donated, and the bytes of that cache."""
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), random_params(config)
    )
    cache: Any = jax.eval_shape(
        lambda: empty_cache(method, config, rows, capacity, jnp.dtype(dtype))
    )
    step = jax.jit(run_token, static_argnames="config", donate_argnames="cache")
    tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)
    active = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    program = step.lower(params, cache, tokens, active, config=config).compile()
    return program, method.nbytes(config, rows, capacity, jnp.dtype(dtype))


def wide(heads: int, kv_heads: int) -> ModelConfig:
    """Caches that are large beside all else, chunks of 2048 tokens too: 16384 slots of 64 numbers
    for each head, in two layers, so that a copy of one layer's keys is a quarter of it."""
    return ModelConfig.tiny(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=64, max_positions=16384
    )


@with_values(
    "rows,heads,kv_heads,dtype",
    [(1, 3, 3, "bfloat16"), (4, 6, 3, "float32")],
    [(1, 3, 1, "float32"), (4, 1, 1, "bfloat16"), (12, 2, 1, "float32"), (1, 6, 3, "bfloat16")],
)
def test_a_decode_step_holds_no_second_cache(method, rows, heads, kv_heads, dtype):
    """Groups of 1 among them, which take another way in 16 bits."""
    program, size = a_step(method, wide(heads, kv_heads), rows, dtype, 16384)
    aliased, temporary = in_place(program)
    assert aliased >= size
    assert temporary < size / 4


@with_values("rows,heads,kv_heads,dtype", [(4, 6, 3, "float32")], [(1, 1, 1, "bfloat16")])
def test_the_loop_of_generate_holds_no_second_cache(method, rows, heads, kv_heads, dtype):
    """Nothing beyond what its prompt takes: a method may write a layer anew for a chunk, and does
    not keep that."""
    config = wide(heads, kv_heads)
    cache = empty_cache(method, config, rows, 16384, jnp.dtype(dtype))
    params = random_params(config, dtype)
    # No public function gives out the program without running it.
    job = generation._prepare(
        params, *batch(random_prompts(*[5] * rows)), config, cache, GREEDY, None, "right", None
    )
    with generation.shrinking_allowed():
        program = generation._run.lower(
            params, job.cache, job.tokens, job.lengths, job.values, job.limit, plan=job.plan
        ).compile()
    aliased, temporary = in_place(program)
    after: Any = jax.eval_shape(
        functools.partial(method.finish_prefill, config, room=16), cache.state
    )
    if jax.tree.structure(after) != jax.tree.structure(cache.state):
        # A state that is cut to a new size takes over no buffer of the one that was given, so the
        # prompt goes into a copy of that: one, and nothing more.
        assert temporary < cache.nbytes
        return
    assert aliased >= cache.nbytes
    prompt = jax.jit(
        functools.partial(run_prompt, config=config, logits="last", chunk=CHUNK),
        donate_argnames="cache",
    )
    prompt = prompt.lower(params, cache, job.tokens, job.lengths).compile()
    _, of_the_prompt = in_place(prompt)
    assert temporary < of_the_prompt + cache.nbytes / 4
    if isinstance(method, Dense):
        assert temporary < cache.nbytes / 4


# Donated buffers.


@every_method
def test_a_donated_cache_is_refused(method):
    params, (tokens, counts) = random_params(CONFIG), batch(random_prompts(2, 8), width=16)
    sampling = SamplingParams(max_new_tokens=2)
    uses = [
        lambda cache: prefill(params, cache, tokens, counts, config=CONFIG),
        lambda cache: decode_step(params, cache, tokens[:, 0], config=CONFIG),
        lambda cache: finish_prefill(cache, config=CONFIG),
        lambda cache: generate(
            params, tokens, counts, config=CONFIG, cache=cache, sampling=sampling
        ),
    ]
    for use in uses:
        cache = new_cache(method, 2, 16)
        use(cache)
        for again in (*uses, fork, lambda cache: truncate(cache, ints([0, 0]))):
            with pytest.raises(ValueError, match="cache: its buffers were donated"):
                again(cache)


@every_method
def test_buffers_that_are_one_array_are_refused(method):
    cache = new_cache(method, 2, 16)
    leaves, tree = jax.tree.flatten(cache.state)
    twins = [
        (a, b) for b in range(len(leaves)) for a in range(b) if leaves[a].aval == leaves[b].aval
    ]
    if not twins:
        pytest.skip("no two buffers of one shape")
    first, second = twins[0]
    leaves[second] = leaves[first]
    cache = dataclasses.replace(cache, state=jax.tree.unflatten(tree, leaves))
    with pytest.raises(ValueError, match="cache: two of its leaves are the same array"):
        prefill(random_params(CONFIG), cache, *batch(random_prompts(5, 12)), config=CONFIG)


# Writing past the end.


@every_method
def test_what_does_not_fit_is_refused_before_anything_runs(method):
    params, rows = random_params(CONFIG), random_prompts(14, 2)
    run = functools.partial(prefill, params, config=CONFIG)
    _, cache = run(new_cache(method, 2, 16), *batch(rows, width=16))
    before = jax.tree.map(np.array, cache)
    tokens = ints([[0] * 16] * 2)
    generate_two = functools.partial(
        generate, params, config=CONFIG, sampling=SamplingParams(max_new_tokens=2)
    )
    with count_compiles() as count:
        with pytest.raises(ValueError, match="row 0: 14 tokens held .* = 17, beyond .* of 16"):
            run(cache, tokens, ints([3, 0]))
        with pytest.raises(ValueError, match="row 1: 2 tokens held .* = 17, beyond .* of 16"):
            run(cache, tokens, ints([2, 15]))
        with pytest.raises(ValueError, match="row 0: 14 .* 1 given .* 2 to generate = 17"):
            generate_two(tokens, ints([1, 1]), cache=cache)
        with pytest.raises(ValueError, match="capacity = 15; this call needs 16 tokens"):
            generate_two(*batch(rows), cache=method, capacity=15)
    assert count.value == 0
    jax.tree.map(np.testing.assert_array_equal, cache, before)


@every_method
def test_a_full_row_waits_while_others_go_on(method):
    """Row 0 is filled to its last slot, and stays as it is while row 1 is fed token by token."""
    params, rows = random_params(CONFIG), random_prompts(16, 16)
    expected = forward_logits(CONFIG, params, rows)
    _, cache = prefill(
        params, new_cache(method, 2, 16), *batch([rows[0], rows[1][:12]]), config=CONFIG
    )
    step = functools.partial(decode_step, params, config=CONFIG)
    before = jax.tree.map(np.array, cache.state)
    second = jax.device_put(np.array([False, True]))
    for at in range(12, 15):
        logits, cache = step(cache, ints([rows[0][0], rows[1][at]]), active=second)
        near(np.asarray(logits)[1], expected[1, at])
    np.testing.assert_array_equal(cache.lengths, [16, 15])
    np.testing.assert_array_equal(np.asarray(cache.history)[0], rows[0])
    if isinstance(method, Dense):  # where the first half of the pages is row 0's
        for ours, theirs in zip(
            jax.tree.leaves((cache.state.keys, cache.state.values)),
            jax.tree.leaves((before.keys, before.values)),
            strict=True,
        ):
            half = len(theirs) // 2
            np.testing.assert_array_equal(np.asarray(ours)[:half], theirs[:half])
    with pytest.raises(ValueError, match="row 0: 16 tokens held .* = 17, beyond"):
        step(cache, ints([0, 0]))
    logits, cache = step(cache, ints([0, rows[1][15]]), active=second)
    near(np.asarray(logits)[1], expected[1, 15])


# Compiles.


@pytest.mark.parametrize("method", METHODS[:1], ids=repr)
def test_prompts_of_one_to_64_compile_once_a_bucket(method):
    params, prompt = random_params(CONFIG), random_prompts(64)[0]
    sampling = SamplingParams(max_new_tokens=2)
    passes, solo = [], {}
    for _ in range(2):
        with count_compiles() as count:
            for length in range(1, 65):
                out = generate(
                    params, *batch([prompt[:length]]), config=CONFIG, cache=method,
                    sampling=sampling,
                )  # fmt: skip
                solo[length] = rows_of(out)[0]
        passes.append(count.value)
    assert passes[0] <= 3  # 16, 32, 64
    assert passes[1] == 0
    # The bucket of another row's prompt is one's own: it changes nothing.
    rows = [prompt[:length] for length in (5, 40)]
    out = generate(params, *batch(rows), config=CONFIG, cache=method, sampling=sampling)
    assert rows_of(out) == [solo[5], solo[40]]


@every_method
def test_200_steps_compile_once(method):
    """For a batch of 1, then of 3; true positions to the end, as `forward` has them."""
    params, rows = random_params(CONFIG), random_prompts(200, 200, 200)
    expected = forward_logits(CONFIG, params, rows, width=200)
    for size in (1, 3):
        cache = new_cache(method, size, 208)
        tokens = ints(rows[:size])
        logits, cache = decode_step(params, cache, tokens[:, 0], config=CONFIG)
        with count_compiles() as count:
            for at in range(1, 200):
                logits, cache = decode_step(params, cache, tokens[:, at], config=CONFIG)
                if at in (15, 16, 127, 199):
                    near(np.asarray(logits), expected[:size, at])
        assert count.value == 0
        np.testing.assert_array_equal(cache.lengths, [200] * size)
