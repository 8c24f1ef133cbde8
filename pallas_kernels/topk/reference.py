"""Scores of pages and tokens, and the best of them: slow, obvious, float32."""

import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.masked import table_tokens
from pallas_kernels.page_lists import contiguous_table
from pallas_kernels.quant.pages import QuantizedPages


def page_scores(
    query: Float[Array, "B H D"],
    summaries: Float[Array, "BK C 2D"],
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    size: int,
) -> Float32[Array, "B K C"]:
    """See `pallas_kernels.topk.api.page_scores`."""
    batch, _, dim = query.shape
    count = summaries.shape[1]
    grouped = query.astype(jnp.float32).reshape(batch, kv_heads, -1, 1, dim)
    pages = summaries.astype(jnp.float32).reshape(batch, kv_heads, 1, count, 2 * dim)
    high, low = pages[..., :dim], pages[..., dim:]
    neutral = (high == -jnp.inf) & (low == jnp.inf)
    best = jnp.maximum(grouped * high, grouped * low)
    best = jnp.where(neutral, -jnp.inf, best)
    bound = best.sum(-1).max(2) / jnp.sqrt(jnp.float32(dim))
    held = jnp.arange(count) * size < lengths[:, None, None]
    return jnp.where(held, bound, -jnp.inf)


def token_scores(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"] | QuantizedPages,
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    table: Int32[Array, "B K C"] | None,
) -> Float32[Array, "B K S"]:
    """See `pallas_kernels.topk.api.token_scores`."""
    batch, _, dim = query.shape
    if table is None:
        table = contiguous_table(batch, kv_heads, key_pages.shape[0] // (batch * kv_heads))
    key, there = table_tokens(key_pages, table)
    grouped = query.astype(jnp.float32).reshape(batch, kv_heads, -1, dim)
    scores = jnp.einsum(
        "bkgd,bskd->bkgs", grouped, key.astype(jnp.float32), precision=Precision.HIGHEST
    ).max(2) / jnp.sqrt(jnp.float32(dim))
    held = there & (jnp.arange(key.shape[1]) < lengths[:, None, None])
    return jnp.where(held, scores, -jnp.inf)


def top_k(scores: Float[Array, "*n C"], k: int) -> Int32[Array, "*n M"]:
    """See `pallas_kernels.topk.api.top_k`."""
    ranked = jnp.where(jnp.isnan(scores), jnp.inf, scores.astype(jnp.float32))
    order = jnp.argsort(ranked, axis=-1, stable=True, descending=True)[..., :k]
    best = jnp.take_along_axis(ranked, order, axis=-1)
    return jnp.where(best == -jnp.inf, -1, order).astype(jnp.int32)
