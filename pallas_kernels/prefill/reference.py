"""Causal attention of a chunk of queries over everything before it: slow, obvious, float32.

The oracle of `xla.py` and `mosaic.py`: a dense mask, one softmax, full precision.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.masked import chosen_pages, masked_attention, table_tokens
from pallas_kernels.page_lists import contiguous_table
from pallas_kernels.patterns import Pattern
from pallas_kernels.types import AttentionOutput


def prefill_attention(
    query: Float[Array, "B T H D"],
    key_pages: Float[Array, "N P D"],
    value_pages: Float[Array, "N P D"],
    starts: Int32[Array, " B"],
    counts: Int32[Array, " B"],
    *,
    kv_heads: int,
    pattern: Pattern,
    table: Int32[Array, "B K C"] | None,
    selected: Int32[Array, "B K Q M"] | None,
    query_block: int,
) -> AttentionOutput:
    """See `pallas_kernels.prefill.api.prefill_attention`."""
    batch, tokens, _, _ = query.shape
    if table is None:
        table = contiguous_table(batch, kv_heads, key_pages.shape[0] // (batch * kv_heads))
    key, there = table_tokens(key_pages, table)
    value, _ = table_tokens(value_pages, table)
    offset = jnp.arange(tokens)
    positions = starts[:, None] + offset  # B T
    slots = jnp.arange(key.shape[1])
    mask = pattern.visible(slots, positions[..., None]) & (offset < counts[:, None])[..., None]
    mask = mask[:, :, None] & there[:, None]  # B T K S
    if selected is not None:
        blocks = chosen_pages(selected, table.shape[2])  # B K Q C
        blocks = jnp.repeat(blocks, key_pages.shape[1], axis=3)
        blocks = jnp.repeat(blocks, query_block, axis=2)[:, :, :tokens]
        mask &= blocks.swapaxes(1, 2)
    return masked_attention(query, key, value, mask)
