"""Decode attention on Hopper (H100, H200): Pallas Mosaic GPU, TMA copies and `wgmma`.

One warpgroup serves a share of one KV head's listed pages (flash-decoding: "Flash-Decoding for
long-context inference", Dao et al. 2023); the shares are merged afterwards. Pages go by TMA into a
ring of stages in shared memory, ahead of their use. The query heads of a KV head are the 64 rows
that `wgmma` multiplies; rows that a smaller group leaves over hold whatever was in shared memory:
rows do not mix, and theirs are dropped. Of more than 128 value channels a warpgroup sums one half;
its neighbour sums the other, and finds the keys in the second-level cache.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.decode.hopper_tiles import (
    ROWS,
    HopperTiles,
    candidate_tiles,
    columns_of,
    default_tiles,
)
from pallas_kernels.decode.splits import merge_splits
from pallas_kernels.page_lists import PageList
from pallas_kernels.patterns import Pattern
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.types import AttentionOutput

__all__ = ["HopperTiles", "candidate_tiles", "decode_attention", "default_tiles", "unsupported"]

_LOG2E = math.log2(math.e)
_NOWHERE = 2**30  # a position behind every query


def unsupported(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"] | QuantizedPages,
    value_pages: Float[Array, "N P D"] | QuantizedPages,
    *,
    kv_heads: int | None = None,
) -> str | None:
    """Why `decode_attention` cannot serve these arrays; None where it can.

    The group is looked at only where `kv_heads` is given.
    """
    batch, heads, dim = query.shape
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, not {query.dtype}"
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        if isinstance(pages, QuantizedPages):
            return f"takes plain pages; {name} are quantised"
        if pages.dtype != query.dtype:
            return f"needs {name} of the query's dtype {query.dtype}, not {pages.dtype}"
    if dim % 16 or not 16 <= dim <= 256 or not columns_of(dim):
        return f"needs a head_dim that is a multiple of 16, or of 32 from 160 to 256, not {dim}"
    if kv_heads is not None and heads // kv_heads > ROWS:
        return f"serves {ROWS} query heads a KV head, not {heads // kv_heads}"
    if kv_heads is not None and batch * kv_heads > 65535:  # the last dimension of a CUDA grid
        return f"serves 65535 KV heads of all sequences, not {batch} * {kv_heads}"
    if key_pages.shape[1] % 8:
        return f"needs a page size that is a multiple of 8, not {key_pages.shape[1]}"
    return None


def decode_attention(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"],
    value_pages: Float[Array, "N P D"],
    pages: PageList,
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    pattern: Pattern,
    tiles: HopperTiles,
) -> AttentionOutput:
    """See `pallas_kernels.decode.api.decode_attention`; `unsupported` says what is served.

    Each warpgroup reads the entries of its share and nothing else; entries of -1 not at all.

    Args:
        query: bfloat16 or float16.
        key_pages, value_pages: of the query's dtype.
        pages: what to read, each page at most once.
        lengths: tokens each row holds.
        kv_heads: K.
        pattern: which positions the newest token sees.
        tiles: how to cut the work.

    Raises:
        ValueError: the arrays or tiles are not served.
    """
    reason = unsupported(query, key_pages, value_pages, kv_heads=kv_heads)
    if reason is not None:
        raise ValueError(f"the Hopper decode kernel {reason}")
    if tiles.splits < 1 or tiles.stages < 1 or tiles.keys not in (64, 128):
        raise ValueError(
            f"tiles = {tiles}: keys must be 64 or 128, splits and stages at least 1 each"
        )
    batch, heads, dim = query.shape
    group = heads // kv_heads
    if not pages.physical.shape[2]:
        pages = PageList(*(jnp.full((batch, kv_heads, 1), -1, jnp.int32),) * 2)
    listed = pages.physical.shape[2]
    there = (pages.physical >= 0) & (pages.logical >= 0)
    physical = jnp.where(there, pages.physical, -1)
    logical = jnp.where(there, pages.logical, -1)
    # Entries behind the last one that is there are not walked, so that shares are even.
    ends = jnp.where(there, jnp.arange(1, listed + 1, dtype=jnp.int32), 0).max(axis=2)
    rows = -(-group // 8) * 8  # of a tile in shared memory
    grouped = query.reshape(batch, kv_heads, group, dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    block = _Block(
        dtype=query.dtype,
        rows=rows,
        dim=dim,
        columns=columns_of(dim) or dim,
        size=key_pages.shape[1],
        listed=listed,
        tiles=tiles,
        pattern=pattern,
    )

    def decode_hopper(*refs):  # named, for profiles
        block(*refs)

    shape = (batch, kv_heads, tiles.splits, dim // block.columns)
    out, lse = plgpu.kernel(
        decode_hopper,
        out_type=(
            jax.ShapeDtypeStruct((*shape[:3], rows, dim), jnp.float32),
            jax.ShapeDtypeStruct((*shape, ROWS), jnp.float32),
        ),
        grid=shape,
        grid_names=("row", "head", "split", "side"),
        scratch_types=block.scratch(),
        # `_Block` says where warps wait for each other.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(lengths, ends, physical, logical, grouped, key_pages, value_pages)
    out, lse = merge_splits(out[..., :group, :], lse[..., 0, :group])
    return AttentionOutput(out.reshape(query.shape).astype(query.dtype), lse.reshape(batch, heads))


def _swizzle(*widths: int) -> int:
    """The widest swizzle, in bytes, that divides rows of these many bytes."""
    return next(swizzle for swizzle in (128, 64, 32) if not any(w % swizzle for w in widths))


def _shared(shape: tuple[int, ...], dtype, swizzle: int):
    """An array in shared memory as TMA and wgmma want it."""
    minor = swizzle // jnp.dtype(dtype).itemsize
    # pyright takes dataclasses of a protocol for abstract.
    tiling = plgpu.TilingTransform((8, minor))  # pyright: ignore[reportAbstractUsage]
    swizzled = plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzled))


@dataclasses.dataclass(frozen=True)
class _Block:
    """What one warpgroup does.

    A step takes `keys` tokens, in parts: whole pages, or pieces of one. A stage's barrier counts
    as many arrivals as there are parts; a part that is not there arrives without a copy. Nothing
    but `commit_smem` makes the four warps wait for each other: it stands between the last use of
    a buffer and its next filling.

    Attributes:
        dtype: of queries, keys and values.
        rows: query heads copied, a multiple of 8.
        dim, size, listed: D, P, M.
        columns: value channels that it sums, of the side of them that its index in the grid says.
        tiles: how the work is cut.
        pattern: what the newest token sees.
    """

    dtype: Any
    rows: int
    dim: int
    columns: int
    size: int
    listed: int
    tiles: HopperTiles
    pattern: Pattern

    @property
    def part(self) -> int:
        """Tokens of a step that lie side by side in one page."""
        return math.gcd(self.size, self.tiles.keys)

    @property
    def parts(self) -> int:
        """Parts of a step."""
        return self.tiles.keys // self.part

    def scratch(self) -> list:
        """Shared memory and barriers, in the order of the arguments of `__call__`."""
        keys, stages = self.tiles.keys, self.tiles.stages
        # Weights and values, the two sides of one product, must be swizzled alike.
        by_channel, by_value = _swizzle(2 * self.dim), _swizzle(2 * self.columns, 2 * keys)
        ring = (
            _shared((stages, keys, self.dim), self.dtype, by_channel),
            _shared((stages, keys, self.columns), self.dtype, by_value),
        )
        out = _shared((ROWS, self.columns), jnp.float32, _swizzle(4 * self.columns))
        return [
            plgpu.RefUnion(ring, out),
            _shared((ROWS, self.dim), self.dtype, by_channel),
            _shared((ROWS, keys), self.dtype, by_value),
            plgpu.Barrier(num_arrivals=self.parts, num_barriers=stages),
            plgpu.Barrier(num_arrivals=self.parts, num_barriers=stages),
            plgpu.Barrier(),
        ]

    def __call__(
        self,
        lengths_ref,
        ends_ref,
        physical_ref,
        logical_ref,
        query_ref,
        key_ref,
        value_ref,
        out_ref,
        lse_ref,
        shared,
        query,
        weights,
        key_ready,
        value_ready,
        query_ready,
    ):
        (keys, values), out = shared
        stages = self.tiles.stages
        row, head, split, side = map(lax.axis_index, ("row", "head", "split", "side"))
        columns = pl.ds(pl.multiple_of(side * self.columns, self.columns), self.columns)
        newest = lengths_ref[row] - 1
        pieces = self.size // self.part  # of a page
        count = ends_ref[row, head] * pieces
        steps = pl.cdiv(count, self.parts)
        share = pl.cdiv(steps, self.tiles.splits)
        first = jnp.minimum(split * share, steps)
        last = jnp.minimum(first + share, steps)
        some_rows = pl.ds(0, self.rows)
        plgpu.copy_gmem_to_smem(query_ref.at[row, head], query.at[some_rows], query_ready)

        def entries(ref, step):
            """What a list says of each part of a step: -1 behind the end of the share."""
            found = []
            for j in range(self.parts):
                each = step * self.parts + j
                entry = ref[row, head, jnp.minimum(each // pieces, self.listed - 1)]
                found.append(jnp.where((each < count) & (step < last), entry, -1))
            return tuple(found)

        def starts(step):
            """Position of the first token of each part of a step."""
            found = []
            for j, page in enumerate(entries(logical_ref, step)):
                slot = (step * self.parts + j) % pieces * self.part
                found.append(jnp.where(page >= 0, page * self.size + slot, jnp.int32(_NOWHERE)))
            return tuple(found)

        def fetch(source, channels, step, stage, pages, into, ready):
            for j, page in enumerate(pages):
                slot = (step * self.parts + j) % pieces * self.part
                rows = pl.ds(pl.multiple_of(slot, self.part), self.part)
                at = source.at[page, rows, channels]
                target = into.at[stage, pl.ds(j * self.part, self.part)]
                lax.cond(
                    page >= 0,
                    functools.partial(plgpu.copy_gmem_to_smem, at, target, ready.at[stage]),
                    functools.partial(plgpu.barrier_arrive, ready.at[stage]),
                )

        def fetch_both(step, pages):
            stage = lax.rem(step - first, jnp.int32(stages))
            fetch(key_ref, pl.ds(0, self.dim), step, stage, pages, keys, key_ready)
            fetch(value_ref, columns, step, stage, pages, values, value_ready)

        @pl.loop(first, jnp.minimum(first + stages - 1, last))
        def _(step):
            fetch_both(step, entries(physical_ref, step))

        layout = plgpu.Layout.WGMMA
        scale = self.dim**-0.5 * _LOG2E
        plgpu.barrier_wait(query_ready)

        def step(i, carry):
            acc, peak, norm, places, pages = carry
            # All warps are done with the step before: its weights, and its stage.
            plgpu.commit_smem()
            pl.when(i + stages - 1 < last)(lambda: fetch_both(i + stages - 1, pages))
            # Loaded a step before their use.
            following, ahead = starts(i + 1), entries(physical_ref, i + stages)
            stage = lax.rem(i - first, jnp.int32(stages))
            plgpu.barrier_wait(key_ready.at[stage])
            scores = _product(query, keys.at[stage].T)
            seen = self._seen(places, newest, layout.reduce(0))
            seen = lax.broadcast_in_dim(seen, scores.shape, [1])
            scores = jnp.where(seen, scores, -jnp.inf)
            best = jnp.maximum(peak, scores.max(axis=1))
            base = jnp.where(best == -jnp.inf, 0.0, best) * scale
            shrink = jnp.exp2(peak * scale - base)
            scores = jnp.exp2(scores * scale - lax.broadcast_in_dim(base, scores.shape, [0]))
            norm = norm * shrink + scores.sum(axis=1)
            plgpu.store(weights, scores.astype(self.dtype))
            plgpu.barrier_wait(value_ready.at[stage])
            pl.when(~self._whole(places, newest))(
                lambda: self._hide(values.at[stage], places, newest)
            )
            plgpu.commit_smem()
            # No branch may follow in the loop: the compiler would add up behind it, and hold both
            # terms until then.
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
            acc += _product(weights, values.at[stage])
            return acc, best, norm, following, ahead

        def filled(shape, value, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        carry: Any = (
            filled((ROWS, self.columns), 0, layout),
            filled((ROWS,), -jnp.inf, layout.reduce(1)),
            filled((ROWS,), 0, layout.reduce(1)),
            starts(first),
            entries(physical_ref, first + stages - 1),
        )
        acc, peak, norm, *_rest = lax.fori_loop(first, last, step, carry)
        safe = jnp.where(norm > 0, norm, 1.0)
        lse = (peak * scale + jnp.log2(safe)) * (1 / _LOG2E)
        lse = jnp.where(norm > 0, lse, -jnp.inf)
        plgpu.store(lse_ref.at[row, head, split, side], lse, optimized=False)
        plgpu.commit_smem()  # all warps are done with the last values
        plgpu.store(out, acc * lax.broadcast_in_dim(1 / safe, acc.shape, [0]))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out.at[some_rows], out_ref.at[row, head, split, :, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _seen(self, places, newest, layout):
        """Whether the newest token sees each token of a step."""
        slot = plgpu.broadcasted_iota(jnp.int32, (self.tiles.keys,), 0, layout=layout)
        position = slot + places[0]
        for j, start in enumerate(places[1:], 1):
            ahead = slot - j * self.part
            position = jnp.where(ahead >= 0, ahead + start, position)
        return self.pattern.visible(position, newest)

    def _whole(self, places, newest):
        """Whether it surely sees every token of a step; a scalar."""
        whole = True
        for start in places:
            seen = start + self.part - 1 <= newest
            if not self.pattern.is_dense:
                near = start > newest - self.pattern.window
                seen &= near | (start + self.part <= self.pattern.sinks)
            whole &= seen
        return whole

    def _hide(self, values, places, newest):
        """Makes values 0 that are not seen: a weight of 0 does not silence NaN."""
        layout = plgpu.Layout.WGMMA
        seen = self._seen(places, newest, layout.reduce(1))
        width = math.gcd(self.columns, 64)
        for start in range(0, self.columns, width):
            at = values.at[:, pl.ds(start, width)]
            tile = plgpu.load(at, layout=layout)
            mask = lax.broadcast_in_dim(seen, tile.shape, [0])
            plgpu.store(at, jnp.where(mask, tile, jnp.zeros_like(tile)))


def _product(left, right):
    """left @ right, both in shared memory, waited for."""

    def multiply(total):
        plgpu.wgmma(total, left, right)
        return total[...]

    return pl.run_scoped(
        multiply, plgpu.WGMMAAccumulatorRef((left.shape[0], right.shape[1]), jnp.float32)
    )
