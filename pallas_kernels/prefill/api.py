"""The public prefill op: validates once, then runs one implementation."""

import functools
from typing import Literal

from jaxtyping import Array, Float, Int32

from pallas_kernels import checks
from pallas_kernels.mosaic_support import mosaic_card
from pallas_kernels.patterns import Pattern
from pallas_kernels.prefill import mosaic, reference, xla
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.tuned import tiles_for
from pallas_kernels.types import AttentionOutput

Implementation = Literal["reference", "xla", "mosaic"]
_PLAIN = {"reference": reference.prefill_attention, "xla": xla.prefill_attention}


def prefill_attention(
    query: Float[Array, "B T H D"],
    key_pages: Float[Array, "N P D"],
    value_pages: Float[Array, "N P D"],
    starts: Int32[Array, " B"],
    counts: Int32[Array, " B"],
    *,
    kv_heads: int,
    table: Int32[Array, "B K C"] | None = None,
    selected: Int32[Array, "B K Q M"] | None = None,
    query_block: int | None = None,
    window: int | None = None,
    sinks: int = 0,
    stride: int | None = None,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Causal attention of a chunk over the tokens up to and including each query.

    Query t of row b stands at position `starts[b] + t`. It sees the positions up to its own that
    are among the last `window`, or among the first `sinks`, or a multiple of `stride` (all of
    them without a window), and that lie on a page selected for its block of queries if pages are
    selected. Queries with t >= counts[b] are padding: they see nothing (out 0, lse -inf). Query
    head h reads KV head h // (H / K). Scores are scaled by D ** -0.5; softmax is in float32.
    Key blocks that no query of a block sees are neither read nor multiplied.

    Args:
        query: rotated queries, float32, bfloat16 or float16.
        key_pages, value_pages: the pool, the chunk's own tokens already written; same dtype as
            the query. Unwritten slots may hold anything.
        starts: tokens each row held before the chunk, int32 [B].
        counts: valid tokens of each row in the chunk, int32 [B].
        kv_heads: K.
        table: the page of the pool that holds logical page c (positions c * P ... c * P + P - 1)
            of each KV head of each row; -1 for none, whose positions weigh 0. None: the pool is
            in the contiguous layout (`pallas_kernels.pages`).
        selected: for each block of `query_block` queries, the logical pages it attends to, each
            at most once, in any order; -1 for none. Q = ceil(T / query_block).
        query_block: queries a block of `selected`.
        window: tokens a query sees, itself included; None for all.
        sinks: tokens at the start that it sees besides.
        stride: it also sees positions that are a multiple of this.
        implementation: force one; None picks the kernel on a Hopper GPU if it serves the arrays,
            else XLA.

    Raises:
        ValueError, TypeError: shapes, dtypes, page ids or options disagree, or the forced
            implementation cannot serve them; the message names them.
    """
    checks.check_query(query, "[B, T, H, D]")
    batch, tokens, heads, dim = query.shape
    checks.check_heads(heads, kv_heads)
    checks.check_pages(key_pages, value_pages, head_dim=dim)
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        if isinstance(pages, QuantizedPages):
            raise TypeError(f"{name} are quantised; prefill reads plain pages: dequantise them")
    checks.check_floats(query=query, key_pages=key_pages, value_pages=value_pages)
    checks.check_rows(batch, starts=starts, counts=counts)
    pages = key_pages.shape[0]
    checks.check_table(table, selected, batch=batch, kv_heads=kv_heads, pages=pages)
    query_block = _check_blocks(selected, query_block, tokens)
    pattern = Pattern(window, sinks, stride)
    run = _pick(
        implementation,
        query,
        key_pages,
        value_pages,
        None if selected is None else query_block,
        kv_heads,
    )
    return run(
        query, key_pages, value_pages, starts, counts,
        kv_heads=kv_heads, pattern=pattern, table=table, selected=selected,
        query_block=query_block,
    )  # fmt: skip


def _pick(implementation, query, key_pages, value_pages, query_block, kv_heads: int):
    """The body to run: the one asked for, else the kernel if it can run here, else XLA.

    Raises:
        ValueError: the name is unknown, or the kernel was asked for and cannot serve this.
    """
    checks.check_known(implementation, [*_PLAIN, "mosaic"])
    if implementation in _PLAIN:
        return _PLAIN[implementation]
    card = mosaic_card()
    if isinstance(card, str):
        reason = card
    elif not card.is_hopper:
        reason = f"needs a Hopper card; this one is {card.kind}"
    else:
        reason = mosaic.unsupported(query, key_pages, value_pages)
        if reason is None:
            tiles = tiles_for(
                card,
                "prefill",
                mosaic.default_tiles,
                tokens=query.shape[1],
                group=query.shape[2] // kv_heads,
                size=key_pages.shape[1],
                dim=query.shape[3],
                query_block=query_block,
            )
            return functools.partial(mosaic.prefill_attention, tiles=tiles)
    checks.check_served(implementation, reason)
    return _PLAIN["xla"]


def _check_blocks(selected, query_block: int | None, tokens: int) -> int:
    """The queries of a block, which is the whole chunk where no pages are selected."""
    if (selected is None) != (query_block is None):
        raise ValueError(
            f"selected is {'not ' if selected is None else ''}given, query_block = {query_block}; "
            "they go together: the pages of each block of so many queries"
        )
    if selected is None or query_block is None:
        return tokens
    if not isinstance(query_block, int) or query_block < 1:
        raise ValueError(f"query_block = {query_block!r}; give a number of queries >= 1")
    blocks = -(-tokens // query_block)
    if selected.ndim != 4 or selected.shape[2] != blocks:
        raise ValueError(
            f"selected has shape {selected.shape}; {tokens} queries in blocks of {query_block} "
            f"need [B, K, {blocks}, M]"
        )
    return query_block
