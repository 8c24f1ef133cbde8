"""Attention of one query a sequence over its cached tokens: slow, obvious, float32."""

from jaxtyping import Array, Float, Int32

from pallas_kernels.pages import gather_tokens
from pallas_kernels.prefill.reference import causal_mask, masked_attention
from pallas_kernels.types import AttentionOutput


def decode_attention(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"],
    value_pages: Float[Array, "N P D"],
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    window: int | None,
) -> AttentionOutput:
    """See `pallas_kernels.decode.api.decode_attention`."""
    batch = query.shape[0]
    key = gather_tokens(key_pages, batch, kv_heads)
    value = gather_tokens(value_pages, batch, kv_heads)
    present = (lengths > 0).astype(lengths.dtype)
    mask = causal_mask(lengths - 1, present, 1, key.shape[1], window)
    out, lse = masked_attention(query[:, None], key, value, mask)
    return AttentionOutput(out[:, 0], lse[:, 0])
