"""The copying side of the Hopper prefill kernel: which pages, when, and what is beside them."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.patterns import Pattern
from pallas_kernels.prefill.key_blocks import QueryTiles, block_at, pattern_visits
from pallas_kernels.prefill.tiles import PrefillTiles

NOWHERE = 1 << 30  # position of slots that hold no token: behind every query
ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A kernel's static sizes.

    Attributes:
        tiles, queries, pattern: see their types.
        kv_heads, heads, dim, size: K, H, D, P.
        pool, pages: N, C.
        listed: M, pages of a list; None where none are selected.
        swizzle: elements of a swizzled row.
    """

    tiles: PrefillTiles
    queries: QueryTiles
    pattern: Pattern
    kv_heads: int
    heads: int
    dim: int
    size: int
    pool: int
    pages: int
    listed: int | None
    swizzle: int

    @property
    def parts(self) -> int:
        """Tiles that the heads of a group are divided among."""
        return self.heads // self.kv_heads // self.tiles.heads

    @property
    def unit(self) -> int:
        """Tokens that one copy moves: all of one page, and of one key block."""
        return math.gcd(self.size, self.tiles.keys)

    @property
    def units(self) -> int:
        """Copies a key block."""
        return self.tiles.keys // self.unit


class Place(NamedTuple):
    """Which tile a block of threads serves, and what of it is valid.

    row, head, part: the sequence, its KV head, and which heads of the group.
    tile: of the queries. first, last: positions of its first and last valid query.
    end: tokens that the sequence holds with this chunk.
    """

    row: Any
    head: Any
    part: Any
    tile: Any
    first: Any
    last: Any
    end: Any


class Ranged:
    """Key blocks by the pattern; the block table is a ref, or the layout is contiguous."""

    def __init__(self, shape: Shape, place: Place, pages):
        self.shape, self.place, self.table = shape, place, pages
        keys = shape.tiles.keys
        self.visits = pattern_visits(place.first, place.last, shape.pattern, keys)
        self.total = self.visits.total

    def unit(self, visit, index):
        """(position, page of the pool, offset in it) of a unit of a key block."""
        shape, place = self.shape, self.place
        block = block_at(visit, self.visits, shape.pattern, shape.tiles.keys)
        position = block * shape.tiles.keys + index * shape.unit
        page = position // shape.size
        if self.table:
            (table,) = self.table
            physical = table[place.row, place.head, jnp.minimum(page, shape.pages - 1)]
        else:
            physical = (place.row * shape.pages + page) * shape.kv_heads + place.head
        return position, jnp.where(page < shape.pages, physical, -1), position % shape.size


class Listed:
    """Key blocks made of the selected pages, in the order of their list."""

    def __init__(self, shape: Shape, place: Place, pages):
        self.shape = shape
        logical, physical, number = pages
        at = (place.row, place.head, place.tile)
        self.logical, self.physical, self.number = logical.at[at], physical.at[at], number[at]
        self.total = pl.cdiv(self.number * shape.size, shape.tiles.keys)

    def unit(self, visit, index):
        """As `Ranged.unit`."""
        shape = self.shape
        assert shape.listed is not None
        apart = shape.size // shape.unit  # units a page
        index = visit * shape.units + index
        entry = index // apart
        at = jnp.minimum(entry, shape.listed - 1)
        offset = index % apart * shape.unit
        physical = jnp.where(entry < self.number, self.physical[at], -1)
        return self.logical[at] * shape.size + offset, physical, offset


