"""The model's entry points: `forward` (no cache), `prefill`, `finish_prefill`, `decode_step`.

Each public function checks its arguments on the host and calls one compiled program. The pure
parts (`run_prompt`, `run_token`) are what `generate` and the evaluations compile into larger ones.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from sparse_jax import checks
from sparse_jax.caches.base import Cache, Span, check_model, check_usable
from sparse_jax.caches.uncached import Uncached
from sparse_jax.config import ModelConfig
from sparse_jax.model import Params, hidden_states, logits_of, params_dtype

Logits = Literal["last", "all"]

# Prompts beyond this are fed in pieces, which bounds activations at B * CHUNK rows.
CHUNK = 512

# Tokens of room behind a compressed prompt come in steps, so that few sizes are compiled.
_ROOM_STEP = 64


def forward(
    params: Params,
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, " B"],
    *,
    config: ModelConfig,
) -> Float32[Array, "B T V"]:
    """Logits of every token of whole sequences, without a cache: the oracle.

    Attention uses dense masks and float32 products at full precision, in O(B H T) memory a block
    of queries. Row b's tokens t >= counts[b] are padding; their logits mean nothing.

    Args:
        params: parameter tree, one dtype.
        tokens: int32 ids, packed to the left.
        counts: int32, valid tokens of each row.
        config: static.

    Raises:
        TypeError, ValueError: dtypes, shapes, counts or ids are wrong.
    """
    params_dtype(params)
    checks.check_tokens(tokens, counts, config, allow_empty=True)
    checks.check_width(tokens)
    return _forward(params, tokens, counts, config=config)


@functools.partial(jax.jit, static_argnames=("config",))
def _forward(params, tokens, counts, *, config):
    method = Uncached()
    batch, width = tokens.shape
    state = method.init(config, batch, width, jnp.float32)
    span = Span(starts=jnp.zeros(batch, jnp.int32), counts=counts)
    hidden, _ = hidden_states(
        params, tokens, span, state, config=config, method=method, decode=False,
        rope_lengths=counts,
    )  # fmt: skip
    return logits_of(params, hidden, config=config)


def prefill(
    params: Params,
    cache: Cache,
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, " B"],
    *,
    config: ModelConfig,
    logits: Logits = "last",
    chunk: int | None = None,
) -> tuple[Array, Cache]:
    """Appends tokens to what a cache holds; compiles once per shape of `tokens`.

    A pending token (see `Cache`) is fed first. The cache is donated: go on with the returned one.

    Args:
        params: parameter tree in the cache's dtype.
        cache: from `empty_cache`, or returned by an earlier call.
        tokens: int32 ids, packed to the left.
        counts: int32, valid tokens of each row; a row may have none.
        config: static.
        logits: "last" gives float32 [B, V], those of each row's last token (meaningless for a row
            that was given none); "all" gives float32 [B, T, V].
        chunk: tokens fed at a time; None for `CHUNK`. The result doesn't depend on it.

    Raises:
        TypeError, ValueError: dtypes, shapes, counts or ids are wrong, the cache was donated
            before, or a row would pass its capacity.
    """
    params_dtype(params)
    checks.check_tokens(tokens, counts, config, allow_empty=True)
    if not cache.pending:
        checks.check_width(tokens)
    check_usable(cache)
    check_model(cache, config)
    checks.check_batch(cache, tokens.shape[0])
    checks.check_room(cache, counts)
    if logits not in ("last", "all"):
        raise ValueError(f"logits = {logits!r}; give 'last' or 'all'")
    return _prefill(
        params, cache, tokens, counts, config=config, logits=logits, chunk=check_chunk(chunk)
    )


def check_chunk(chunk: int | None) -> int:
    """The chunk to use.

    Raises:
        ValueError: not None and not an int >= 1.
    """
    if chunk is None:
        return CHUNK
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk = {chunk!r}; give a number of tokens >= 1, or None")
    return chunk


@functools.partial(
    jax.jit, static_argnames=("config", "logits", "chunk"), donate_argnames=("cache",)
)
def _prefill(params, cache, tokens, counts, *, config, logits, chunk):
    return run_prompt(params, cache, tokens, counts, config=config, logits=logits, chunk=chunk)


def finish_prefill(cache: Cache, *, config: ModelConfig, room: int | None = None) -> Cache:
    """Tells the method that the prompt is complete; it may evict or compress. Donates the cache.

    Args:
        cache: with the whole prompt in it.
        config: static.
        room: tokens that are still to follow, at the most: a method that keeps a part of the
            prompt makes place for so many behind it. None: up to the capacity from the longest
            row on, rounded up to 64 (under a caller's own `jit`, where lengths aren't known, the
            whole capacity).

    Raises:
        ValueError: the cache was donated before, or is another model's; room is no int >= 0.
    """
    check_usable(cache)
    check_model(cache, config)
    if room is None:
        room = cache.capacity
        if checks.known(cache.state.lengths):
            left = cache.capacity - int(cache.state.lengths.max())
            room = min(room, -(-left // _ROOM_STEP) * _ROOM_STEP)
    elif not isinstance(room, int) or room < 0:
        raise ValueError(f"room = {room!r}; give a number of tokens >= 0, or None")
    with shrinking_allowed():
        return _finish_prefill(cache, config=config, room=room)


@contextlib.contextmanager
def shrinking_allowed() -> Iterator[None]:
    """Around the compile of a program in which a method may compress a donated cache: JAX warns of
    donated buffers that no output takes over, and here they are meant to go."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


