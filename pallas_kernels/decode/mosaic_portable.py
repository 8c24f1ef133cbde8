"""Decode attention on NVIDIA GPUs from sm_80 on: Pallas Mosaic GPU, `mma.sync`.

One block of 128 threads serves a share of one KV head's listed pages (flash-decoding:
"Flash-Decoding for long-context inference", Dao et al. 2023); the shares are merged afterwards.
A block takes `keys` tokens at a time: whole pages, or a part of one. Their rows come from global
memory in 16-byte loads, one step ahead of their use; they wait in registers, are turned into
16-bit numbers there where they are codes, and go through shared memory, from which keys and
values alike are read back as the right operand (values transposed on the way).
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
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.cards import Card
from pallas_kernels.decode.mosaic_sources import (
    KeysByChannel,
    PlainPages,
    Sight,
    ValuesByToken,
    copy_layout,
    zeros,
)
from pallas_kernels.page_lists import PageList
from pallas_kernels.patterns import Pattern
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.types import AttentionOutput

_ROWS = 16  # of an mma.sync tile: the query heads of a KV head, padded
_STEP = 32  # columns that four warps cover side by side
_LOG2E = math.log2(math.e)
_NOWHERE = 2**30  # a position behind every query


@dataclasses.dataclass(frozen=True)
class PortableTiles:
    """How the work is cut.

    Attributes:
        splits: blocks of threads that share one KV head of one sequence.
        keys: tokens that a block multiplies at a time, a multiple of 32.
    """

    splits: int
    keys: int


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
    _, heads, dim = query.shape
    size = key_pages.shape[1]
    quantized = isinstance(key_pages, QuantizedPages)
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, not {query.dtype}"
    if dim % 16 or not 16 <= dim <= 256:
        return f"needs a head_dim that is a multiple of 16, 256 at the most, not {dim}"
    if kv_heads is not None and heads // kv_heads > _ROWS:
        return f"serves {_ROWS} query heads a KV head, not {heads // kv_heads}"
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        if pages.dtype != query.dtype:
            return f"needs {name} of the query's dtype {query.dtype}, not {pages.dtype}"
    if _part(key_pages, 8) % 8:
        text = f" or a key group of {key_pages.group} tokens" if quantized else ""
        return f"takes 8 tokens at a time; a page size of {size}{text} does not divide into those"
    sources = _sources(key_pages, value_pages, 32, query.dtype)
    for name, source in zip(("key_pages", "value_pages"), sources, strict=True):
        if source.layout is None:
            return (
                f"cannot spread {source.part} rows of {source.run[0]} stored numbers of {name} "
                "over its threads; use page sizes and key groups of 16 tokens or more, and value "
                "groups of 16 channels or more"
            )
    return None


def default_tiles(
    card: Card,
    *,
    batch: int,
    kv_heads: int,
    group: int,
    listed: int,
    size: int,
    dim: int,
    bits: int,
) -> PortableTiles:
    """Tiles that always work: as many blocks of threads as the card holds at once, or whole
    multiples of it, and no block with less than a few steps.

    Args:
        card: the GPU.
        batch, kv_heads, group: B, K, G.
        listed: M, entries of a page list.
        size, dim: P, D.
        bits: of a stored number, 16, 8 or 4.
    """
    del group
    keys = _key_counts(dim)[0]
    return PortableTiles(_splits(card, batch * kv_heads, listed * size, keys, dim, bits, 4), keys)


def candidate_tiles(
    card: Card,
    *,
    batch: int,
    kv_heads: int,
    group: int,
    listed: int,
    size: int,
    dim: int,
    bits: int,
) -> list[PortableTiles]:
    """Tiles worth measuring, for what `default_tiles` takes."""
    del group
    found = []
    for keys in _key_counts(dim):
        most = _splits(card, batch * kv_heads, listed * size, keys, dim, bits, 1)
        few = _splits(card, batch * kv_heads, listed * size, keys, dim, bits, 4)
        found += [PortableTiles(splits, keys) for splits in (few, most, -(-few // 2), 2 * few)]
    steps = {keys: -(-listed * size // keys) for keys in _key_counts(dim)}
    return list(dict.fromkeys(each for each in found if each.splits <= max(1, steps[each.keys])))


def _key_counts(dim: int) -> list[int]:
    """Tokens a step, the likely best first: what fits into registers with one step in flight."""
    return [64, 32] if dim <= 128 else [32]


def _splits(card: Card, heads: int, tokens: int, keys: int, dim: int, bits: int, steps: int) -> int:
    """Shares of a list that leave the least time idle, of at least `steps` steps each."""
    del dim, bits
    held = 2 * card.processors  # blocks at once: about 200 registers a thread allow two
    most = max(1, -(-tokens // (steps * keys)))
    best = min(
        range(1, min(most, 4 * -(-held // heads)) + 1),
        key=lambda splits: (-(-heads * splits // held) / splits, splits),
    )
    return best


def decode_attention(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"] | QuantizedPages,
    value_pages: Float[Array, "N P D"] | QuantizedPages,
    pages: PageList,
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    pattern: Pattern,
    tiles: PortableTiles,
) -> AttentionOutput:
    """See `pallas_kernels.decode.api.decode_attention`; `unsupported` says what is served.

    Each block reads the entries of its share and nothing else; entries of -1 not at all.

    Args:
        query: bfloat16 or float16.
        key_pages, value_pages: of the query's dtype, or quantised, keys by channel and values by
            token.
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
        raise ValueError(f"the portable decode kernel {reason}")
    if tiles.splits < 1 or tiles.keys < 32 or tiles.keys % 32:
        raise ValueError(f"tiles = {tiles}: keys must be a multiple of 32, splits at least 1")
    batch, heads, dim = query.shape
    group = heads // kv_heads
    listed = pages.physical.shape[2]
    # Entries behind the last one that is there are not walked, so that shares are even.
    there = (pages.physical >= 0) & (pages.logical >= 0)
    physical = jnp.where(there, pages.physical, -1)
    entries = jnp.arange(1, listed + 1, dtype=jnp.int32)
    ends = jnp.where(there, entries, 0).max(axis=2, initial=0)
    grouped = query.reshape(batch, kv_heads, group, dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, _ROWS - group), (0, 0)))
    key, value = _sources(key_pages, value_pages, tiles.keys, query.dtype)
    body = _Body(
        dtype=query.dtype,
        dim=dim,
        size=key_pages.shape[1],
        listed=listed,
        keys=tiles.keys,
        part=key.part,
        splits=tiles.splits,
        pattern=pattern,
        key=key,
        value=value,
    )

    def decode_portable(*refs):  # named, for profiles
        body(*refs)

    shape = (batch, kv_heads, tiles.splits, _ROWS)
    out, lse = plgpu.kernel(
        decode_portable,
        out_type=(
            jax.ShapeDtypeStruct((*shape, body.padded), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(batch, kv_heads, tiles.splits),
        grid_names=("row", "head", "split"),
        scratch_types=body.scratch,
    )(lengths, ends, physical, pages.logical, grouped, key.arrays, value.arrays)
    out, lse = _merge(out[..., :group, :dim], lse[..., :group])
    return AttentionOutput(out.reshape(query.shape).astype(query.dtype), lse.reshape(batch, heads))


def _merge(
    out: Float32[Array, "B K S G D"], lse: Float32[Array, "B K S G"]
) -> tuple[Float32[Array, "B K G D"], Float32[Array, "B K G"]]:
    """Joins the shares as `merge_attention` joins parts: one that saw nothing weighs exactly 0."""
    peak = lse.max(axis=2)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(lse - peak[:, :, None])
    total = weights.sum(axis=2)
    safe = jnp.where(total == 0, 1.0, total)
    merged = (out * weights[..., None]).sum(axis=2) / safe[..., None]
    return merged, jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe))