def copy_blocks(
    shape, place, source, key_pages, value_pages, *, keys, values, positions, spans, **rest
):
    """Copies the key blocks that the tile visits, as room for them falls free.

    Beside a block go the positions of its slots, and the least of them and the end of the last.
    """
    stages = shape.tiles.stages
    tops = range(0, shape.tiles.keys, 64)
    slots = [plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=ROW) + top for top in tops]

    def unit_at(visit, index):
        """A unit without a token stands at `NOWHERE`, on page -1."""
        position, physical, offset = source.unit(visit, index)
        there = (physical >= 0) & (physical < shape.pool) & (position < place.end)
        return jnp.where(there, position, NOWHERE), jnp.where(there, physical, -1), offset

    def copy_unit(pages, index, found, block, barrier):
        _, physical, offset = found

        @pl.when(physical >= 0)
        def _():
            origin = pages.at[physical, pl.ds(offset, shape.unit)]
            target = block.at[pl.ds(index * shape.unit, shape.unit)]
            plgpu.copy_gmem_to_smem(origin, target, barrier)

        @pl.when(physical < 0)
        def _():
            plgpu.barrier_arrive(barrier)

    def load_keys(visit, slot):
        def body(index, carry):
            begin, stop, *places = carry
            found = unit_at(visit, index)
            copy_unit(key_pages, index, found, keys.at[slot], rest["key_ready"].at[slot])
            edge = index * shape.unit
            places = [
                jnp.where(slot >= edge, slot + (found[0] - edge), old)
                for slot, old in zip(slots, places, strict=True)
            ]
            return jnp.minimum(begin, found[0]), jnp.maximum(stop, found[0] + shape.unit), *places

        begin, stop, *places = _few(shape.units, body, (jnp.int32(NOWHERE), jnp.int32(0), *slots))
        for top, place in zip(tops, places, strict=True):
            plgpu.store(positions.at[slot, pl.ds(top, 64)], place)
        spans[slot, 0] = begin
        spans[slot, 1] = stop
        plgpu.barrier_arrive(rest["key_ready"].at[slot])
        return stop

    def load_values(visit, slot, barrier):
        def body(index, carry):
            copy_unit(value_pages, index, unit_at(visit, index), values.at[slot], barrier)
            return carry

        _few(shape.units, body, ())

    @pl.loop(0, source.total)
    def _(visit):
        slot = lax.rem(visit, jnp.int32(stages))

        @pl.when(visit >= stages)
        def _():
            plgpu.barrier_wait(rest["key_free"].at[slot])

        clean = load_keys(visit, slot) <= place.end

        @pl.when(visit >= stages)
        def _():
            plgpu.barrier_wait(rest["value_free"].at[slot])

        @pl.when(clean)
        def _():
            load_values(visit, slot, rest["value_ready"].at[slot])

        # Slots that hold no token may hold NaN, which a weight of 0 would not silence.
        @pl.when(jnp.logical_not(clean))
        def _():
            load_values(visit, slot, rest["value_copied"])
            plgpu.barrier_wait(rest["value_copied"])
            _silence(shape, place, positions.at[slot], values.at[slot])
            plgpu.commit_smem()
            for _ in range(shape.units):
                plgpu.barrier_arrive(rest["value_ready"].at[slot])


def _few(count: int, body, carry):
    """A loop that is unrolled a few steps at a time, for the sake of registers."""
    step = max(n for n in range(1, min(count, 2) + 1) if count % n == 0)

    def steps(start, carry):
        for index in range(step):
            carry = body(start * step + index, carry)
        return carry

    return steps(0, carry) if step == count else lax.fori_loop(0, count // step, steps, carry)


def _silence(shape: Shape, place: Place, positions, values):
    """Zeroes the rows of a block of values that hold no token, a few registers at a time."""
    for top in range(0, shape.tiles.keys, 64):
        held = load(positions.at[pl.ds(top, 64)], ROW) < place.end
        for left in range(0, shape.dim, shape.swizzle):
            ref = values.at[pl.ds(top, 64), pl.ds(left, shape.swizzle)]
            rows = plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA)
            keep = lax.broadcast_in_dim(held, rows.shape, [0])
            ref[...] = jnp.where(keep, rows, jnp.zeros_like(rows))


def load(ref, layout):
    """Part of a row or column of a tile, as its layout spreads it."""
    return plgpu.load(ref, layout=layout, optimized=False)
