"""Generation: one compiled program for the prompt and all new tokens.

`generate` runs the prompt and a `while_loop` over new tokens in a single program, compiled once per
prompt bucket; `stream` runs the same pieces as two programs, to hand tokens out as they come.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from sparse_jax import checks
from sparse_jax.caches.base import (
    Cache,
    CacheMethod,
    check_method,
    check_model,
    check_usable,
    context_limit,
    empty_cache,
)
from sparse_jax.config import ModelConfig
from sparse_jax.inference import check_chunk, run_prompt, run_token, shrinking_allowed
from sparse_jax.model import Params, params_dtype
from sparse_jax.prompts import Padding, bucket_length, pack
from sparse_jax.sampling import SamplerSwitches, SamplerValues, SamplingParams, is_eos, sample


class GenerateOutput(NamedTuple):
    """New tokens, and the cache to go on from.

    tokens: int32 [B, max_new_tokens]; after a row's end the pad id.
    lengths: int32 [B], new tokens of each row, its end-of-text token included.
    logprobs: float32 [B, max_new_tokens] (0 after a row's end), or None if not asked for.
    cache: holds prompt and new tokens; give it to the next call with the new tokens only.
    """

    tokens: Int32[Array, "B new"]
    lengths: Int32[Array, " B"]
    logprobs: Float32[Array, "B new"] | None
    cache: Cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Progress:
    """The loop's state."""

    cache: Cache  # without a pending token
    newest: Int32[Array, " B"]  # generated, not fed yet
    step: Int32[Array, ""]  # tokens generated so far
    done: Bool[Array, " B"]
    tokens: Int32[Array, "B size"]
    lengths: Int32[Array, " B"]
    logprobs: Float32[Array, "B size"] | None


def generate(
    params: Params,
    tokens: Int32[Array | np.ndarray, "B T"],
    lengths: Int32[Array | np.ndarray, " B"],
    *,
    config: ModelConfig,
    cache: CacheMethod | Cache,
    sampling: SamplingParams,
    capacity: int | None = None,
    padding: Padding = "right",
    chunk: int | None = None,
) -> GenerateOutput:
    """Continues each row's prompt, in one compiled program.

    Prompts are padded to a bucket and the output buffer likewise, so that all prompts of a bucket
    share one compile; nothing in the result depends on the bucket, on padding, or on what else is
    in the batch.

    Args:
        params: parameter tree, one dtype, which is also the cache's.
        tokens: int32 ids; pad ids may be anything.
        lengths: int32, each row's prompt tokens.
        config: static.
        cache: a method, for new sequences; or a cache that an earlier call returned, to go on with
            its sequences: then `tokens` holds only what is new. A cache given here is donated.
        sampling: see `SamplingParams`.
        capacity: tokens a new cache can hold, for turns to come; None: enough for this call.
        padding: on which side of `tokens` the padding is.
        chunk: prompt tokens fed at a time; None for the default.

    Raises:
        TypeError, ValueError: dtypes, shapes, lengths, ids or options are wrong, a prompt is empty,
            or prompt and new tokens together pass the context or the cache's capacity.
    """
    job = _prepare(params, tokens, lengths, config, cache, sampling, capacity, padding, chunk)
    with shrinking_allowed():
        progress = _run(
            params, job.cache, job.tokens, job.lengths, job.values, job.limit, plan=job.plan
        )
    return _output(progress, sampling.max_new_tokens)


def stream(
    params: Params,
    tokens: Int32[Array | np.ndarray, "B T"],
    lengths: Int32[Array | np.ndarray, " B"],
    *,
    config: ModelConfig,
    cache: CacheMethod | Cache,
    sampling: SamplingParams,
    capacity: int | None = None,
    padding: Padding = "right",
    chunk: int | None = None,
    burst: int = 1,
) -> Iterator[GenerateOutput]:
    """`generate`, handing out tokens as they come: same arguments, same tokens.

    Each item holds what was generated since the last one: the prompt's first token, then up to
    `burst` tokens at a time. Only the last item's cache can be used; earlier ones are donated on.
    Arguments are checked at the call, before the first item is asked for.

    Raises:
        TypeError, ValueError: as `generate`; or burst < 1.
    """
    if not isinstance(burst, int) or burst < 1:
        raise ValueError(f"burst = {burst!r}; give a number of tokens >= 1")
    job = _prepare(params, tokens, lengths, config, cache, sampling, capacity, padding, chunk)
    return _stream(params, job, burst)


def _output(progress: "_Progress", limit: int) -> GenerateOutput:
    """Cuts the buffers to what was asked for."""
    logprobs = progress.logprobs
    return GenerateOutput(
        tokens=_columns(progress.tokens, 0, limit),
        lengths=progress.lengths,
        logprobs=None if logprobs is None else _columns(logprobs, 0, limit),
        cache=dataclasses.replace(progress.cache, pending=True),
    )


def _columns(array: Array, first: int, last: int) -> Array:
    """Some columns, cut on the host: on the device every new width would compile a program (as
    `jnp.asarray` of a host array does too)."""
    return jax.device_put(np.ascontiguousarray(np.asarray(array)[:, first:last]))


class Timings(NamedTuple):
    """Seconds of one call, compiling apart, and the tokens they went into."""

    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float
    prefill_tokens: int
    decode_tokens: int

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, all rows together."""
        return self.prefill_tokens / self.prefill_seconds

    @property
    def decode_rate(self) -> float:
        """New tokens a second after the first (which prefill gives), all rows together."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else 0.0


def generate_timed(
    params: Params,
    tokens: Int32[Array | np.ndarray, "B T"],
    lengths: Int32[Array | np.ndarray, " B"],
    *,
    config: ModelConfig,
    cache: CacheMethod | Cache,
    sampling: SamplingParams,
    capacity: int | None = None,
    padding: Padding = "right",
    chunk: int | None = None,
) -> tuple[GenerateOutput, Timings]:
    """`generate` in two programs, prompt and loop, each compiled ahead of being timed.

    Compiles at every call. Same arguments, tokens and errors as `generate`.
    """
    job = _prepare(params, tokens, lengths, config, cache, sampling, capacity, padding, chunk)
    clock = [time.perf_counter()]
    prompt = (params, job.cache, job.tokens, job.lengths, job.values)
    with shrinking_allowed():
        begin = _begin.lower(*prompt, plan=job.plan).compile()
    clock.append(time.perf_counter())
    progress = jax.block_until_ready(begin(*prompt))
    clock.append(time.perf_counter())
    rest = (params, progress, job.values, job.limit)
    loop = _continue.lower(*rest, plan=job.plan).compile()
    clock.append(time.perf_counter())
    progress = jax.block_until_ready(loop(*rest))
    clock.append(time.perf_counter())
    compiling, prefilling, compiling_loop, decoding = np.diff(clock).tolist()
    new = int(np.asarray(progress.lengths).sum())
    timings = Timings(
        compile_seconds=compiling + compiling_loop,
        prefill_seconds=prefilling,
        decode_seconds=decoding,
        prefill_tokens=int(job.lengths.sum()),
        decode_tokens=new - job.tokens.shape[0],
    )
    return _output(progress, sampling.max_new_tokens), timings


def _stream(params, job: "_Job", burst: int) -> Iterator[GenerateOutput]:
    if job.cache is not None:
        check_usable(job.cache)  # again: time has passed since the call
    with shrinking_allowed():
        progress = _begin(params, job.cache, job.tokens, job.lengths, job.values, plan=job.plan)
    handed = np.zeros(job.tokens.shape[0], np.int32)
    step, limit = 1, int(job.limit)
    while True:
        lengths, done = np.asarray(progress.lengths), np.asarray(progress.done)
        yield _piece(progress, handed, lengths)
        if done.all() or step >= limit:
            return
        check_usable(progress.cache)  # the caller had it in hand
        handed, step = lengths, min(step + burst, limit)
        progress = _continue(params, progress, job.values, np.int32(step), plan=job.plan)


def _piece(progress: "_Progress", handed: np.ndarray, lengths: np.ndarray) -> GenerateOutput:
    """What was generated since `handed` tokens a row. Rows still running are equally long."""
    first, last = int(handed.max()), int(lengths.max())
    logprobs = progress.logprobs
    return GenerateOutput(
        tokens=_columns(progress.tokens, first, last),
        lengths=jax.device_put(lengths - handed),
        logprobs=None if logprobs is None else _columns(logprobs, first, last),
        cache=dataclasses.replace(progress.cache, pending=True),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """All that is static about a call: two calls with equal plans and shapes share a compile."""

    config: ModelConfig
    switches: SamplerSwitches
    size: int  # columns of the output buffer
    pad: int  # id after a row's end
    chunk: int
    method: CacheMethod | None  # of a new cache; None to go on with a given one
    capacity: int  # of a new cache
    dtype: Any


class _Job(NamedTuple):
    """A checked call: arrays at their bucket's size, on the host."""

    plan: _Plan
    cache: Cache | None
    tokens: np.ndarray
    lengths: np.ndarray
    values: SamplerValues
    limit: np.int32


def _prepare(params, tokens, lengths, config, cache, sampling, capacity, padding, chunk) -> _Job:
    """All checks of `generate`, on the host, and the sizes that decide what is compiled."""
    dtype = params_dtype(params)
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling is {type(sampling).__name__}; give SamplingParams(...)")
    if not checks.known(tokens, lengths):
        raise TypeError(
            "generate checks its arguments and can't run under jit; compile run_prompt and "
            "run_token of sparse_jax.inference into your own program instead"
        )
    going_on = isinstance(cache, Cache)
    checks.check_tokens(tokens, lengths, config, allow_empty=going_on, padding=padding)
    switches = sampling.switches(config.eos_ids)
    checks.check_ids(np.array(switches.eos_ids, np.int64), config)
    chunk = check_chunk(chunk)
    sizes = np.asarray(lengths)
    packed = pack(np.asarray(tokens), sizes, bucket_length(int(sizes.max()), chunk), padding)
    size = bucket_length(sampling.max_new_tokens)
    if isinstance(cache, Cache):
        check_model(cache, config)
        _check_going_on(cache, sizes, sampling.max_new_tokens, capacity)
        method, capacity = None, cache.capacity
    else:
        method = cache
        check_method(method)
        needed = int(sizes.max()) + sampling.max_new_tokens
        capacity = _capacity(config, capacity, needed, packed.shape[1] + size)
    plan = _Plan(
        config=config, switches=switches, size=size, pad=_pad_id(config, switches), chunk=chunk,
        method=method, capacity=capacity, dtype=dtype,
    )  # fmt: skip
    limit = np.int32(sampling.max_new_tokens)
    held = cache if isinstance(cache, Cache) else None
    return _Job(plan, held, packed, sizes, sampling.values(), limit)


def _check_going_on(cache: Cache, sizes: np.ndarray, new: int, capacity: int | None) -> None:
    """Whether a given cache can take these prompts and `new` tokens more."""
    if capacity is not None:
        raise ValueError(f"capacity = {capacity} was given with a cache that has its own")
    check_usable(cache)
    checks.check_batch(cache, sizes.shape[0])
    checks.check_room(cache, sizes, extra=new)
    if not cache.pending and (sizes == 0).any():
        row = int((sizes == 0).argmax())
        raise ValueError(f"row {row}: no new tokens, and the cache has none pending to go on from")


def _capacity(config: ModelConfig, given: int | None, needed: int, wanted: int) -> int:
    """The new cache's capacity: what was asked for, or the buckets' sum within the context."""
    limit = context_limit(config)
    if needed > limit:
        raise ValueError(
            f"prompt and new tokens are {needed} together, beyond the model's context of {limit}; "
            "shorten the prompt or max_new_tokens"
        )
    if given is None:
        return min(wanted, limit)
    if not isinstance(given, int) or given < needed:
        raise ValueError(f"capacity = {given!r}; this call needs {needed} tokens")
    if given > limit:
        raise ValueError(f"capacity = {given} tokens, but the model's context is {limit}")
    return given


def _pad_id(config: ModelConfig, switches: SamplerSwitches) -> int:
    if config.pad_id is not None:
        return config.pad_id
    return switches.eos_ids[0] if switches.eos_ids else 0


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("cache",))
def _run(params, cache, tokens, lengths, values, limit, *, plan: _Plan) -> _Progress:
    return _loop(params, _start(params, cache, tokens, lengths, values, plan), values, limit, plan)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("cache",))
