"""The public prefill op: validates once, then runs one implementation."""

from typing import Literal

from jaxtyping import Array, Float, Int32

from pallas_kernels import checks
from pallas_kernels.prefill import reference, xla
from pallas_kernels.types import AttentionOutput

Implementation = Literal["reference", "xla"]
_IMPLEMENTATIONS = {
    "reference": reference.prefill_attention,
    "xla": xla.prefill_attention,
}


def prefill_attention(
    query: Float[Array, "B T H D"],
    key_pages: Float[Array, "N P D"],
    value_pages: Float[Array, "N P D"],
    starts: Int32[Array, " B"],
    counts: Int32[Array, " B"],
    *,
    kv_heads: int,
    window: int | None = None,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Causal attention of a chunk over all tokens up to and including each query.

    Query t of row b stands at position `starts[b] + t` and sees the slots (slot = position)
    `max(0, position - window + 1) ... position`; queries with t >= counts[b] are padding: they
    see nothing (out 0, lse -inf). Query head h reads KV head h // (H / K). Scores are scaled by
    D ** -0.5; softmax is in float32.

    Args:
        query: rotated queries, float32, bfloat16 or float16.
        key_pages, value_pages: contiguous pages (see `pallas_kernels.pages`), the chunk's own
            tokens already appended; same dtype as the query. Unwritten slots may hold anything.
        starts: tokens each row held before the chunk, int32 [B].
        counts: valid tokens of each row in the chunk, int32 [B].
        kv_heads: K.
        window: tokens a query sees, itself included; None for all.
        implementation: force one; None picks for the platform.

    Raises:
        ValueError, TypeError: shapes, dtypes or options disagree; the message names them.
    """
    checks.check_query(query, "[B, T, H, D]")
    batch, _, heads, dim = query.shape
    checks.check_heads(heads, kv_heads)
    checks.check_pages(key_pages, value_pages, batch=batch, kv_heads=kv_heads, head_dim=dim)
    checks.check_floats(query=query, key_pages=key_pages, value_pages=value_pages)
    checks.check_rows(batch, starts=starts, counts=counts)
    checks.check_window(window)
    run = checks.pick(_IMPLEMENTATIONS, implementation, default="xla")
    return run(query, key_pages, value_pages, starts, counts, kv_heads=kv_heads, window=window)
