"""What one block of threads of the portable decode kernel does: a share of one KV head's pages.

Each step takes `keys` tokens, whole pages or parts of them. Their rows come from global memory in
long loads, one step ahead of their use, and wait in registers. They go through shared memory, from
which keys and values alike are read back as the right operand of a product, values transposed on
the way. 32 keys at a time are multiplied with the query; the softmax is online.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.mosaic_sources import (
    STEP,
    KeysByChannel,
    PlainPages,
    Sight,
    ValuesByToken,
    copy_layout,
    zeros,
)
from pallas_kernels.patterns import Pattern

ROWS = 16  # of an mma.sync tile: the query heads of a KV head, padded
_LOG2E = math.log2(math.e)
_NOWHERE = 2**30  # a position behind every query


class _Shared(NamedTuple):
    """Shared memory of a block of threads; all but the query are of one step."""

    query: Any
    keys: Any
    values: Any
    weights: Any
    key_constants: Any
    value_constants: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """What one block of threads does."""

    dtype: Any
    dim: int
    size: int
    listed: int
    keys: int
    part: int
    splits: int
    pattern: Pattern
    key: PlainPages | KeysByChannel
    value: PlainPages | ValuesByToken

    @property
    def padded(self) -> int:
        """Columns of the output, a multiple of what four warps cover side by side."""
        return -(-self.dim // STEP) * STEP

    @property
    def blocks(self) -> int:
        """Runs of the output's columns that have values' constants of their own."""
        return self.value.groups if self.value.folded else 1

    @property
    def shared(self) -> _Shared:
        """What the block needs of it."""
        return _Shared(
            query=plgpu.SMEM((ROWS, self.dim), self.dtype),
            keys=plgpu.SMEM((self.keys, self.dim), self.dtype),
            values=plgpu.SMEM((self.keys, self.padded), self.dtype),
            weights=plgpu.SMEM((ROWS, self.keys), self.dtype),
            key_constants=self.key.constants(self.dtype),
            value_constants=self.value.constants(self.dtype),
        )

    def __call__(
        self, lengths_ref, ends_ref, physical_ref, logical_ref, query_ref, key_refs, value_refs,
        out_ref, lse_ref, shared,
    ):  # fmt: skip
        row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
        newest = lengths_ref[row] - 1
        parts, pieces = self.keys // self.part, self.size // self.part
        count = ends_ref[row, head] * pieces
        steps = pl.cdiv(count, parts)
        share = pl.cdiv(steps, self.splits)
        first = split * share
        last = jnp.minimum(first + share, steps)
        total = plgpu.Layout.MMA_ACC(self.dtype, m_warps=1)
        layout = copy_layout(ROWS, self.dim, 2)
        query = plgpu.load(query_ref.at[row, head], layout=layout, optimized=False)
        plgpu.store(shared.query, query, optimized=False)
        if self.padded > self.dim:
            shape = (self.keys, self.padded)
            blank = zeros(shape, self.dtype, copy_layout(*shape, 2))
            plgpu.store(shared.values, blank, optimized=False)

        def place(step):
            """Page (-1 for none) and first position of each part of a step."""
            found = []
            for j in range(parts):
                each = step * parts + j
                at = (row, head, jnp.minimum(each // pieces, self.listed - 1))
                page = jnp.where((each < count) & (step < last), physical_ref[at], -1)
                position = logical_ref[at] * self.size + each % pieces * self.part
                found.append((page, jnp.where(page >= 0, position, jnp.int32(_NOWHERE))))
            return tuple(found)

        def fetch(places):
            found = []
            for page, position in places:
                slot = position % self.size
                read = functools.partial(self._read, key_refs, value_refs, page, slot)
                found.append(lax.cond(page >= 0, read, self._nothing))
            return tuple(found)

        def step(i, carry):
            state, fetched, places, following = carry
            sights = [Sight(self.pattern, position, newest) for _, position in places]
            for j, (raw, sight) in enumerate(zip(fetched, sights, strict=True)):
                self._share(j, raw, sight, shared)
            # Before this step's work, so that they arrive during it; so do the page ids of the
            # step after the next.
            fetched, ahead = fetch(following), place(i + 2)
            return self._attend(sights, state, shared), fetched, following, ahead

        state = (
            (zeros((ROWS, self.padded // self.blocks), jnp.float32, total),) * self.blocks,
            (zeros((ROWS, STEP), jnp.float32, total),) * (self.blocks * self.value.folded),
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), total.reduce(1)),
            zeros((ROWS, STEP), jnp.float32, total),
        )
        places = place(first)
        start = (state, fetch(places), places, place(first + 1))
        (accs, shifts, peak, norm), *_ = lax.fori_loop(first, last, step, start)
        norm = norm.sum(axis=1)
        safe = jnp.where(norm > 0, norm, 1.0)
        lse = jnp.where(norm > 0, (peak + jnp.log2(safe)) * (1 / _LOG2E), -jnp.inf)
        plgpu.store(lse_ref.at[row, head, split], lse, optimized=False)
        for block, acc in enumerate(accs):
            if shifts:
                # The same number in every column.
                acc += lax.broadcast_in_dim(shifts[block].max(axis=1), acc.shape, [0])
            acc = acc / lax.broadcast_in_dim(safe, acc.shape, [0])
            columns = pl.ds(block * acc.shape[1], acc.shape[1])
            plgpu.store(out_ref.at[row, head, split, :, columns], acc, optimized=False)

    def _read(self, key_refs, value_refs, page, slot):
        return self.key.read(key_refs, page, slot), self.value.read(value_refs, page, slot)

    def _nothing(self):
        return self.key.nothing(), self.value.nothing()

    def _share(self, j: int, raw, sight: Sight, shared: _Shared):
        """Puts the j-th part of a step where all threads find it."""
        rows = pl.ds(j * self.part, self.part)
        for source, tiles, constants, into in (
            (self.key, raw[0], shared.key_constants, shared.keys),
            (self.value, raw[1], shared.value_constants, shared.values),
        ):
            source.share(tiles, j, sight, constants)
            for channel, tile in source.numbers(tiles, j, sight, constants, self.dtype):
                at = into.at[rows, pl.ds(channel, tile.shape[1])]
                plgpu.store(at, tile, optimized=False)

    def _attend(self, sights, state, shared: _Shared):
        """One step of online softmax over what `_share` put there."""
        accs, shifts, peak, norm = state
        left = plgpu.Layout.MMA_LHS(self.dtype, m_warps=1)
        right = plgpu.Layout.MMA_RHS(self.dtype, m_warps=1)
        query = plgpu.load(shared.query, layout=left, optimized=False)
        scores = [self._scores(query, block, sights, shared) for block in range(self.keys // STEP)]
        best = jnp.maximum(peak, functools.reduce(jnp.maximum, scores).max(axis=1))
        base = jnp.where(best == -jnp.inf, 0.0, best)
        shrink = jnp.exp2(peak - base)

        def shrunk(array):
            return array * lax.broadcast_in_dim(shrink, array.shape, [0])

        norm = shrunk(norm)
        for block, each in enumerate(scores):
            weights = jnp.exp2(each - lax.broadcast_in_dim(base, each.shape, [0]))
            norm += weights
            at = shared.weights.at[:, pl.ds(block * STEP, STEP)]
            plgpu.store(at, weights.astype(self.dtype), optimized=False)
        weights = plgpu.load(shared.weights, layout=left, optimized=False)
        accs, shifts = [shrunk(acc) for acc in accs], [shrunk(shift) for shift in shifts]
        for block, acc in enumerate(accs):
            scaled, width = weights, acc.shape[1]
            if self.value.folded:
                scale, offset = _pair(
                    shared.value_constants,
                    block,
                    self.blocks + block,
                    left.reduce(0),
                    right.reduce(1),
                )
                offset = lax.broadcast_in_dim(offset, (self.keys, STEP), [0])
                shifts[block] = plgpu.mma(shifts[block], weights, offset)
                scaled = weights * lax.broadcast_in_dim(scale, weights.shape, [1])
            value = shared.values.at[:, pl.ds(block * width, width)]
            value = plgpu.load(value, layout=right, optimized=False)
            accs[block] = plgpu.mma(acc, scaled, value)
        return tuple(accs), tuple(shifts), best, norm

    def _scores(self, query, block: int, sights, shared: _Shared):
        """Scores of 32 keys of a step, times log2 e; -inf for those that are not seen."""
        left = plgpu.Layout.MMA_LHS(self.dtype, m_warps=1)
        right = plgpu.Layout.MMA_RHS(self.dtype, m_warps=1)
        total = plgpu.Layout.MMA_ACC(self.dtype, m_warps=1)
        scores = zeros((ROWS, STEP), jnp.float32, total)
        first = block * STEP
        if self.key.folded:
            j = first // self.part
            scale, offset = _pair(
                shared.key_constants, j, len(sights) + j, left.reduce(0), right.reduce(1)
            )
            offset = lax.broadcast_in_dim(offset, (self.dim, STEP), [0])
            scores = plgpu.mma(scores, query, offset)
            query = query * lax.broadcast_in_dim(scale, query.shape, [1])
        key = plgpu.load(shared.keys.at[pl.ds(first, STEP)].T, layout=right, optimized=False)
        scores = plgpu.mma(scores, query, key) * (self.dim**-0.5 * _LOG2E)
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=total) + first
        held = range(first // self.part, -(-(first + STEP) // self.part))
        position = column + (sights[held[0]].start - held[0] * self.part)
        for j in held[1:]:
            ahead = column - j * self.part
            position = jnp.where(ahead >= 0, ahead + sights[j].start, position)
        visible = self.pattern.visible(position, sights[0].newest)
        return jnp.where(visible, scores, -jnp.inf)


def _pair(ref, scale: int, offset: int, left, right):
    """A row of scales as it goes with a left operand, one of offsets as with a right one."""
    return (
        plgpu.load(ref.at[scale], layout=left, optimized=False),
        plgpu.load(ref.at[offset], layout=right, optimized=False),
    )
