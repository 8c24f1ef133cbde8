"""Decode attention over contiguous pages in plain XLA.

Every page is one entry of a batched matrix product (flash-decoding: "Flash-Decoding for
long-context inference", Dao et al. 2023), which spreads one long sequence over all cores and
reads keys and values where they lie: no transposed, expanded or sliced copy of the cache.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.page_lists import list_pages
from pallas_kernels.pages import pages_per_sequence
from pallas_kernels.patterns import Pattern
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.quant.reference import dequantize
from pallas_kernels.types import AttentionOutput


def decode_attention(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"],
    value_pages: Float[Array, "N P D"],
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    pattern: Pattern,
    table: Int32[Array, "B K C"] | None,
    selected: Int32[Array, "B K M"] | None,
) -> AttentionOutput:
    """See `pallas_kernels.decode.api.decode_attention`."""
    if (
        table is None
        and selected is None
        and not pattern.sinks
        and pattern.stride is None
        and not isinstance(key_pages, QuantizedPages)
    ):
        return _contiguous(
            query, key_pages, value_pages, lengths, kv_heads=kv_heads, window=pattern.window
        )
    return _listed(
        query,
        key_pages,
        value_pages,
        lengths,
        kv_heads=kv_heads,
        pattern=pattern,
        table=table,
        selected=selected,
    )


def _listed(query, key_pages, value_pages, lengths, *, kv_heads, pattern, table, selected):
    batch, heads, dim = query.shape
    size = key_pages.shape[1]
    pages = list_pages(
        lengths,
        pattern,
        kv_heads=kv_heads,
        pages=key_pages.shape[0],
        size=size,
        table=table,
        selected=selected,
    )
    slot = pages.logical[..., None] * size + jnp.arange(size)
    end = lengths[:, None, None, None]
    seen = pattern.visible(slot, end - 1) & (pages.physical >= 0)[..., None]
    seen = seen.reshape(batch, kv_heads, -1)

    def read(pool):
        if isinstance(pool, QuantizedPages):
            pool = dequantize(pool).astype(query.dtype)
        chosen = pool[jnp.maximum(pages.physical, 0)].reshape(batch, kv_heads, -1, dim)
        return jnp.where(seen[..., None], chosen, 0)

    key, value = read(key_pages), read(value_pages)
    grouped = query.reshape(batch, kv_heads, -1, dim)
    scores = (
        jnp.einsum("bkgd,bksd->bkgs", grouped, key, preferred_element_type=jnp.float32) * dim**-0.5
    )
    scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
    peak = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = weights.sum(-1)
    safe = jnp.where(total == 0, 1.0, total)
    out = jnp.einsum(
        "bkgs,bksd->bkgd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    out = (out / safe[..., None]).reshape(batch, heads, dim).astype(query.dtype)
    lse = jnp.where(total == 0, -jnp.inf, peak[..., 0] + jnp.log(safe))
    return AttentionOutput(out, lse.reshape(batch, heads))


def _contiguous(
    query, key_pages, value_pages, lengths, *, kv_heads: int, window: int | None
) -> AttentionOutput:
    """Reads all N pages once: 2 * N * P * D elements, whatever the lengths."""
    batch, heads, dim = query.shape
    group = heads // kv_heads
    if group == 1 and query.dtype.itemsize == 2:
        # XLA's CPU back end multiplies a single 16-bit row by widening all keys in a copy; a twin
        # row avoids that and costs next to nothing where memory is the bound.
        twins = jnp.repeat(query, 2, axis=1)
        out, lse = _contiguous(
            twins, key_pages, value_pages, lengths, kv_heads=kv_heads, window=window
        )
        return AttentionOutput(out[:, ::2], lse[:, ::2])
    size = key_pages.shape[1]
    count = pages_per_sequence(key_pages, batch, kv_heads)
    apart = (batch, count, kv_heads)
    grouped = query.reshape(batch, 1, kv_heads, group, dim)
    spread = jnp.broadcast_to(grouped, (*apart, group, dim)).reshape(-1, group, dim)
    # Keys on the left: the form that XLA's CPU product runs fastest for a handful of queries.
    scores = jnp.einsum("nsd,ngd->nsg", key_pages, spread, preferred_element_type=jnp.float32)
    scores = scores.swapaxes(1, 2).reshape(*apart, group, size) * dim**-0.5
    slot = (jnp.arange(count)[:, None] * size + jnp.arange(size))[:, None, None]  # C 1 1 P
    ends = lengths[:, None, None, None, None]
    visible = slot < ends
    if window is not None:
        visible &= slot >= ends - window
    scores = jnp.where(visible, scores, -jnp.inf)
    peak = scores.max((1, 4), keepdims=True)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(scores - base)
    total = weights.sum((1, 4))  # B K G
    parts = _weigh_values(weights.astype(value_pages.dtype), value_pages, lengths)
    safe = jnp.where(total == 0, 1.0, total)
    out = parts.sum(1) / safe[..., None]
    lse = jnp.where(total == 0, -jnp.inf, peak[:, 0, ..., 0] + jnp.log(safe))
    out = out.reshape(batch, heads, dim).astype(query.dtype)
    return AttentionOutput(out, lse.reshape(batch, heads))


def _weigh_values(
    weights: Float[Array, "B C K G P"],
    value_pages: Float[Array, "N P D"],
    lengths: Int32[Array, " B"],
) -> Float[Array, "B C K G D"]:
    """Each page's weighted sum of values, with slots not written yet kept out.

    Such slots may hold NaN, and 0 * NaN is NaN. Cleaning all values would copy the cache, so
    pages with no token are dropped by their result, and only the one page of each sequence that
    is partly filled is cleaned and multiplied anew.
    """
    batch, count, kv_heads, group, size = weights.shape
    dim = value_pages.shape[2]
    flat = weights.reshape(-1, group, size)
    parts = jnp.einsum("ngs,nsd->ngd", flat, value_pages, preferred_element_type=jnp.float32)
    parts = parts.reshape(batch, count, kv_heads, group, dim)
    full = lengths // size  # whole pages of each row
    page = jnp.arange(count)[None, :, None, None, None]
    parts = jnp.where(page < full[:, None, None, None, None], parts, 0.0)
    partial = jnp.minimum(full, count - 1)
    written = jnp.arange(size)[:, None] < (lengths - partial * size)[:, None, None, None]
    first = (jnp.arange(batch) * count + partial) * kv_heads
    pages = jnp.stack(
        [lax.dynamic_slice_in_dim(value_pages, first[row], kv_heads) for row in range(batch)]
    )  # B K P D
    chosen = jnp.stack(
        [lax.dynamic_slice_in_dim(weights[row], partial[row], 1)[0] for row in range(batch)]
    )  # B K G P
    edge = jnp.einsum(
        "bkgs,bksd->bkgd",
        chosen,
        jnp.where(written, pages, 0),
        preferred_element_type=jnp.float32,
    )
    at_edge = (page == partial[:, None, None, None, None]) & (
        page == full[:, None, None, None, None]
    )
    return jnp.where(at_edge, edge[:, None], parts)
