"""Attention of one query a sequence over its cached tokens: slow, obvious, float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.masked import chosen_pages, masked_attention, table_tokens
from pallas_kernels.page_lists import contiguous_table
from pallas_kernels.patterns import Pattern
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.types import AttentionOutput


def decode_attention(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"] | QuantizedPages,
    value_pages: Float[Array, "N P D"] | QuantizedPages,
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    pattern: Pattern,
    table: Int32[Array, "B K C"] | None,
    selected: Int32[Array, "B K M"] | None,
) -> AttentionOutput:
    """See `pallas_kernels.decode.api.decode_attention`."""
    batch = query.shape[0]
    size = key_pages.shape[1]
    if table is None:
        table = contiguous_table(batch, kv_heads, key_pages.shape[0] // (batch * kv_heads))
    key, there = table_tokens(key_pages, table)
    value, _ = table_tokens(value_pages, table)
    mask = pattern.visible(jnp.arange(key.shape[1]), lengths[:, None] - 1)[:, None] & there
    if selected is not None:
        mask &= jnp.repeat(chosen_pages(selected, table.shape[2]), size, axis=2)
    out, lse = masked_attention(query[:, None], key, value, mask[:, None])
    return AttentionOutput(out[:, 0], lse[:, 0])