def _part(key_pages, keys: int) -> int:
    """Tokens of a step that lie side by side in one page and share their keys' constants."""
    groups = [key_pages.group] if isinstance(key_pages, QuantizedPages) else []
    return math.gcd(key_pages.shape[1], keys, *groups)


def _sources(key_pages, value_pages, keys: int, dtype):
    part = _part(key_pages, keys)
    key = PlainPages(key_pages, part)
    if isinstance(key_pages, QuantizedPages):
        query_side = plgpu.Layout.MMA_LHS(dtype, m_warps=1).reduce(0)
        key_side = plgpu.Layout.MMA_RHS(dtype, m_warps=1).reduce(1)
        key = KeysByChannel(key_pages, part, part == keys, query_side, key_side)
    value = PlainPages(value_pages, part)
    if isinstance(value_pages, QuantizedPages):
        group, dim = value_pages.group, value_pages.shape[2]
        value = ValuesByToken(value_pages, part, group % _STEP == 0 or group == dim)
    return key, value


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Body:
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
        return -(-self.dim // _STEP) * _STEP

    @property
    def blocks(self) -> int:
        """Runs of the output's columns that have values' constants of their own."""
        return self.value.groups if self.value.folded else 1

    @property
    def scratch(self) -> list:
        """Shared memory: keys, values, weights and the values' constants of one step."""
        shapes = [(self.keys, self.dim), (self.keys, self.padded), (_ROWS, self.keys)]
        if self.value.folded:
            shapes.append((2 * self.blocks, self.keys))
        return [plgpu.SMEM(shape, self.dtype) for shape in shapes]

    def __call__(
        self, lengths_ref, ends_ref, physical_ref, logical_ref, query_ref, key_refs, value_refs,
        out_ref, lse_ref, *shared,
    ):  # fmt: skip
        row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
        newest = lengths_ref[row] - 1
        parts, pieces = self.keys // self.part, self.size // self.part
        count = ends_ref[row, head] * pieces
        steps = pl.cdiv(count, parts)
        share = pl.cdiv(steps, self.splits)
        first = split * share
        last = jnp.minimum(first + share, steps)
        left = plgpu.Layout.MMA_LHS(self.dtype, m_warps=1)
        total = plgpu.Layout.MMA_ACC(self.dtype, m_warps=1)
        query = plgpu.load(query_ref.at[row, head], layout=left, optimized=False)
        if self.padded > self.dim:
            shape = (self.keys, self.padded)
            blank = zeros(shape, self.dtype, copy_layout(*shape, 2))
            plgpu.store(shared[1], blank, optimized=False)

        def place(step, j):
            """Page of the j-th part of a step (-1 for none), its first slot and position."""
            each = step * parts + j
            entry = jnp.minimum(each // pieces, self.listed - 1)
            slot = each % pieces * self.part
            page = jnp.where((each < count) & (step < last), physical_ref[row, head, entry], -1)
            position = logical_ref[row, head, entry] * self.size + slot
            return page, slot, jnp.where(page >= 0, position, jnp.int32(_NOWHERE))

        def fetch(step):
            found = []
            for j in range(parts):
                page, slot, _ = place(step, j)
                read = functools.partial(self._read, key_refs, value_refs, page, slot)
                found.append(lax.cond(page >= 0, read, self._nothing))
            return tuple(found)

        def step(i, carry):
            *carry, fetched = carry
            sights = [Sight(self.pattern, place(i, j)[2], newest) for j in range(parts)]
            for j, (raw, sight) in enumerate(zip(fetched, sights, strict=True)):
                self._share(j, raw, sight, shared)
            # Before this step's work, so that they arrive during it.
            following = fetch(i + 1)
            carry = self._attend(query, fetched, sights, carry, shared)
            return *carry, following

        start = (
            (zeros((_ROWS, self.padded // self.blocks), jnp.float32, total),) * self.blocks,
            (zeros((_ROWS, _STEP), jnp.float32, total),) * (self.blocks * self.value.folded),
            plgpu.layout_cast(jnp.full((_ROWS,), -jnp.inf, jnp.float32), total.reduce(1)),
            zeros((_ROWS, self.keys), jnp.float32, total),
            fetch(first),
        )
        accs, shifts, peak, norm, _ = lax.fori_loop(first, last, step, start)
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

    def _share(self, j: int, raw, sight: Sight, shared):
        """Puts the j-th part of a step where all threads find it."""
        keys, values, _, *constants = shared
        rows = pl.ds(j * self.part, self.part)
        for channel, tile in self.key.numbers(raw[0], self.dtype, None):
            plgpu.store(keys.at[rows, pl.ds(channel, tile.shape[1])], tile, optimized=False)
        for channel, tile in self.value.numbers(raw[1], self.dtype, sight):
            plgpu.store(values.at[rows, pl.ds(channel, tile.shape[1])], tile, optimized=False)
        for ref in constants:
            for index, vector in enumerate(self.value.constants(raw[1], sight)):
                plgpu.store(ref.at[index, rows], vector, optimized=False)

    def _attend(self, query, fetched, sights, carry, shared):
        """One step of online softmax over what `_share` put there."""
        accs, shifts, peak, norm = carry
        key_shared, value_shared, weight_shared, *constants = shared
        left = plgpu.Layout.MMA_LHS(self.dtype, m_warps=1)
        right = plgpu.Layout.MMA_RHS(self.dtype, m_warps=1)
        total = plgpu.Layout.MMA_ACC(self.dtype, m_warps=1)
        scores = zeros((_ROWS, self.keys), jnp.float32, total)
        if self.key.folded:
            scale, offset = self.key.constants(fetched[0][0])
            offset = lax.broadcast_in_dim(offset, (self.dim, self.keys), [0])
            scores = plgpu.mma(scores, query, offset)
            query = query * lax.broadcast_in_dim(scale, query.shape, [1])
        key = plgpu.load(key_shared.T, layout=right, optimized=False)
        scores = plgpu.mma(scores, query, key) * (self.dim**-0.5 * _LOG2E)
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=total)
        position = column + sights[0].start
        for j in range(1, len(sights)):
            ahead = column - j * self.part
            position = jnp.where(ahead >= 0, ahead + sights[j].start, position)
        visible = self.pattern.visible(position, sights[0].newest)
        scores = jnp.where(visible, scores, -jnp.inf)
        best = jnp.maximum(peak, scores.max(axis=1))
        base = jnp.where(best == -jnp.inf, 0.0, best)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(base, scores.shape, [0]))
        shrink = jnp.exp2(peak - base)

        def shrunk(array):
            return array * lax.broadcast_in_dim(shrink, array.shape, [0])

        norm = shrunk(norm) + weights
        plgpu.store(weight_shared, weights.astype(self.dtype), optimized=False)
        weights = plgpu.load(weight_shared, layout=left, optimized=False)
        accs, shifts = [shrunk(acc) for acc in accs], [shrunk(shift) for shift in shifts]
        for block, acc in enumerate(accs):
            width = acc.shape[1]
            scaled = weights
            for ref in constants:
                scale, offset = (
                    plgpu.load(ref.at[index], layout=layout, optimized=False)
                    for index, layout in (
                        (block, left.reduce(0)),
                        (self.blocks + block, right.reduce(1)),
                    )
                )
                offset = lax.broadcast_in_dim(offset, (self.keys, _STEP), [0])
                shifts[block] = plgpu.mma(shifts[block], weights, offset)
                scaled = weights * lax.broadcast_in_dim(scale, weights.shape, [1])
            value = value_shared.at[:, pl.ds(block * width, width)]
            value = plgpu.load(value, layout=right, optimized=False)
            accs[block] = plgpu.mma(acc, scaled, value)
        return tuple(accs), tuple(shifts), best, norm
