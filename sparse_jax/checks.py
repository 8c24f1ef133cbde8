"""Checks on token batches, made on the host before anything is compiled or run.

Values can be checked only where they are known: under a caller's own `jit` the arrays are tracers,
and only shapes and dtypes are looked at.
"""

import numpy as np
from jax.core import Tracer

from sparse_jax.caches.base import Cache
from sparse_jax.config import ModelConfig
from sparse_jax.prompts import Padding


def known(*values) -> bool:
    """Whether all values are concrete, so that their contents can be read."""
    return not any(isinstance(value, Tracer) for value in values)


def check_tokens(
    tokens, counts, config: ModelConfig, *, allow_empty: bool, padding: Padding = "right"
) -> None:
    """Demands int32 tokens [B, T] in the vocabulary and int32 counts [B] with 0 <= counts <= T.

    Padding may hold any id.

    Args:
        allow_empty: whether a row may have no token.
        padding: on which side of `tokens` the padding is.

    Raises:
        TypeError: not int32 arrays. ValueError: shapes, counts or ids are wrong.
    """
    for name, value in (("tokens", tokens), ("counts", counts)):
        dtype = getattr(value, "dtype", None)
        if dtype != np.int32:
            raise TypeError(
                f"{name} is {dtype or type(value).__name__}; give an int32 array "
                "(pad_prompts makes one from lists of ids)"
            )
    if tokens.ndim != 2 or tokens.shape[0] == 0:
        raise ValueError(f"tokens has shape {tokens.shape}; expected [B, T], one prompt a row")
    batch, width = tokens.shape
    if counts.shape != (batch,):
        raise ValueError(f"counts has shape {counts.shape}; expected ({batch},), one a row")
    if not known(tokens, counts):
        return
    if padding not in ("right", "left"):
        raise ValueError(f"padding = {padding!r}; give 'right' or 'left'")
    ids, sizes = np.asarray(tokens), np.asarray(counts)
    for row in range(batch):
        if not 0 <= sizes[row] <= width:
            raise ValueError(f"counts[{row}] = {sizes[row]}; tokens has {width} columns")
        if sizes[row] == 0 and not allow_empty:
            raise ValueError(f"row {row}: the prompt is empty; give at least one token (BOS, say)")
    column = np.arange(width) if padding == "right" else np.arange(width)[::-1]
    check_ids(ids[column < sizes[:, None]], config)


def check_width(tokens) -> None:
    """Demands at least one column.

    Raises:
        ValueError: there is none.
    """
    if tokens.shape[1] == 0:
        raise ValueError(f"tokens has shape {tokens.shape}: there is nothing to feed")


def check_ids(ids: np.ndarray, config: ModelConfig) -> None:
    """Demands ids in 0 ... V - 1.

    Raises:
        ValueError: one isn't.
    """
    wrong = ids[(ids < 0) | (ids >= config.vocab_size)]
    if wrong.size:
        raise ValueError(
            f"token id {wrong.flat[0]} is outside the vocabulary of {config.vocab_size}; is the "
            "tokenizer another model's?"
        )


def check_room(cache: Cache, counts, *, extra: int = 0) -> None:
    """Demands that every row can take its `counts` tokens and `extra` more.

    Raises:
        ValueError: a row would pass the cache's capacity, or the room that the method left.
    """
    if not known(cache.state.lengths, counts):
        return
    held = np.asarray(cache.state.lengths) + int(cache.pending)
    needed = held + np.asarray(counts) + extra
    row = int(needed.argmax())
    if needed[row] > cache.capacity:
        raise ValueError(
            f"row {row}: {held[row]} tokens held + {int(np.asarray(counts)[row])} given + {extra} "
            f"to generate = {needed[row]}, beyond the cache's capacity of {cache.capacity}; make "
            "the cache larger"
        )
    if not hasattr(cache.method, "room"):
        return
    needed = needed - np.asarray(cache.state.lengths)  # with what is pending
    room = np.asarray(cache.method.room(cache.state))  # type: ignore[attr-defined]
    row = int((needed - room).argmax())
    if needed[row] > room[row]:
        raise ValueError(
            f"row {row}: {needed[row]} tokens to come, and {type(cache.method).__name__} made room "
            f"for {room[row]} when it compressed the prompt; give a larger capacity (or room, to "
            "finish_prefill)"
        )


def check_batch(cache: Cache, batch: int) -> None:
    """Demands as many rows as the cache has.

    Raises:
        ValueError: they differ.
    """
    if cache.batch != batch:
        raise ValueError(f"{batch} rows of tokens for a cache of {cache.batch} rows")
