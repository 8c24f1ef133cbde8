"""Attention under a dense mask, over pages laid out as tokens: slow, obvious, float32.

The oracle that the references of prefill and decode share.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.quant.reference import dequantize
from pallas_kernels.types import AttentionOutput


def masked_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K D"],
    mask: Bool[Array, "B T S"] | Bool[Array, "B T K S"],
) -> AttentionOutput:
    """Softmax attention under a dense mask; a query that sees no key gets 0 and lse = -inf.

    The mask is one for all heads, or one a KV head.
    """
    batch, tokens, heads, dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    mask = mask[:, :, None] if mask.ndim == 3 else mask  # B T K S
    # Masked slots may hold anything, NaN too: a weight of 0 does not silence them.
    seen = mask.any(1).swapaxes(1, 2)[..., None]
    key = jnp.where(seen, key.astype(jnp.float32), 0)
    value = jnp.where(seen, value.astype(jnp.float32), 0)
    high = jax.lax.Precision.HIGHEST
    scores = jnp.einsum(
        "btkgd,bskd->btkgs", grouped.astype(jnp.float32), key, precision=high
    ) / jnp.sqrt(jnp.float32(dim))
    scores = jnp.where(mask[:, :, :, None], scores, -jnp.inf)
    peak = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = weights.sum(-1)
    safe = jnp.where(total == 0, 1.0, total)
    out = jnp.einsum("btkgs,bskd->btkgd", weights, value, precision=high) / safe[..., None]
    lse = jnp.where(total == 0, -jnp.inf, peak[..., 0] + jnp.log(safe))
    return AttentionOutput(
        out.reshape(query.shape).astype(query.dtype), lse.reshape(batch, tokens, heads)
    )


def table_tokens(
    pages: Float[Array, "N P D"] | QuantizedPages,
    table: Int32[Array, "B K C"],
) -> tuple[Float[Array, "B S K D"], Bool[Array, "B K S"]]:
    """Every slot that a block table names, in token order, and whether there is one at all."""
    if isinstance(pages, QuantizedPages):
        pages = dequantize(pages)
    count, size, dim = pages.shape
    batch, kv_heads, _ = table.shape
    there = (table >= 0) & (table < count)
    tokens = pages[jnp.where(there, table, 0)].reshape(batch, kv_heads, -1, dim)
    return tokens.swapaxes(1, 2), jnp.repeat(there, size, axis=2)


def chosen_pages(selected: Int32[Array, "... M"], count: int) -> Bool[Array, "... C"]:
    """Whether each of the logical pages 0 ... count - 1 stands in a list."""
    return (selected[..., None] == jnp.arange(count)).any(-2)