@functools.partial(jax.jit, static_argnames=("config", "room"), donate_argnames=("cache",))
def _finish_prefill(cache, *, config, room):
    state = cache.method.finish_prefill(config, cache.state, room)
    return dataclasses.replace(cache, state=state)


def decode_step(
    params: Params,
    cache: Cache,
    tokens: Int32[Array, " B"],
    *,
    config: ModelConfig,
    active: Bool[Array, " B"] | None = None,
) -> tuple[Float32[Array, "B V"], Cache]:
    """Feeds one token a row and gives the logits of the next. The cache is donated.

    Args:
        params: parameter tree in the cache's dtype.
        cache: without a pending token.
        tokens: int32 ids.
        config: static.
        active: rows that take part (default all); the others keep their state, and their logits
            mean nothing.

    Raises:
        TypeError, ValueError: as for `prefill`; or the cache has a pending token.
    """
    params_dtype(params)
    check_usable(cache)
    check_model(cache, config)
    if cache.pending:
        raise ValueError(
            "cache: it has a pending token, which must be fed first; use prefill(params, cache, "
            "tokens[:, None], counts)"
        )
    if getattr(tokens, "ndim", None) != 1:
        raise ValueError(f"tokens has shape {getattr(tokens, 'shape', None)}; expected [B]")
    checks.check_batch(cache, tokens.shape[0])
    if active is None:
        active = jnp.ones(tokens.shape[0], bool)
    elif getattr(active, "dtype", None) != jnp.bool_ or active.shape != tokens.shape:
        raise TypeError(f"active is {active!r}; give a bool array [B], B = {tokens.shape[0]}")
    counts = active.astype(jnp.int32)
    checks.check_tokens(tokens[:, None], counts, config, allow_empty=True)
    checks.check_room(cache, counts)
    return _decode_step(params, cache, tokens, active, config=config)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("cache",))
def _decode_step(params, cache, tokens, active, *, config):
    return run_token(params, cache, tokens, active, config=config)


