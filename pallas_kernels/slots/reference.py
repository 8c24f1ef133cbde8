"""Attention over slots by dense masks, float32: slow, obvious, the oracle."""

import jax
import jax.numpy as jnp

from pallas_kernels.masked import masked_attention
from pallas_kernels.pages import gather_tokens
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.quant.reference import dequantize
from pallas_kernels.types import AttentionOutput


def slot_attention(
    query, key_pages, value_pages, positions, first, last, *, kv_heads
) -> AttentionOutput:
    """See `pallas_kernels.slots.api.slot_attention`."""
    key, value = (_tokens(pages, query.shape[0], kv_heads) for pages in (key_pages, value_pages))
    return masked_attention(query, key, value, _mask(positions, first, last, kv_heads))


def attention_mass(query, key_pages, lse, positions, first, last, *, kv_heads) -> jax.Array:
    """See `pallas_kernels.slots.api.attention_mass`."""
    batch, tokens, heads, dim = query.shape
    key = _tokens(key_pages, batch, kv_heads)
    mask = _mask(positions, first, last, kv_heads)
    key = jnp.where(mask.any(1).swapaxes(1, 2)[..., None], key.astype(jnp.float32), 0)
    grouped = query.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum(
        "btkgd,bskd->btkgs",
        grouped.astype(jnp.float32),
        key,
        precision=jax.lax.Precision.HIGHEST,
    ) / jnp.sqrt(jnp.float32(dim))
    lse = lse.reshape(batch, tokens, kv_heads, -1, 1)
    weights = jnp.exp(scores - jnp.where(lse == -jnp.inf, 0.0, lse))
    seen = mask[:, :, :, None] & (lse > -jnp.inf)
    return jnp.where(seen, weights, 0.0).sum((1, 3))


def _tokens(pages, batch, kv_heads):
    plain = dequantize(pages) if isinstance(pages, QuantizedPages) else pages
    return gather_tokens(plain, batch, kv_heads)


def _mask(positions, first, last, kv_heads):
    """Whether each query sees each slot of each KV head, [B, T, K, S]."""
    batch, _, slots = positions.shape
    positions = jnp.broadcast_to(positions, (batch, kv_heads, slots))[:, None]
    first, last = first[:, :, None, None], last[:, :, None, None]
    return (positions >= jnp.maximum(first, 0)) & (positions <= last)
