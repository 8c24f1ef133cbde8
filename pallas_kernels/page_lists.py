"""Lists of the pages a decode step reads: dense, window, sinks, stride or chosen pages alike.

A *logical* page c of a sequence holds its positions c * P ... c * P + P - 1; a *block table* says
which page of the pool, its *physical* page, that is for each KV head. -1 stands for no page.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.patterns import Pattern


class PageList(NamedTuple):
    """What one decode step reads, entry by entry; where either is -1, nothing is read.

    physical: pages of the pool, int32 [B, K, M].
    logical: which page of its sequence each one is, int32 [B, K, M].
    """

    physical: Int32[Array, "B K M"]
    logical: Int32[Array, "B K M"]


def contiguous_table(batch: int, kv_heads: int, count: int) -> Int32[Array, "B K C"]:
    """The block table of the contiguous layout (`pallas_kernels.pages`)."""
    row, head, page = jnp.meshgrid(
        jnp.arange(batch, dtype=jnp.int32),
        jnp.arange(kv_heads, dtype=jnp.int32),
        jnp.arange(count, dtype=jnp.int32),
        indexing="ij",
    )
    return (row * count + page) * kv_heads + head


def visible_pages(
    lengths: Int32[Array, " B"], pattern: Pattern, size: int, count: int
) -> Int32[Array, "B M"]:
    """The logical pages that hold a position visible to the newest token of each row.

    M is static: what the pattern needs at the most, and never more than all `count` pages. Each
    page stands once; entries without one are -1.
    """
    everything = jnp.arange(count, dtype=jnp.int32)[None]
    fits = everything * size < lengths[:, None]
    dense = jnp.where(fits, everything, -1)
    if pattern.is_dense or (pattern.stride is not None and pattern.stride <= size):
        return dense
    assert pattern.window is not None
    near = min(count, (pattern.window + size - 2) // size + 1)
    sunk = -(-pattern.sinks // size)
    strided = 0 if pattern.stride is None else -(-count * size // pattern.stride)
    if near + sunk + strided >= count:
        return dense
    first = jnp.maximum(lengths - pattern.window, 0)[:, None] // size  # of the window
    recent = first + jnp.arange(near, dtype=jnp.int32)
    parts = [jnp.where(recent * size < lengths[:, None], recent, -1)]
    if sunk:
        early = jnp.arange(sunk, dtype=jnp.int32)[None]
        parts.append(jnp.where(early < first, early, -1))
    if pattern.stride is not None:
        pages = jnp.arange(strided, dtype=jnp.int32)[None] * pattern.stride // size
        parts.append(jnp.where((pages < first) & (pages >= sunk), pages, -1))
    shape = (lengths.shape[0], -1)
    return jnp.concatenate([jnp.broadcast_to(p, (shape[0], p.shape[1])) for p in parts], 1)


def list_pages(
    lengths: Int32[Array, " B"],
    pattern: Pattern,
    *,
    kv_heads: int,
    pages: int,
    size: int,
    table: Int32[Array, "B K C"] | None,
    selected: Int32[Array, "B K M"] | None,
) -> PageList:
    """The pages a decode step reads.

    Args:
        lengths: tokens each row holds, int32 [B].
        pattern: positions visible to the newest one.
        kv_heads: K.
        pages: N, pages in the pool.
        size: P, tokens a page.
        table: block table; None for the contiguous layout.
        selected: logical pages to read, in place of all that the pattern sees.
    """
    batch = lengths.shape[0]
    if table is None:
        table = contiguous_table(batch, kv_heads, pages // (batch * kv_heads))
    count = table.shape[2]
    if selected is None:
        logical = visible_pages(lengths, pattern, size, count)[:, None]
        logical = jnp.broadcast_to(logical, (batch, kv_heads, logical.shape[2]))
    else:
        held = (selected >= 0) & (selected < count)
        logical = jnp.where(held & (selected * size < lengths[:, None, None]), selected, -1)
    physical = jnp.take_along_axis(table, jnp.maximum(logical, 0), axis=2)
    valid = (logical >= 0) & (physical >= 0) & (physical < pages)
    return PageList(jnp.where(valid, physical, -1), jnp.where(valid, logical, -1))
