"""Page summaries: how low and how high each channel of a page's keys goes.

Quest (arXiv 2406.10774) bounds the score of every key of a page by them. One array
`[B * K, C, 2 D]`: row b * K + k is KV head k of sequence b, and each of its C logical pages has D
channel-wise maxima, then D minima. A page without a key is neutral: maxima -inf, minima +inf. The
leading axis is flat, so that the in-place update stays one on XLA's CPU back end
(`pallas_kernels.pages`).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import checks
from pallas_kernels.page_lists import contiguous_table
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.quant.reference import dequantize


def new_summaries(batch: int, kv_heads: int, count: int, dim: int, dtype) -> jax.Array:
    """Summaries of pages without keys: `[batch * kv_heads, count, 2 * dim]`."""
    shape = (batch * kv_heads, count, dim)
    high, low = jnp.full(shape, -jnp.inf, dtype), jnp.full(shape, jnp.inf, dtype)
    return jnp.concatenate([high, low], -1)


def summarize_pages(
    key_pages: Float[Array, "N P D"] | QuantizedPages,
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    table: Int32[Array, "B K C"] | None = None,
) -> Float[Array, "BK C 2D"]:
    """Summaries of all pages anew, from the keys below each row's length.

    Reads the whole pool (and with a table gathers a copy of it): for a prompt just loaded, not for
    every step, which `update_summaries` serves.

    Args:
        key_pages: rotated keys; slots at or behind a row's length may hold anything. Quantised
            keys are summarised as the numbers that their codes stand for.
        lengths: tokens each row holds, int32 [B].
        kv_heads: K.
        table: block table; None for the contiguous layout. Where it says -1 the page is neutral.

    Raises:
        ValueError, TypeError: shapes, dtypes or page ids disagree; the message names them.
    """
    batch = lengths.shape[0]
    checks.check_rows(batch, lengths=lengths)
    checks.check_table(table, None, batch=batch, kv_heads=kv_heads, pages=key_pages.shape[0])
    pool, size, dim = key_pages.shape
    dtype = key_pages.dtype
    if isinstance(key_pages, QuantizedPages):
        key_pages = dequantize(key_pages).astype(dtype)
    if table is None:
        count = pool // (batch * kv_heads)
        keys = key_pages.reshape(batch, count, kv_heads, size, dim)
        there = contiguous_table(batch, kv_heads, count).swapaxes(1, 2) >= 0
        order = (0, 2, 1)
    else:
        count = table.shape[2]
        there = (table >= 0) & (table < pool)
        keys = key_pages[jnp.where(there, table, 0)]  # B K C P D
        order = (0, 1, 2)
    position = jnp.arange(count)[:, None] * size + jnp.arange(size)
    held = position < lengths[:, None, None]  # B C P
    held = held[:, :, None] if table is None else held[:, None]
    held = (held & there[..., None])[..., None]
    high = jnp.where(held, keys, -jnp.inf).max(3)
    low = jnp.where(held, keys, jnp.inf).min(3)
    both = jnp.concatenate([high, low], -1).transpose(*order, 3)
    return both.reshape(batch * kv_heads, count, 2 * dim)


def update_summaries(
    summaries: Float[Array, "BK C 2D"],
    new: Float[Array, "B T K D"],
    starts: Int32[Array, " B"],
    counts: Int32[Array, " B"],
    *,
    size: int,
) -> Float[Array, "BK C 2D"]:
    """Folds each row's first `counts` new keys, at positions `starts ...`, into its summaries.

    In place under donation, O(B T) work whatever the capacity; called with what
    `pages.append_tokens` is called with. A page whose first slot is among the new keys is begun
    anew, so what its summary held before never matters; all others keep their bits. As there, the
    caller has checked `starts + counts <= C * size`.

    Args:
        summaries: contiguous: logical pages in order.
        new: rotated keys in the summaries' dtype; those at or behind a row's count may hold
            anything.
        starts, counts: int32 [B].
        size: P, tokens a page.

    Raises:
        ValueError, TypeError: shapes or dtypes disagree, or size is not positive.
    """
    if new.ndim != 4 or summaries.ndim != 3:
        raise ValueError(
            f"new has shape {new.shape}, summaries {summaries.shape}; expected [B, T, K, D] and "
            "[B * K, C, 2 D]"
        )
    batch, tokens, kv_heads, dim = new.shape
    if summaries.shape[0] != batch * kv_heads or summaries.shape[2] != 2 * dim:
        raise ValueError(
            f"summaries have shape {summaries.shape}; new {new.shape} needs "
            f"[{batch * kv_heads}, C, {2 * dim}]"
        )
    if size < 1:
        raise ValueError(f"size = {size}; give the tokens a page, at least 1")
    checks.check_floats(summaries=summaries, new=new)
    checks.check_rows(batch, starts=starts, counts=counts)
    fold_row = _fold_one if tokens == 1 else _fold_many

    def fold(row, summaries):
        return fold_row(summaries, new[row], starts[row], counts[row], row, size)

    if tokens == 0:
        return summaries
    if batch == 1:
        return fold(0, summaries)
    return lax.fori_loop(0, batch, fold, summaries)


def _fold_one(summaries, new, start, length, row, size):
    """One key [1, K, D]: read its page's summary, fold, write it back."""
    _, kv_heads, dim = new.shape
    # A finished row at full capacity has no page of its own: aim at its last one, keep it.
    page = jnp.minimum(start // size, summaries.shape[1] - 1)
    at = (row * kv_heads, page, 0)
    old = lax.dynamic_slice(summaries, at, (kv_heads, 1, 2 * dim))
    key = new.swapaxes(0, 1)
    high, low = jnp.maximum(old[..., :dim], key), jnp.minimum(old[..., dim:], key)
    begun = start % size == 0
    high, low = jnp.where(begun, key, high), jnp.where(begun, key, low)
    block = jnp.where(length > 0, jnp.concatenate([high, low], -1), old)
    return lax.dynamic_update_slice(summaries, block, at)


def _fold_many(summaries, new, start, length, row, size):
    """Read-modify-write of the run of pages that `start ... start + length` can touch."""
    tokens, kv_heads, dim = new.shape
    count = summaries.shape[1]
    touched = min(count, (tokens + size - 2) // size + 1)
    first = jnp.minimum(start // size, count - touched)
    offset = start - first * size
    # T spare slots behind the run, so that the pad tokens of a chunk fall off its end.
    run = jnp.zeros((touched * size + tokens, kv_heads, dim), new.dtype)
    run = lax.dynamic_update_slice(run, new, (offset, 0, 0))[: touched * size]
    run = run.reshape(touched, size, kv_heads, dim)
    slot = jnp.arange(touched * size).reshape(touched, size)
    fresh = (slot >= offset) & (slot < offset + length)
    some = fresh.any(1)[:, None]  # touched 1, beside K
    begun = fresh[:, 0][:, None]
    chosen = fresh[:, :, None, None]
    high = jnp.where(chosen, run, -jnp.inf).max(1).swapaxes(0, 1)  # K touched D
    low = jnp.where(chosen, run, jnp.inf).min(1).swapaxes(0, 1)
    at = (row * kv_heads, first, 0)
    old = lax.dynamic_slice(summaries, at, (kv_heads, touched, 2 * dim))
    high = jnp.where(begun, high, jnp.maximum(old[..., :dim], high))
    low = jnp.where(begun, low, jnp.minimum(old[..., dim:], low))
    block = jnp.where(some, jnp.concatenate([high, low], -1), old)
    return lax.dynamic_update_slice(summaries, block, at)
