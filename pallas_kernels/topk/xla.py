"""Scores of pages and tokens, and the best of them, in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.quant.reference import dequantize


def page_scores(
    query: Float[Array, "B H D"],
    summaries: Float[Array, "BK C 2D"],
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    size: int,
) -> Float32[Array, "B K C"]:
    """See `pallas_kernels.topk.api.page_scores`: one pass over the summaries."""
    batch = query.shape[0]
    count = summaries.shape[1]
    halves = signed_halves(query).reshape(batch * kv_heads, -1, summaries.shape[2])
    bound = _best_product(summaries, halves).reshape(batch, kv_heads, count)
    held = jnp.arange(count) * size < lengths[:, None, None]
    return jnp.where(held, bound * query.shape[2] ** -0.5, -jnp.inf)


def signed_halves(query: Float[Array, "*n D"]) -> Float[Array, "*n 2D"]:
    """`[relu(q), -relu(-q)]`, whose product with a summary is the page's bound.

    The least positive number stands in for zeros: 0 * inf is NaN, and so a neutral page gets -inf
    exactly. It raises a bound by less than its rounding, and never lowers it.
    """
    limits = jnp.finfo(query.dtype)
    # float16's least normal number would be seen in the sum; float32's subnormals are flushed.
    least = limits.smallest_subnormal if query.dtype == jnp.float16 else limits.tiny
    least = least.astype(query.dtype)
    return jnp.concatenate([jnp.maximum(query, least), -jnp.maximum(-query, least)], -1)


def token_scores(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"] | QuantizedPages,
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    table: Int32[Array, "B K C"] | None,
) -> Float32[Array, "B K S"]:
    """See `pallas_kernels.topk.api.token_scores`.

    Reads contiguous pages where they lie; those of a table are gathered, and quantised ones
    become float32, both a copy.
    """
    batch, heads, dim = query.shape
    pool, size, _ = key_pages.shape
    grouped = query.reshape(batch, 1, kv_heads, heads // kv_heads, dim)
    if table is None:
        count = pool // (batch * kv_heads)
        there = True
    else:
        count = table.shape[2]
        held = (table >= 0) & (table < pool)
        chosen = jnp.where(held, table, 0).swapaxes(1, 2).reshape(-1)
        key_pages = jax.tree.map(lambda each: each[chosen], key_pages)
        there = jnp.repeat(held, size, axis=2)
    if isinstance(key_pages, QuantizedPages):
        # Offsets can be large beside the spread of a channel: 16 bits would round it away.
        key_pages, grouped = dequantize(key_pages), grouped.astype(jnp.float32)
    spread = jnp.broadcast_to(grouped, (batch, count, *grouped.shape[2:]))
    scores = _best_product(key_pages, spread.reshape(-1, *grouped.shape[3:]))
    scores = scores.reshape(batch, count, kv_heads, size).swapaxes(1, 2)
    scores = scores.reshape(batch, kv_heads, count * size) * dim**-0.5
    seen = (jnp.arange(count * size) < lengths[:, None, None]) & there
    return jnp.where(seen, scores, -jnp.inf)


def _best_product(
    left: Float[Array, "n s d"], right: Float[Array, "n g d"]
) -> Float32[Array, "n s"]:
    """The largest of `left @ right.T` along the last axis."""
    if right.shape[1] == 1 and right.dtype.itemsize == 2:
        # XLA's CPU back end would widen `left` in a copy; a twin row avoids that.
        right = jnp.repeat(right, 2, axis=1)
    return jnp.einsum(
        "nsd,ngd->nsg",
        left,
        right,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if left.dtype == jnp.float32 else None,
    ).max(-1)


def top_k(scores: Float[Array, "*n C"], k: int) -> Int32[Array, "*n M"]:
    """See `pallas_kernels.topk.api.top_k`; `lax.top_k`, with its -inf entries taken out.

    On the CPU 32 rows of 32768 scores take about 10 ms for k = 1024, of 2048 under 1 ms for 64.
    """
    k = min(k, scores.shape[-1])
    scores = scores.astype(jnp.float32)
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    # lax.top_k ranks +0 above -0, which would break their tie.
    scores = jnp.where(scores == 0, 0.0, scores)
    best, index = lax.top_k(scores, k)
    return jnp.where(best == -jnp.inf, -1, index)
