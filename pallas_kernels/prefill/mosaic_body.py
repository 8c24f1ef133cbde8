"""What the warpgroups of the Hopper prefill kernel do: one copies, the others multiply."""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_support import interpreting
from pallas_kernels.prefill.mosaic_copy import (
    ROW,
    Listed,
    Place,
    Ranged,
    Shape,
    copy_blocks,
    load,
)

_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def attend(shape: Shape, query, key_pages, value_pages, starts, counts, *refs, **scratch):
    """The body of the kernel: the last warpgroup copies, the others multiply."""
    *pages, out, lse = refs
    row, group = lax.axis_index("row"), lax.axis_index("group")
    # The longest tiles, at the end of a causal chunk, begin first.
    tile = shape.queries.count - 1 - lax.axis_index("tile")
    first, last, _ = shape.queries.span(tile, starts[row], counts[row])
    head, part = group // shape.parts, group % shape.parts
    place = Place(row, head, part, tile, first, last, starts[row] + counts[row])
    source = Listed if shape.listed is not None else Ranged
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
        copy_blocks(shape, place, source, key_pages, value_pages, **scratch)

    # One choice, not two conditions: what only one side needs takes no registers of the other.
    lax.cond(warpgroup < multipliers, multiply, copy)


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
    offset = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROW)
    first = place.first + warpgroup * each
    position = first + lax.rem(offset, jnp.full_like(offset, each))
    plgpu.barrier_wait(ready)

    def zeros(*sizes):
        layout = ROW if len(sizes) == 1 else plgpu.Layout.WGMMA
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
            key = load(self.scratch["positions"].at[slot, pl.ds(left, 64)], _COLUMN)
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
