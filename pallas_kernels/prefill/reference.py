"""Causal attention of a chunk of queries over everything before it: slow, obvious, float32.

The oracle of `xla.py`: a dense mask, one softmax, full precision.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.pages import gather_tokens
from pallas_kernels.types import AttentionOutput


def masked_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K D"],
    mask: Bool[Array, "B T S"],
) -> AttentionOutput:
    """Softmax attention under a dense mask; a query that sees no key gets 0 and lse = -inf."""
    batch, tokens, heads, dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    # Masked slots may hold anything, NaN too: a weight of 0 does not silence them.
    seen = mask.any(1)[:, :, None, None]
    key = jnp.where(seen, key.astype(jnp.float32), 0)
    value = jnp.where(seen, value.astype(jnp.float32), 0)
    high = jax.lax.Precision.HIGHEST
    scores = jnp.einsum(
        "btkgd,bskd->btkgs", grouped.astype(jnp.float32), key, precision=high
    ) / jnp.sqrt(jnp.float32(dim))
    scores = jnp.where(mask[:, :, None, None], scores, -jnp.inf)
    peak = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = weights.sum(-1)
    safe = jnp.where(total == 0, 1.0, total)
    out = jnp.einsum("btkgs,bskd->btkgd", weights, value, precision=high) / safe[..., None]
    lse = jnp.where(total == 0, -jnp.inf, peak[..., 0] + jnp.log(safe))
    return AttentionOutput(
        out.reshape(query.shape).astype(query.dtype), lse.reshape(batch, tokens, heads)
    )


def causal_mask(
    starts: Int32[Array, " B"],
    counts: Int32[Array, " B"],
    tokens: int,
    slots: int,
    window: int | None,
) -> Bool[Array, "B T S"]:
    """Which of the slots 0..S-1 (slot = position) each of the T queries of a chunk may see."""
    offset = jnp.arange(tokens)
    query = starts[:, None, None] + offset[None, :, None]
    key = jnp.arange(slots)[None, None]
    mask = (key <= query) & (offset[None, :, None] < counts[:, None, None])
    if window is not None:
        mask &= key > query - window
    return mask


def prefill_attention(
    query: Float[Array, "B T H D"],
    key_pages: Float[Array, "N P D"],
    value_pages: Float[Array, "N P D"],
    starts: Int32[Array, " B"],
    counts: Int32[Array, " B"],
    *,
    kv_heads: int,
    window: int | None,
) -> AttentionOutput:
    """See `pallas_kernels.prefill.api.prefill_attention`."""
    batch, tokens, _, _ = query.shape
    key = gather_tokens(key_pages, batch, kv_heads)
    value = gather_tokens(value_pages, batch, kv_heads)
    mask = causal_mask(starts, counts, tokens, key.shape[1], window)
    return masked_attention(query, key, value, mask)
