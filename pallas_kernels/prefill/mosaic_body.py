"""What the warpgroups of the Hopper prefill kernel do: one copies, the others multiply."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_support import interpreting
from pallas_kernels.patterns import Pattern
from pallas_kernels.prefill.key_blocks import QueryTiles, block_at, pattern_visits
from pallas_kernels.prefill.tiles import PrefillTiles

_NOWHERE = 1 << 30  # position of slots that hold no token: behind every query
_ROW = plgpu.Layout.WGMMA.reduce(1)
_COLUMN = plgpu.Layout.WGMMA.reduce(0)


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


def attend(shape: Shape, query, key_pages, value_pages, starts, counts, *refs, **scratch):
    """The body of the kernel: the last warpgroup copies, the others multiply."""
    *pages, out, lse = refs
    row, group = lax.axis_index("row"), lax.axis_index("group")
    # The longest tiles, at the end of a causal chunk, begin first.
    tile = shape.queries.count - 1 - lax.axis_index("tile")
    first, last, _ = shape.queries.span(tile, starts[row], counts[row])
    head, part = group // shape.parts, group % shape.parts
    place = Place(row, head, part, tile, first, last, starts[row] + counts[row])
    source = _Listed if shape.listed is not None else _Ranged
    source = source(shape, place, pages)
    warpgroup = lax.axis_index("warpgroup")
    multipliers = shape.tiles.warpgroups
    # In sum what the warpgroups are launched with, 504 or 512 a lane: more would wait forever.
    ours, theirs = {1: (0, 0), 2: (232, 40), 3: (152, 56)}[multipliers]

    def multiply():
        if ours:
            plgpu.set_max_registers(ours, action="increase")
        _multiply(shape, place, source, warpgroup, query, out, lse, **scratch)

    def copy():
        if theirs:
            plgpu.set_max_registers(theirs, action="decrease")
        _copy(shape, place, source, key_pages, value_pages, **scratch)

    # One choice, not two conditions: what only one side needs takes no registers of the other.
    lax.cond(warpgroup < multipliers, multiply, copy)


class _Ranged:
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


class _Listed:
    """Key blocks made of the selected pages, in the order of their list."""

    def __init__(self, shape: Shape, place: Place, pages):
        self.shape = shape
        logical, physical, number = pages
        at = (place.row, place.head, place.tile)
        self.logical, self.physical, self.number = logical.at[at], physical.at[at], number[at]
        self.total = pl.cdiv(self.number * shape.size, shape.tiles.keys)

    def unit(self, visit, index):
        """As `_Ranged.unit`."""
        shape = self.shape
        assert shape.listed is not None
        apart = shape.size // shape.unit  # units a page
        index = visit * shape.units + index
        entry = index // apart
        at = jnp.minimum(entry, shape.listed - 1)
        offset = index % apart * shape.unit
        physical = jnp.where(entry < self.number, self.physical[at], -1)
        return self.logical[at] * shape.size + offset, physical, offset


def _copy(shape, place, source, key_pages, value_pages, *, keys, values, positions, spans, **rest):
    """Copies the key blocks that the tile visits, as room for them falls free.

    Beside a block go the positions of its slots, and the least of them and the end of the last.
    """
    stages = shape.tiles.stages
    tops = range(0, shape.tiles.keys, 64)
    slots = [plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=_ROW) + top for top in tops]

    def unit_at(visit, index):
        """A unit without a token stands at `_NOWHERE`, on page -1."""
        position, physical, offset = source.unit(visit, index)
        there = (physical >= 0) & (physical < shape.pool) & (position < place.end)
        return jnp.where(there, position, _NOWHERE), jnp.where(there, physical, -1), offset

    def load(pages, index, found, block, barrier):
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
            load(key_pages, index, found, keys.at[slot], rest["key_ready"].at[slot])
            edge = index * shape.unit
            places = [
                jnp.where(slot >= edge, slot + (found[0] - edge), old)
                for slot, old in zip(slots, places, strict=True)
            ]
            return jnp.minimum(begin, found[0]), jnp.maximum(stop, found[0] + shape.unit), *places

        begin, stop, *places = _few(shape.units, body, (jnp.int32(_NOWHERE), jnp.int32(0), *slots))
        for top, place in zip(tops, places, strict=True):
            plgpu.store(positions.at[slot, pl.ds(top, 64)], place)
        spans[slot, 0] = begin
        spans[slot, 1] = stop
        plgpu.barrier_arrive(rest["key_ready"].at[slot])
        return stop

    def load_values(visit, slot, barrier):
        def body(index, carry):
            load(value_pages, index, unit_at(visit, index), values.at[slot], barrier)
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
        held = _load(positions.at[pl.ds(top, 64)], _ROW) < place.end
        for left in range(0, shape.dim, shape.swizzle):
            ref = values.at[pl.ds(top, 64), pl.ds(left, shape.swizzle)]
            rows = plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA)
            keep = lax.broadcast_in_dim(held, rows.shape, [0])
            ref[...] = jnp.where(keep, rows, jnp.zeros_like(rows))


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def _multiply(shape, place, source, warpgroup, query, out, lse, **scratch):
    """Attention of one warpgroup's rows: queries of its first head, then of its second ..."""
    tiles = shape.tiles
    rows, each = tiles.queries, tiles.each
    at = pl.ds(place.tile * tiles.tokens + warpgroup * each, each)
    heads = (place.head * shape.parts + place.part) * tiles.heads
    own = scratch["queries"].at[warpgroup]
    ready = scratch["query_ready"].at[warpgroup]
    for head in range(tiles.heads):
        plgpu.copy_gmem_to_smem(
            query.at[place.row, at, heads + head], own.at[pl.ds(head * each, each)], ready
        )
    offset = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=_ROW)
    first = place.first + warpgroup * each
    position = first + lax.rem(offset, jnp.full_like(offset, each))
    plgpu.barrier_wait(ready)

    def zeros(*sizes):
        layout = _ROW if len(sizes) == 1 else plgpu.Layout.WGMMA
        return plgpu.layout_cast(jnp.zeros(sizes, jnp.float32), layout)

    chunks = _chunks(shape.dim)
    # The least float32 in place of -inf: no difference of two peaks is NaN.
    peak = zeros(rows) + jnp.finfo(jnp.float32).min
    carry = (peak, zeros(rows), *(zeros(rows, size) for _, size in chunks))
    step = _Step(shape, warpgroup, position, first, scratch)
    peak, weight, *sums = lax.fori_loop(0, source.total, step, carry)
    # Padding queries stand behind the last valid one.
    weight = jnp.where(position <= place.last, weight, 0.0)
    empty = weight == 0
    safe = jnp.where(empty, 1.0, weight)
    for (left, size), part in zip(chunks, sums, strict=True):
        share = lax.broadcast_in_dim(1.0 / safe, part.shape, [0])
        blind = lax.broadcast_in_dim(empty, part.shape, [0])
        result = jnp.where(blind, 0.0, part * share)
        own[:, pl.ds(left, size)] = result.astype(own.dtype)
    logs = peak * shape.dim**-0.5 + jnp.log(safe)
    scratch["logs"][warpgroup] = jnp.where(empty, -jnp.inf, logs)
    plgpu.commit_smem()
    for head in range(tiles.heads):
        plgpu.copy_smem_to_gmem(
            own.at[pl.ds(head * each, each)], out.at[place.row, at, heads + head]
        )
    group = place.head * shape.parts + place.part
    plgpu.copy_smem_to_gmem(
        scratch["logs"].at[warpgroup], lse.at[place.row, group, place.tile, warpgroup]
    )
    plgpu.wait_smem_to_gmem(0)