def _begin(params, cache, tokens, lengths, values, *, plan: _Plan) -> _Progress:
    return _start(params, cache, tokens, lengths, values, plan)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("progress",))
def _continue(params, progress, values, limit, *, plan: _Plan) -> _Progress:
    return _loop(params, progress, values, limit, plan)


def _start(params, cache, tokens, lengths, values, plan: _Plan) -> _Progress:
    """The prompt, and the first new token."""
    config, batch = plan.config, tokens.shape[0]
    if cache is None:
        assert plan.method is not None
        cache = empty_cache(plan.method, config, batch, plan.capacity, plan.dtype)
    logits, cache = run_prompt(
        params, cache, tokens, lengths, config=config, logits="last", chunk=plan.chunk
    )
    # All that may follow this prompt's bucket: what a compressed cache must still have place for.
    room = max(cache.capacity - tokens.shape[1], plan.size)
    state = cache.method.finish_prefill(config, cache.state, room)
    progress = _Progress(
        cache=dataclasses.replace(cache, state=state),
        newest=jnp.zeros(batch, jnp.int32),
        step=jnp.int32(0),
        done=jnp.zeros(batch, bool),
        tokens=jnp.full((batch, plan.size), plan.pad, jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        logprobs=jnp.zeros((batch, plan.size)) if plan.switches.logprobs else None,
    )
    return _emit(progress, logits, values, plan)


def _loop(params, progress: _Progress, values, limit, plan: _Plan) -> _Progress:
    """New tokens until every row is done or `limit` are there."""

    def unfinished(progress: _Progress):
        return (progress.step < limit) & ~progress.done.all()

    def step(progress: _Progress):
        logits, cache = run_token(
            params, progress.cache, progress.newest, ~progress.done, config=plan.config
        )
        return _emit(dataclasses.replace(progress, cache=cache), logits, values, plan)

    return lax.while_loop(unfinished, step, progress)


def _emit(progress: _Progress, logits, values, plan: _Plan) -> _Progress:
    """Chooses each row's next token and writes it down; rows that are done stay as they are."""
    cache, running = progress.cache, ~progress.done
    chosen, logprobs = sample(logits, cache.history, progress.step, plan.switches, values)
    newest = jnp.where(running, chosen, progress.newest)
    rows = jnp.arange(newest.shape[0])
    # Not fed yet, but part of the row: the next turn finds its pending token here.
    history = cache.history.at[rows, cache.state.lengths].set(newest)
    tokens = lax.dynamic_update_slice(
        progress.tokens,
        jnp.where(running, chosen, plan.pad)[:, None],
        (0, progress.step),
    )
    kept = progress.logprobs
    if kept is not None and logprobs is not None:
        kept = lax.dynamic_update_slice(
            kept, jnp.where(running, logprobs, 0.0)[:, None], (0, progress.step)
        )
    return _Progress(
        cache=dataclasses.replace(cache, history=history),
        newest=newest,
        step=progress.step + 1,
        done=progress.done | is_eos(newest, plan.switches),
        tokens=tokens,
        lengths=progress.lengths + running,
        logprobs=kept,
    )
