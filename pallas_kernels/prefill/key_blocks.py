"""Which key blocks a tile of queries visits: the work of a prefill kernel, by arithmetic.

A *key block* is a run of `keys` positions that begins at a multiple of `keys`; with selected pages
it is a run of so many tokens of the list instead. The functions take Python ints, arrays and the
scalars of a kernel alike, so that a kernel and a test of its work count with the same code.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.patterns import Pattern


@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """How the queries of a chunk are cut into tiles; no tile crosses a block of `block` queries.

    Attributes:
        total: T, queries of the chunk.
        block: queries that share one list of selected pages; T where none are selected.
        tokens: queries a tile.
    """

    total: int
    block: int
    tokens: int

    @property
    def blocks(self) -> int:
        return -(-self.total // self.block)

    @property
    def per_block(self) -> int:
        return -(-self.block // self.tokens)

    @property
    def count(self) -> int:
        return self.blocks * self.per_block

    def span(self, tile, start, count):
        """(first position, last position, first query) of a tile; last < first where it is empty.

        Args:
            tile: which tile.
            start: position of the chunk's first query.
            count: valid queries of the chunk.
        """
        within = tile % self.per_block * self.tokens
        offset = tile // self.per_block * self.block + within
        stop = jnp.minimum(offset + jnp.minimum(self.tokens, self.block - within), count)
        return start + offset, start + stop - 1, offset

    def spread(self, query: Float[Array, "B T *rest"]) -> Float[Array, "B T2 *rest"]:
        """The queries with room behind each block, so that tiles are whole (no copy if so)."""
        batch, tokens, *rest = query.shape
        none = ((0, 0),) * (query.ndim - 2)
        behind = self.blocks * self.block - tokens
        query = jnp.pad(query, ((0, 0), (0, behind), *none))
        query = query.reshape(batch, self.blocks, self.block, *rest)
        room = self.per_block * self.tokens - self.block
        query = jnp.pad(query, ((0, 0), (0, 0), (0, room), *none))
        return query.reshape(batch, -1, *rest)

    def gather(self, out: Float[Array, "B T2 *rest"]) -> Float[Array, "B T *rest"]:
        """The inverse of `spread`."""
        batch, _, *rest = out.shape
        out = out.reshape(batch, self.blocks, -1, *rest)[:, :, : self.block]
        return out.reshape(batch, -1, *rest)[:, : self.total]


class Visits(NamedTuple):
    """Key blocks in the order of a visit: of the sinks, of strided positions, then the rest.

    sunk: blocks 0 ... sunk - 1.
    multiple, strided: the blocks of the positions stride * multiple, stride * (multiple + 1), ...
    near_first, near: blocks near_first ... near_first + near - 1.
    """

    sunk: Any
    multiple: Any
    strided: Any
    near_first: Any
    near: Any

    @property
    def total(self):
        return self.sunk + self.strided + self.near


def pattern_visits(first, last, pattern: Pattern, keys: int) -> Visits:
    """The key blocks that hold a position visible to a query at `first` ... `last`.

    With a stride shorter than a block those are all blocks up to the diagonal.
    """
    some = last >= first
    end = jnp.where(some, last // keys + 1, 0)
    zero = end * 0
    stride = pattern.stride
    if pattern.is_dense or (stride is not None and stride < keys):
        return Visits(zero, zero, zero, zero, end)
    assert pattern.window is not None
    near_first = jnp.maximum(first - (pattern.window - 1), 0) // keys
    near_first = jnp.where(some, near_first, 0)
    sunk = jnp.minimum(-(-pattern.sinks // keys), near_first)
    multiple = strided = zero
    if stride is not None:
        multiple = (sunk * keys + stride - 1) // stride
        strided = jnp.maximum((near_first * keys + stride - 1) // stride - multiple, 0)
    return Visits(sunk, multiple, strided, near_first, end - near_first)


def block_at(visit, visits: Visits, pattern: Pattern, keys: int):
    """The key block of visit 0 ... total - 1."""
    block = visits.near_first + visit - visits.sunk - visits.strided
    if pattern.stride is not None and pattern.stride >= keys:
        strided = (visits.multiple + jnp.maximum(visit - visits.sunk, 0)) * pattern.stride // keys
        block = jnp.where(visit < visits.sunk + visits.strided, strided, block)
    if pattern.sinks:
        block = jnp.where(visit < visits.sunk, visit, block)
    return block


class SelectedPages(NamedTuple):
    """The pages that each tile of queries visits, those that it need not read taken out.

    logical, physical: int32 [B, K, tiles, M]; only the first `number` entries of a row count.
    number: int32 [B, K, tiles].
    """

    logical: Int32[Array, "B K tiles M"]
    physical: Int32[Array, "B K tiles M"]
    number: Int32[Array, "B K tiles"]


def selected_pages(
    selected: Int32[Array, "B K Q M"],
    table: Int32[Array, "B K C"],
    starts: Int32[Array, " B"],
    counts: Int32[Array, " B"],
    *,
    tiles: QueryTiles,
    pattern: Pattern,
    size: int,
    pool: int,
) -> SelectedPages:
    """The listed pages that hold a position visible to a query of the tile.

    Args:
        selected, table, starts, counts, pattern: see `pallas_kernels.prefill.api`.
        tiles: how the queries are cut.
        size: P, tokens a page.
        pool: N, pages in the pool.
    """
    first, last, _ = tiles.span(jnp.arange(tiles.count), starts[:, None], counts[:, None])
    first, last = first[:, None, :, None], last[:, None, :, None]  # B 1 tiles 1
    logical = jnp.repeat(selected, tiles.per_block, axis=2)
    batch, kv_heads, count, width = logical.shape
    held = (logical >= 0) & (logical < table.shape[2])
    ids = jnp.where(held, logical, 0).reshape(batch, kv_heads, -1)
    physical = jnp.take_along_axis(table, ids, axis=2).reshape(logical.shape)
    begin = logical * size
    seen = held & (physical >= 0) & (physical < pool) & (begin <= last) & (first <= last)
    if not pattern.is_dense:
        assert pattern.window is not None
        near = begin + size > first - (pattern.window - 1)
        near |= begin < pattern.sinks
        if pattern.stride is not None:
            end = jnp.minimum(begin + size - 1, last)
            near |= -(-begin // pattern.stride) * pattern.stride <= end
        seen &= near
    order = jnp.argsort(~seen, axis=3, stable=True)
    return SelectedPages(
        jnp.take_along_axis(logical, order, axis=3),
        jnp.take_along_axis(physical, order, axis=3),
        seen.sum(3, dtype=jnp.int32),
    )


def blocks_visited(
    starts: Int32[Array, " B"],
    counts: Int32[Array, " B"],
    *,
    tiles: QueryTiles,
    pattern: Pattern,
    keys: int,
) -> Int32[Array, "B tiles"]:
    """How many key blocks each tile of queries reads and multiplies, where none are selected.

    With selected pages it is `ceil(SelectedPages.number * P / keys)`.
    """
    first, last, _ = tiles.span(jnp.arange(tiles.count), starts[:, None], counts[:, None])
    return pattern_visits(first, last, pattern, keys).total