def _chunks(dim: int) -> list[tuple[int, int]]:
    """(first column, columns) of the values, as many as one product makes."""
    step = dim if dim <= 128 else 64
    return [(left, min(step, dim - left)) for left in range(0, dim, step)]


def _accumulate(total, left, right, *, in_place: bool):
    """total + left @ right. In place it takes no second set of registers, which heads wider than
    128 do not have; GPU interpret mode has no rule for that, so that others go without.
    """
    if in_place:

        def add(ref):
            plgpu.wgmma(ref, left, right)

        return pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(total))

    def multiply(ref):
        plgpu.wgmma(ref, left, right)
        return ref[...]

    return total + pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(total.shape, jnp.float32))


class _Step:
    """One key block: scores, the online softmax, and the weighted values."""

    def __init__(self, shape: Shape, warpgroup, position, first, scratch):
        self.shape, self.scratch = shape, scratch
        self.warpgroup, self.position, self.first = warpgroup, position, first

    def __call__(self, visit, carry):
        shape, scratch = self.shape, self.scratch
        rows, keys = shape.tiles.queries, shape.tiles.keys
        slot = lax.rem(visit, jnp.int32(shape.tiles.stages))
        query = scratch["queries"].at[self.warpgroup]
        weights = scratch["weights"].at[self.warpgroup]
        peak, total, *sums = carry

        def score(ref):
            plgpu.wgmma(ref, query, scratch["keys"].at[slot].transpose((1, 0)))
            return ref[...]

        plgpu.barrier_wait(scratch["key_ready"].at[slot])
        scores = pl.run_scoped(score, plgpu.WGMMAAccumulatorRef((rows, keys), jnp.float32))
        scores = lax.cond(self.sees_all(slot), lambda: scores, lambda: self.mask(scores, slot))
        plgpu.barrier_arrive(scratch["key_free"].at[slot])
        scale = math.log2(math.e) * shape.dim**-0.5
        higher = jnp.maximum(peak, scores.max(axis=1))
        shrink = jnp.exp2((peak - higher) * scale)
        scaled = lax.broadcast_in_dim(higher * scale, scores.shape, [0])
        weight = jnp.exp2(scores * scale - scaled)
        total = total * shrink + weight.sum(axis=1)
        weights[...] = weight.astype(weights.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(scratch["value_ready"].at[slot])
        sums = [
            _accumulate(
                part * lax.broadcast_in_dim(shrink, part.shape, [0]),
                weights,
                scratch["values"].at[slot, :, pl.ds(left, size)],
                in_place=shape.dim > 128 and not interpreting(),
            )
            for (left, size), part in zip(_chunks(shape.dim), sums, strict=True)
        ]
        plgpu.barrier_arrive(scratch["value_free"].at[slot])
        return higher, total, *sums

    def sees_all(self, slot):
        """Whether every query of the warpgroup sees the whole block, so that no mask is needed."""
        begin, stop = self.scratch["spans"][slot, 0], self.scratch["spans"][slot, 1]
        seen = stop <= self.first + 1
        if not self.shape.pattern.is_dense:
            last = self.first + (self.shape.tiles.each - 1)
            seen &= begin > last - self.shape.pattern.window
        return seen

    def mask(self, scores, slot):
        """-inf for the keys that a query does not see; 64 keys at a time, to save registers."""
        parts = []
        for left in range(0, self.shape.tiles.keys, 64):
            # From shared memory, as the compiler would keep what it can compute in registers.
            key = _load(self.scratch["positions"].at[slot, pl.ds(left, 64)], _COLUMN)
            part = lax.slice(scores, (0, left), (scores.shape[0], left + 64))
            parts.append(jnp.where(self.sees(key, part.shape), part, -jnp.inf))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def sees(self, key, sizes):
        """Which of these keys each row sees."""
        pattern = self.shape.pattern

        def wide(array, axis):
            return lax.broadcast_in_dim(array, sizes, [axis])

        seen = wide(key, 1) <= wide(self.position, 0)
        if pattern.is_dense:
            return seen
        near = wide(key + pattern.window, 1) > wide(self.position, 0)
        if pattern.sinks:
            near |= wide(key, 1) < pattern.sinks
        if pattern.stride is not None:
            rest = lax.rem(key, jnp.full_like(key, pattern.stride))
            near |= wide(rest, 1) == 0
        return seen & near