def run_token(
    params: Params,
    cache: Cache,
    tokens: Int32[Array, " B"],
    active: Bool[Array, " B"],
    *,
    config: ModelConfig,
) -> tuple[Float32[Array, "B V"], Cache]:
    """`decode_step` without checks: pure, for use inside larger compiled programs."""
    starts = cache.state.lengths
    span = Span(starts=starts, counts=active.astype(jnp.int32))
    history = _record(cache.history, tokens[:, None], span)
    hidden, state = hidden_states(
        params, tokens[:, None], span, cache.state, config=config, method=cache.method,
        decode=True, rope_lengths=starts + span.counts,
    )  # fmt: skip
    cache = dataclasses.replace(cache, state=state, history=history)
    return logits_of(params, hidden[:, 0], config=config), cache


def run_prompt(
    params: Params,
    cache: Cache,
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, " B"],
    *,
    config: ModelConfig,
    logits: Logits,
    chunk: int,
) -> tuple[Array, Cache]:
    """`prefill` without checks: pure, for use inside larger compiled programs.

    Chunks that are padding in every row are not run, so that a prompt's time follows its length
    and not its bucket.
    """
    batch = tokens.shape[0]
    was_pending = cache.pending
    if was_pending:
        newest = cache.history[jnp.arange(batch), cache.state.lengths]
        tokens = jnp.concatenate([newest[:, None], tokens], axis=1)
        counts = counts + 1
        cache = dataclasses.replace(cache, pending=False)
    width = tokens.shape[1]
    if width <= chunk:
        hidden, cache = _run_chunk(params, cache, tokens, counts, config)
        if logits == "last":
            return logits_of(params, _last(hidden, counts - 1), config=config), cache
        every = logits_of(params, hidden, config=config)
        return every[:, int(was_pending) :], cache

    pieces = -(-width // chunk)
    tokens = jnp.pad(tokens, ((0, 0), (0, pieces * chunk - width)))

    def step(index, carry):
        cache, kept = carry
        at = index * chunk
        piece = lax.dynamic_slice_in_dim(tokens, at, chunk, axis=1)
        size = jnp.clip(counts - at, 0, chunk)
        hidden, cache = _run_chunk(params, cache, piece, size, config)
        if logits == "last":
            newest = _last(hidden, counts - 1 - at)
            ends_here = (counts - 1 >= at) & (counts - 1 < at + chunk)
            return cache, jnp.where(ends_here[:, None], newest, kept)
        part = logits_of(params, hidden, config=config)
        return cache, lax.dynamic_update_slice_in_dim(kept, part, at, axis=1)

    if logits == "last":
        kept = jnp.zeros((batch, config.hidden_size), params_dtype(params))
    else:
        kept = jnp.zeros((batch, pieces * chunk, config.vocab_size), jnp.float32)
    used = (counts.max() + chunk - 1) // chunk
    cache, kept = lax.fori_loop(0, used, step, (cache, kept))
    if logits == "last":
        return logits_of(params, kept, config=config), cache
    return kept[:, int(was_pending) : width], cache


def _run_chunk(params, cache: Cache, tokens, counts, config: ModelConfig):
    """One chunk through the model and into the cache and its history."""
    starts = cache.state.lengths
    span = Span(starts=starts, counts=counts)
    history = _record(cache.history, tokens, span)
    hidden, state = hidden_states(
        params, tokens, span, cache.state, config=config, method=cache.method, decode=False,
        rope_lengths=starts + counts,
    )  # fmt: skip
    return hidden, dataclasses.replace(cache, state=state, history=history)


def _last(hidden, index):
    """Each row's hidden state at `index` (clipped into the chunk, for rows that end elsewhere)."""
    index = jnp.clip(index, 0, hidden.shape[1] - 1)
    return jnp.take_along_axis(hidden, index[:, None, None], axis=1)[:, 0]


def _record(history: Int32[Array, "B capacity"], tokens: Int32[Array, "B T"], span: Span):
    """Writes a chunk's ids at their positions; padding aims past the end, which drops it."""
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    at = span.starts[:, None] + offset
    at = jnp.where(offset < span.counts[:, None], at, history.shape[1])
    rows = jnp.arange(history.shape[0])[:, None]
    return history.at[rows, at].set(tokens, mode="drop", unique_indices=False)
