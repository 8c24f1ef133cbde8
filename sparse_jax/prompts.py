"""Batches of prompts: lists of ids to one padded array, and the sizes they are padded to."""

from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from jaxtyping import Array, Int32

Padding = Literal["right", "left"]

_SMALLEST = 16


def bucket_length(length: int, chunk: int | None = None) -> int:
    """The size that `length` tokens are padded to: a power of two, at least 16.

    With a chunk, sizes beyond it are the chunk times a power of two, so that a bucket is whole
    chunks.
    """
    base = _SMALLEST
    if chunk is not None and length > chunk:
        base = chunk
    while base < length:
        base *= 2
    return base if chunk is None or length > chunk else min(base, max(chunk, 1))


def pad_prompts(
    prompts: Sequence[Sequence[int] | np.ndarray | jax.Array],
) -> tuple[Int32[Array, "B T"], Int32[Array, " B"]]:
    """Prompts as (tokens int32 [B, T] packed to the left, counts int32 [B]).

    Args:
        prompts: one sequence of ids a row: lists of ints, or integer arrays of one dtype.

    Raises:
        ValueError: no prompt, an empty one, or arrays of mixed dtypes. TypeError: not integers.
    """
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError("prompts: give a list with one sequence of token ids a row")
    rows = []
    dtypes = set()
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            raise TypeError(f"prompt {index} is text; encode it with the model's tokenizer first")
        row = np.asarray(prompt)
        if row.size == 0:
            raise ValueError(f"prompt {index} is empty; give at least one token (BOS, say)")
        if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
            raise TypeError(f"prompt {index} is {row.dtype}{row.shape}; give a row of integer ids")
        if isinstance(prompt, np.ndarray | jax.Array):
            dtypes.add(str(row.dtype))
        if row.min() < 0 or row.max() > np.iinfo(np.int32).max:
            raise ValueError(f"prompt {index} holds an id that is no int32 >= 0")
        rows.append(row.astype(np.int32))
    if len(dtypes) > 1:
        raise ValueError(f"prompts are of mixed dtypes ({', '.join(sorted(dtypes))}); use int32")
    counts = np.array([row.size for row in rows], np.int32)
    tokens = np.zeros((len(rows), int(counts.max())), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : row.size] = row
    # device_put: `jnp.asarray` would compile a program for every new shape.
    return jax.device_put(tokens), jax.device_put(counts)


def pack(
    tokens: np.ndarray, counts: np.ndarray, width: int, padding: Padding = "right"
) -> np.ndarray:
    """The same prompts packed to the left in `width` columns, with 0 behind them."""
    packed = np.zeros((tokens.shape[0], width), np.int32)
    for row, count in enumerate(counts):
        first = tokens.shape[1] - count if padding == "left" else 0
        packed[row, :count] = tokens[row, first : first + count]
    return packed
