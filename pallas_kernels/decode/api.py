"""The public decode op: validates once, then runs one implementation."""

import functools
from typing import Literal

from jaxtyping import Array, Float, Int32

from pallas_kernels import checks
from pallas_kernels.decode import mosaic, reference, xla
from pallas_kernels.patterns import Pattern
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.types import AttentionOutput

Implementation = Literal["reference", "xla", "mosaic", "mosaic_portable", "mosaic_hopper"]
_PLAIN = {"reference": reference.decode_attention, "xla": xla.decode_attention}
_KERNELS = {"mosaic_portable": mosaic.PORTABLE, "mosaic_hopper": mosaic.HOPPER}


def decode_attention(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"] | QuantizedPages,
    value_pages: Float[Array, "N P D"] | QuantizedPages,
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    table: Int32[Array, "B K C"] | None = None,
    selected: Int32[Array, "B K M"] | None = None,
    window: int | None = None,
    sinks: int = 0,
    stride: int | None = None,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Attention of each sequence's newest token over its cached tokens.

    The query of row b stands at position `lengths[b] - 1`. It sees the positions up to its own
    that are among the last `window`, or among the first `sinks`, or a multiple of `stride` (all of
    them without a window), and that lie on a `selected` page if pages are selected. A row that
    sees nothing gives out 0, lse -inf. Query head h reads KV head h // (H / K). Scores are scaled
    by D ** -0.5; softmax is in float32. Only pages that hold a visible position are read.

    Args:
        query: rotated queries, float32, bfloat16 or float16.
        key_pages, value_pages: the pool; the newest token already written; same dtype as the
            query, or quantised: keys by channel, values by token. Unwritten slots may hold
            anything.
        lengths: tokens each row holds, the newest included, int32 [B].
        kv_heads: K.
        table: the page of the pool that holds logical page c (positions c * P ... c * P + P - 1)
            of each KV head of each row; -1 for none, whose positions weigh 0. None: the pool is
            in the contiguous layout (`pallas_kernels.pages`).
        selected: logical pages to attend to, each at most once, in any order; -1 for none.
        window: tokens the query sees, itself included; None for all.
        sinks: tokens at the start that it sees besides.
        stride: it also sees positions that are a multiple of this.
        implementation: force one ("mosaic" is the better kernel of the two for the card and the
            arrays); None picks a kernel on a GPU that has one for them, else XLA.

    Raises:
        ValueError, TypeError: shapes, dtypes, page ids or options disagree, or the forced
            implementation cannot serve them; the message names them.
    """
    checks.check_query(query, "[B, H, D]")
    batch, heads, dim = query.shape
    checks.check_heads(heads, kv_heads)
    checks.check_pages(key_pages, value_pages, head_dim=dim)
    checks.check_quantized(key_pages, value_pages)
    checks.check_floats(query=query, key_pages=key_pages, value_pages=value_pages)
    checks.check_rows(batch, lengths=lengths)
    pages = key_pages.shape[0]
    checks.check_table(table, selected, batch=batch, kv_heads=kv_heads, pages=pages)
    if selected is not None and selected.ndim != 3:
        raise ValueError(f"selected has shape {selected.shape}; expected [B, K, M]")
    pattern = Pattern(window, sinks, stride)
    run = _pick(implementation, query, key_pages, value_pages, kv_heads)
    return run(
        query, key_pages, value_pages, lengths,
        kv_heads=kv_heads, pattern=pattern, table=table, selected=selected,
    )  # fmt: skip


def _pick(implementation, query, key_pages, value_pages, kv_heads: int):
    """The body to run: the one asked for, else the best kernel here, else XLA.

    Raises:
        ValueError: the name is unknown, or a kernel was asked for that cannot serve this.
    """
    checks.check_known(implementation, [*_PLAIN, "mosaic", *_KERNELS])
    if implementation in _PLAIN:
        return _PLAIN[implementation]
    arrays = (query, key_pages, value_pages)
    if implementation in _KERNELS:
        kernel = mosaic.demand(_KERNELS[implementation], *arrays, kv_heads=kv_heads)
    else:
        kernel = mosaic.choose(*arrays, kv_heads=kv_heads)
    if not isinstance(kernel, str):
        return functools.partial(mosaic.run, kernel)
    checks.check_served(implementation, kernel)
    return _PLAIN["xla"]
