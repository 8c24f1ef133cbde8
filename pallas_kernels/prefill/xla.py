"""Blockwise causal attention in plain XLA: O(block) memory, unseen keys skipped, any back end.

Online softmax over blocks of keys ("Self-attention Does Not Need O(n^2) Memory", arXiv
2112.05682; the rescaling of FlashAttention, arXiv 2205.14135). A *tile* of queries walks the
blocks of pages that any of its queries sees, each row and KV head its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.page_lists import contiguous_table
from pallas_kernels.patterns import Pattern
from pallas_kernels.prefill.key_blocks import QueryTiles, SelectedPages, selected_pages
from pallas_kernels.types import AttentionOutput

# Chosen on a 2-core CPU: rows (queries times the heads that share a KV head) and keys of one
# matrix product, large enough for its rate and small enough for its scores to stay in cache.
_ROWS = 768
_KEYS = 512

# Under a short window a tile of fewer queries sees fewer keys that only some of them see, and all
# that it sees makes one product.
_SHORT_WINDOW = 2048
_SHORT_ROWS = 256
_SHORT_KEYS = 1024

# Gathering tokens one by one costs more than reading the few that a short stride leaves out.
_LEAST_GATHERED_STRIDE = 4


class _Tile(NamedTuple):
    """The queries of one turn of the outer loop.

    rows: [B, K, M, D], M = queries * G.
    position: of each row of M, -1 for padding, int32 [B, M].
    first, last: positions of the tile's first and last valid query, int32 [B].
    """

    rows: Float[Array, "B K M D"]
    position: Int32[Array, "B M"]
    first: Int32[Array, " B"]
    last: Int32[Array, " B"]


class _Block(NamedTuple):
    """Keys and values of one turn of the inner loop.

    position: of each key, int32 [B, K or 1, s].
    there: whether there is such a key.
    """

    key: Float[Array, "B K s D"]
    value: Float[Array, "B K s D"]
    position: Int32[Array, "B k s"]
    there: Bool[Array, "B k s"]


class _Walk(NamedTuple):
    """Blocks 0 ... turns - 1 of a tile, and which of their keys a query sees."""

    turns: Int32[Array, ""]
    read: Callable[[Any], _Block]
    visible: Callable[[Any, Any], Any]


class _Pool(NamedTuple):
    keys: Float[Array, "N P D"]
    values: Float[Array, "N P D"]
    table: Int32[Array, "B K C"]
    ends: Int32[Array, " B"]

    @property
    def size(self) -> int:
        return self.keys.shape[1]

    def pages(self, physical: Int32[Array, "B K m"], logical: Int32[Array, "B k m"]) -> _Block:
        """Some pages of every KV head, their slots joined; ids out of range are not there."""
        batch, kv_heads, _ = physical.shape
        held = (physical >= 0) & (physical < self.keys.shape[0]) & (logical >= 0)
        ids = jnp.where(held, physical, 0).reshape(-1)

        def take(pool):
            return (
                pool.at[ids]
                .get(mode="promise_in_bounds")
                .reshape(batch, kv_heads, -1, pool.shape[2])
            )

        position = logical[..., None] * self.size + jnp.arange(self.size)
        there = held[..., None] & (position < self.ends[:, None, None, None])
        flat = (*logical.shape[:2], -1)
        return _Block(
            take(self.keys),
            take(self.values),
            position.reshape(flat),
            there.reshape(*held.shape[:2], -1),
        )


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
    """See `pallas_kernels.prefill.api.prefill_attention`.

    Slots behind a row's end and pages that are not visited may hold anything.
    """
    batch, tokens, heads, dim = query.shape
    group = heads // kv_heads
    if table is None:
        table = contiguous_table(batch, kv_heads, key_pages.shape[0] // (batch * kv_heads))
    pool = _Pool(key_pages, value_pages, table, starts + counts)
    short = not pattern.is_dense and (pattern.window or 0) < _SHORT_WINDOW and selected is None
    each = min(max(1, (_SHORT_ROWS if short else _ROWS) // group), query_block)
    tiles = QueryTiles(tokens, query_block, each)
    # [tiles, B, K, M, D]: the queries that share a KV head form one matrix.
    split = tiles.spread(query).reshape(batch, tiles.count, each, kv_heads, group, dim)
    split = split.transpose(1, 0, 3, 2, 4, 5).reshape(tiles.count, batch, kv_heads, -1, dim)
    lists = _lists(selected, pool, starts, counts, tiles, pattern)

    def one_tile(carry, inputs):
        index, rows, listed = inputs
        first, last, _ = tiles.span(index, starts, counts)
        position = first[:, None] + jnp.arange(each)
        position = jnp.where(position <= last[:, None], position, -1)
        tile = _Tile(rows, jnp.repeat(position, group, axis=1), first, last)
        walks = (
            _walks(pool, tile, pattern, each)
            if listed is None
            else _walk_list(pool, listed, pattern)
        )
        return carry, _attend(tile, walks)

    _, (out, lse) = lax.scan(one_tile, None, (jnp.arange(tiles.count), split, lists))
    out = out.reshape(tiles.count, batch, kv_heads, each, group, dim)
    out = out.transpose(1, 0, 3, 2, 4, 5).reshape(batch, -1, heads, dim)
    lse = lse.reshape(tiles.count, batch, kv_heads, each, group)
    lse = lse.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads)
    return AttentionOutput(tiles.gather(out), tiles.gather(lse))


def _lists(selected, pool, starts, counts, tiles, pattern) -> SelectedPages | None:
    """The pages that each tile visits, tiles in front; None where none are selected."""
    if selected is None:
        return None
    lists = selected_pages(
        selected, pool.table, starts, counts,
        tiles=tiles, pattern=pattern, size=pool.size, pool=pool.keys.shape[0],
    )  # fmt: skip
    return SelectedPages(*(jnp.moveaxis(each, 2, 0) for each in lists))


def _walk_list(pool: _Pool, listed: SelectedPages, pattern: Pattern) -> list[_Walk]:
    """The first `number` entries of each row's and KV head's list."""
    width = listed.logical.shape[2]
    step = max(1, min(width, _KEYS // pool.size))
    spare = ((0, 0), (0, 0), (0, -width % step))
    logical, physical = (
        jnp.pad(each, spare, constant_values=-1) for each in (listed.logical, listed.physical)
    )

    def read(index):
        here, which = (
            lax.dynamic_slice_in_dim(each, index * step, step, axis=2)
            for each in (physical, logical)
        )
        entry = index * step + jnp.arange(step)
        return pool.pages(jnp.where(entry < listed.number[..., None], here, -1), which)

    turns = (listed.number.max() + step - 1) // step
    return [_Walk(turns, read, pattern.visible)]


def _walks(pool: _Pool, tile: _Tile, pattern: Pattern, queries: int) -> list[_Walk]:
    """What the pattern lets a tile of so many queries see: everything, or sinks, strided tokens
    and the window."""
    count = pool.table.shape[2]
    stride = pattern.stride
    if pattern.is_dense or (stride is not None and stride < _LEAST_GATHERED_STRIDE):
        begin = jnp.zeros_like(tile.first)
        return [_walk_pages(pool, begin, tile.last, count, pattern.visible, _KEYS)]
    assert pattern.window is not None
    near = dataclasses.replace(pattern, stride=None, sinks=0)
    begin = jnp.maximum(tile.first - (pattern.window - 1), 0) // pool.size
    longest = min(count, (queries + pattern.window - 2) // pool.size + 2)
    keys = _SHORT_KEYS if pattern.window < _SHORT_WINDOW else _KEYS
    walks = [_walk_pages(pool, begin, tile.last, longest, near.visible, keys)]
    if pattern.sinks:

        def sunk(key, query):
            return (key < pattern.sinks) & (key <= query) & ~near.visible(key, query)

        # Sinks that the last query's window still holds are walked with it.
        last = jnp.minimum(pattern.sinks - 1, tile.last - pattern.window)
        longest = min(count, -(-pattern.sinks // pool.size))
        walks.append(_walk_pages(pool, jnp.zeros_like(begin), last, longest, sunk, keys))
    if stride is not None:
        walks.append(_walk_strided(pool, tile, pattern))
    return walks


def _walk_pages(pool: _Pool, begin, last, longest: int, visible, keys: int) -> _Walk:
    """The pages from `begin` to the one of position `last`, of each row; `longest` at the most,
    about `keys` tokens a turn."""
    count = pool.table.shape[2]
    turns = max(1, -(-longest * pool.size // keys))
    step = -(-longest // turns)
    number = jnp.where(last >= 0, last // pool.size + 1 - begin, 0)  # B

    def read(index):
        which = begin[:, None] + index * step + jnp.arange(step)  # B step
        inside = (which < count) & (which <= (last // pool.size)[:, None]) & (last >= 0)[:, None]
        which = jnp.where(inside, which, -1)[:, None]
        ids = jnp.broadcast_to(jnp.maximum(which, 0), (*pool.table.shape[:2], step))
        return pool.pages(jnp.take_along_axis(pool.table, ids, axis=2), which)

    return _Walk((number.max() + step - 1) // step, read, visible)


def _walk_strided(pool: _Pool, tile: _Tile, pattern: Pattern) -> _Walk:
    """The multiples of the stride that are no sinks and outside of some query's window."""
    assert pattern.window is not None and pattern.stride is not None
    window, stride, size = pattern.window, pattern.stride, pool.size
    batch, kv_heads, count = pool.table.shape
    slots = -(-count * size // stride)
    step = min(slots, _KEYS)

    def visible(key, query):
        return key <= query - window

    def read(index):
        position = (index * step + jnp.arange(step)) * stride
        page = jnp.take(pool.table, jnp.minimum(position // size, count - 1), axis=2)
        far = (position >= pattern.sinks) & (position < count * size)
        there = (page >= 0) & (page < pool.keys.shape[0]) & far
        there &= position < pool.ends[:, None, None]
        row = jnp.where(there, page * size + position % size, 0).reshape(-1)

        def take(pages):
            flat = pages.reshape(-1, pages.shape[2])
            taken = flat.at[row].get(mode="promise_in_bounds")
            return taken.reshape(batch, kv_heads, step, -1)

        return _Block(take(pool.keys), take(pool.values), position[None, None], there)

    end = (tile.last - window).max()
    return _Walk(jnp.maximum(end + stride * step, 0) // (stride * step), read, visible)


def _attend(tile: _Tile, walks: list[_Walk]):
    """(out [B, K, M, D], lse [B, K, M]) of one tile."""
    batch, kv_heads, rows, dim = tile.rows.shape
    carry = (
        jnp.full((batch, kv_heads, rows), -jnp.inf, jnp.float32),
        jnp.zeros((batch, kv_heads, rows), jnp.float32),
        jnp.zeros((batch, kv_heads, rows, dim), jnp.float32),
    )
    query = tile.position[:, None, :, None]  # B 1 M 1
    everyone = (tile.position >= 0).all()
    extremes = jnp.stack([tile.first, tile.last], 1)[:, None, :, None]  # B 1 2 1

    for walk in walks:

        def turn(index, carry, walk=walk):
            block = walk.read(index)
            scores = _scores(tile.rows, block.key)

            def masked(carry):
                seen = walk.visible(block.position[:, :, None], query) & (query >= 0)
                seen &= block.there[:, :, None]
                # Slots that nobody wrote may hold NaN, which a weight of 0 would not silence.
                value = jnp.where(block.there[..., None], block.value, 0)
                return _accumulate(carry, jnp.where(seen, scores, -jnp.inf), value)

            def clear(carry):
                return _accumulate(carry, scores, block.value)

            # What the first and the last query see, all between them see. Most blocks of a long
            # context need no mask, which saves about a quarter of their time.
            whole = walk.visible(block.position[:, :, None], extremes).all()
            return lax.cond(everyone & whole & block.there.all(), clear, masked, carry)

        carry = lax.fori_loop(0, walk.turns, turn, carry)
    peak, total, out = carry
    safe = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, -jnp.inf, peak * dim**-0.5 + jnp.log(safe))
    return (out / safe[..., None]).astype(tile.rows.dtype), lse


def _scores(queries, key):
    """Unscaled: the scale is folded into the exponential, where it costs nothing."""
    return jnp.einsum("bkmd,bksd->bkms", queries, key, preferred_element_type=jnp.float32)


def _accumulate(carry, scores, value):
    """One step of the online softmax: (peak of the unscaled scores, sum of weights, output)."""
    peak, total, out = carry
    scale = value.shape[-1] ** -0.5
    new_peak = jnp.maximum(peak, scores.max(-1))
    # A finite stand-in keeps exp(-inf - peak) at 0 where no key was seen yet.
    base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
    weights = jnp.exp((scores - base[..., None]) * scale)
    shrink = jnp.exp((peak - base) * scale)
    added = jnp.einsum(
        "bkms,bksd->bkmd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    return new_peak, total * shrink + weights.sum(-1), out * shrink[..., None] + added
