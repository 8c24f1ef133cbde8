"""The public decode op: validates once, then runs one implementation."""

from typing import Literal

from jaxtyping import Array, Float, Int32

from pallas_kernels import checks
from pallas_kernels.decode import reference, xla
from pallas_kernels.types import AttentionOutput

Implementation = Literal["reference", "xla"]
_IMPLEMENTATIONS = {
    "reference": reference.decode_attention,
    "xla": xla.decode_attention,
}


def decode_attention(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"],
    value_pages: Float[Array, "N P D"],
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    window: int | None = None,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Attention of each sequence's newest token over its cached tokens.

    The query of row b stands at position `lengths[b] - 1` and sees the last `window` of the
    slots 0 ... lengths[b] - 1, its own included; a row of length 0 sees nothing (out 0, lse
    -inf). Query head h reads KV head h // (H / K). Scores are scaled by D ** -0.5; softmax is in
    float32.

    Args:
        query: rotated queries, float32, bfloat16 or float16.
        key_pages, value_pages: contiguous pages (see `pallas_kernels.pages`), the newest token
            already appended; same dtype as the query. Unwritten slots may hold anything.
        lengths: tokens each row holds, the newest included, int32 [B].
        kv_heads: K.
        window: tokens the query sees, itself included; None for all.
        implementation: force one; None picks for the platform.

    Raises:
        ValueError, TypeError: shapes, dtypes or options disagree; the message names them.
    """
    checks.check_query(query, "[B, H, D]")
    batch, heads, dim = query.shape
    checks.check_heads(heads, kv_heads)
    checks.check_pages(key_pages, value_pages, batch=batch, kv_heads=kv_heads, head_dim=dim)
    checks.check_floats(query=query, key_pages=key_pages, value_pages=value_pages)
    checks.check_rows(batch, lengths=lengths)
    checks.check_window(window)
    run = checks.pick(_IMPLEMENTATIONS, implementation, default="xla")
    return run(query, key_pages, value_pages, lengths, kv_heads=kv_heads, window=window)
