"""Dense decode over contiguous pages where they lie: one batched product, no copy of any page.

Every page is one entry of the product (flash-decoding: "Flash-Decoding for long-context
inference", Dao et al. 2023), which spreads one long sequence over all cores. It reads the whole
pool whatever the lengths, so it is the way for caches that are small or mostly filled.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.pages import pages_per_sequence


def attend(
    query: Float[Array, "B 1 K G D"],
    key_pages: Float[Array, "N P D"],
    value_pages: Float[Array, "N P D"],
    lengths: Int32[Array, " B"],
) -> tuple[Float32[Array, "B K G D"], Float32[Array, "B K G"]]:
    """Softmax attention over each row's first `lengths` slots, and its log-sum-exp."""
    batch, _, kv_heads, group, dim = query.shape
    size = key_pages.shape[1]
    count = pages_per_sequence(key_pages, batch, kv_heads)
    apart = (batch, count, kv_heads)
    spread = jnp.broadcast_to(query, (*apart, group, dim)).reshape(-1, group, dim)
    # Keys on the left: the form that XLA's CPU product runs fastest for a handful of queries.
    scores = jnp.einsum("nsd,ngd->nsg", key_pages, spread, preferred_element_type=jnp.float32)
    scores = scores.swapaxes(1, 2).reshape(*apart, group, size) * dim**-0.5
    slot = (jnp.arange(count)[:, None] * size + jnp.arange(size))[:, None, None]  # C 1 1 P
    scores = jnp.where(slot < lengths[:, None, None, None, None], scores, -jnp.inf)
    peak = scores.max((1, 4), keepdims=True)
    # A finite stand-in keeps exp(-inf - peak) at 0 in a row without keys.
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = weights.sum((1, 4))  # B K G
    parts = _weigh_values(weights.astype(value_pages.dtype), value_pages, lengths)
    safe = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, -jnp.inf, peak[:, 0, ..., 0] + jnp.log(safe))
    return parts.sum(1) / safe[..., None], lse


def _weigh_values(
    weights: Float[Array, "B C K G P"],
    value_pages: Float[Array, "N P D"],
    lengths: Int32[Array, " B"],
) -> Float32[Array, "B C K G D"]:
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
