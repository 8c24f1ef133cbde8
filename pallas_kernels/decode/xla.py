"""Decode attention in plain XLA, any back end: time follows what is read, not the capacity.

The pages to read go by in chunks, with an online softmax over them ("Self-attention Does Not Need
O(n^2) Memory", arXiv 2112.05682). A chunk is copied once, small enough to be still in cache when
it is multiplied; the loop ends behind the longest row. Dense attention over a small or mostly
filled cache is better off without the copy: `whole_pool`.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.decode import whole_pool
from pallas_kernels.page_lists import PageList, contiguous_table, list_pages
from pallas_kernels.patterns import Pattern
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.quant.reference import dequantize
from pallas_kernels.twin_rows import with_twin
from pallas_kernels.types import AttentionOutput

# Measured on two cores with 1 MiB of second-level cache each: the keys of a chunk, in bytes where
# they lie side by side or are gathered, and in tokens. Shorter chunks pay for the loop (25 us a
# turn), longer ones fall out of cache.
_RUN_BYTES = 4 << 20
_GATHERED_BYTES = 1 << 20
_CHUNK_TOKENS = (512, 2048)

# Tokens that one product takes of what is gathered, at the least.
_RUN_TOKENS = 64

# Tokens are gathered one by one at less than half the rate of whole pages: below this stride
# reading everything is faster.
_LEAST_GATHERED_STRIDE = 4

# A chunk's copy makes a token about this much dearer: from this filling on, one product over the
# whole pool is faster than chunks up to the longest row.
_MOSTLY_FILLED = 0.6

Pages = Float[Array, "N P D"] | QuantizedPages


class _Chunk(NamedTuple):
    """Keys and values that one turn multiplies, and which of them the row's query sees."""

    key: Float[Array, "B m K s D"]
    value: Float[Array, "B m K s D"]
    seen: Bool[Array, "B m K s"]


class _Reader(NamedTuple):
    """Chunks 0 ... turns - 1, `most` of them at the most."""

    most: int
    turns: Int32[Array, ""]
    read: Callable[[Int32[Array, ""]], _Chunk]


def decode_attention(
    query: Float[Array, "B H D"],
    key_pages: Pages,
    value_pages: Pages,
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    pattern: Pattern,
    table: Int32[Array, "B K C"] | None,
    selected: Int32[Array, "B K M"] | None,
) -> AttentionOutput:
    """See `pallas_kernels.decode.api.decode_attention`."""
    batch, heads, dim = query.shape
    group = heads // kv_heads
    pools = (key_pages, value_pages)
    token_bytes = batch * kv_heads * dim * query.dtype.itemsize
    chunk = _chunk_tokens(_GATHERED_BYTES // token_bytes)
    whole = pattern.is_dense or (
        pattern.stride is not None and pattern.stride < _LEAST_GATHERED_STRIDE
    )
    run = _chunk_tokens(_RUN_BYTES // token_bytes)
    if whole and table is None and selected is None:
        readers = [_in_place(pools, lengths, kv_heads, pattern, run, query.dtype)]
    elif whole or pattern.stride is None or selected is not None:
        pages = _list(pools, lengths, kv_heads, pattern, table, selected)
        readers = [_listed(pools, pages, lengths, pattern, chunk, query.dtype)]
    else:
        near = dataclasses.replace(pattern, stride=None)
        pages = _list(pools, lengths, kv_heads, near, table, None)
        readers = [
            _listed(pools, pages, lengths, near, chunk, query.dtype),
            _strided(pools, lengths, kv_heads, pattern, table, chunk, query.dtype),
        ]
    grouped = query.reshape(batch, 1, kv_heads, group, dim)
    rows = with_twin(grouped, axis=3)
    if (
        pattern.is_dense
        and table is None
        and selected is None
        and not isinstance(key_pages, QuantizedPages)
        and not isinstance(value_pages, QuantizedPages)
    ):
        out, lse = _attend_dense(rows, readers, key_pages, value_pages, lengths)
    else:
        out, lse = _attend(rows, readers)
    out, lse = out[:, :, :group], lse[:, :, :group]
    return AttentionOutput(
        out.reshape(batch, heads, dim).astype(query.dtype), lse.reshape(batch, heads)
    )


def _attend_dense(rows, readers, key_pages, value_pages, lengths):
    """Where the pages lie if most of them are read anyway, in chunks if few are filled."""
    batch, _, kv_heads, _, _ = rows.shape
    if readers[0].most == 1:
        return whole_pool.attend(rows, key_pages, value_pages, lengths)
    slots = key_pages.shape[0] // (batch * kv_heads) * key_pages.shape[1]
    return lax.cond(
        lengths.max() > slots * _MOSTLY_FILLED,
        lambda: whole_pool.attend(rows, key_pages, value_pages, lengths),
        lambda: _attend(rows, readers),
    )


def _attend(
    query: Float[Array, "B 1 K G D"], readers: list[_Reader]
) -> tuple[Float32[Array, "B K G D"], Float32[Array, "B K G"]]:
    """Online softmax over all chunks of all readers."""
    batch, _, kv_heads, group, dim = query.shape
    carry = None
    for reader in readers:
        if reader.most == 1:
            carry = _accumulate(carry, query, reader.read(jnp.int32(0)))
            continue
        if carry is None:
            carry = (
                jnp.full((batch, kv_heads, group), -jnp.inf, jnp.float32),
                jnp.zeros((batch, kv_heads, group), jnp.float32),
                jnp.zeros((batch, kv_heads, group, dim), jnp.float32),
            )

        def turn(index, carry, reader=reader):
            return _accumulate(carry, query, reader.read(index))

        carry = lax.fori_loop(0, reader.turns, turn, carry)
    assert carry is not None
    peak, total, out = carry
    safe = jnp.where(total == 0, 1.0, total)
    return out / safe[..., None], jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe))


def _accumulate(carry, query: Float[Array, "B 1 K G D"], chunk: _Chunk):
    """One step of the online softmax: (peak of the scores, sum of weights, output).

    Few operations on flat shapes: each costs XLA's CPU back end about 5 us to begin.
    """
    batch, runs, kv_heads, tokens, dim = chunk.key.shape
    group = query.shape[3]
    apart = (batch, runs, kv_heads)
    seen = chunk.seen.reshape(-1, 1, tokens)
    spread = jnp.broadcast_to(query, (*apart, group, dim)).reshape(-1, group, dim)
    # Keys on the left: the form that XLA's CPU product runs fastest for a handful of queries.
    scores = jnp.einsum(
        "nsd,ngd->nsg",
        chunk.key.reshape(-1, tokens, dim),
        spread,
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(seen, scores.swapaxes(1, 2) * dim**-0.5, -jnp.inf)  # n G s
    peak = scores.max(2).reshape(*apart, group).max(1)
    if carry is not None:
        peak = jnp.maximum(peak, carry[0])
    # A finite stand-in keeps exp(-inf - peak) at 0 where no key was seen yet.
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    each = jnp.broadcast_to(base[:, None], (*apart, group)).reshape(-1, group, 1)
    weights = jnp.exp(scores - each)
    # Slots that nobody may see can hold NaN, which a weight of 0 would not silence.
    value = chunk.value.reshape(-1, tokens, dim)
    value = jnp.where(seen.swapaxes(1, 2), value, 0)
    out = jnp.einsum(
        "ngs,nsd->ngd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    out = out.reshape(*apart, group, dim).sum(1)
    total = weights.sum(2).reshape(*apart, group).sum(1)
    if carry is not None:
        shrink = jnp.exp(carry[0] - base)
        total += carry[1] * shrink
        out += carry[2] * shrink[..., None]
    return peak, total, out


def _chunk_tokens(wanted: int) -> int:
    low, high = _CHUNK_TOKENS
    return min(max(wanted, low), high)


def _plain(pages: Pages, dtype) -> Float[Array, "N P D"]:
    return dequantize(pages).astype(dtype) if isinstance(pages, QuantizedPages) else pages


def _of_leaves(pages: Pages, take: Callable) -> Pages:
    """`take` of a pool, or of each array of a quantised one; all have the pages in front."""
    if not isinstance(pages, QuantizedPages):
        return take(pages)
    return dataclasses.replace(
        pages,
        codes=take(pages.codes),
        scales=take(pages.scales),
        offsets=take(pages.offsets),
    )


def _in_place(pools, lengths, kv_heads, pattern, chunk, dtype) -> _Reader:
    """All pages of the contiguous layout, in order."""
    batch = lengths.shape[0]
    pages, size, dim = pools[0].shape
    count = pages // (batch * kv_heads)
    step = min(count, max(1, chunk // size))

    def take(pool, first):
        def cut(leaf):
            apart = leaf.reshape(batch, count * kv_heads, *leaf.shape[1:])
            run = lax.dynamic_slice_in_dim(apart, first * kv_heads, step * kv_heads, axis=1)
            return run.reshape(-1, *leaf.shape[1:])

        run = _plain(_of_leaves(pool, cut), dtype)
        return run.reshape(batch, step, kv_heads, size, dim)

    def read(index):
        # The last chunk is moved back to fit; slots it repeats are masked.
        first = jnp.minimum(index * step, count - step)
        slot = (first + jnp.arange(step))[:, None] * size + jnp.arange(size)
        seen = pattern.visible(slot, lengths[:, None, None] - 1) & (slot >= index * step * size)
        seen = jnp.broadcast_to(seen[:, :, None], (batch, step, kv_heads, size))
        key, value = (take(pool, first) for pool in pools)
        return _Chunk(key, value, seen)

    width = step * size
    stop = jnp.minimum(lengths.max(), count * size)
    return _Reader(-(-count // step), (stop + width - 1) // width, read)


def _list(pools, lengths, kv_heads, pattern, table, selected) -> PageList:
    count, size, _ = pools[0].shape
    return list_pages(
        lengths, pattern, kv_heads=kv_heads, pages=count, size=size, table=table, selected=selected
    )


def _gather(pools, rows: Int32[Array, "B m K r"], take: Callable, dtype) -> tuple[Array, Array]:
    """What `take` gets of every leaf for the ids in `rows`, as keys and values [B, m, K, s, D]."""
    key, value = (_plain(_of_leaves(pool, take), dtype) for pool in pools)
    shape = (*rows.shape[:3], -1, key.shape[-1])
    return key.reshape(shape), value.reshape(shape)


def _computed_once(small):
    """Kept out of the loops over keys and values, where XLA would work it out for every number."""
    return lax.optimization_barrier(small)


def _listed(pools, pages: PageList, lengths, pattern, chunk, dtype) -> _Reader:
    """The pages of a list, copied together."""
    listed, size = pages.physical.shape[2], pools[0].shape[1]
    joined = -(-_RUN_TOKENS // size)  # pages of one product
    turns = max(1, -(-listed * size // chunk))
    step = max(1, -(-listed // (turns * joined)))  # products of a turn
    width = step * joined
    spare = ((0, 0), (0, 0), (0, turns * width - listed))
    physical, logical = (jnp.pad(each, spare, constant_values=-1) for each in pages)

    def read(index):
        here, which = (
            _runs(lax.dynamic_slice_in_dim(each, index * width, width, axis=2), joined)
            for each in (physical, logical)
        )
        slot = which[..., None] * size + jnp.arange(size)
        seen = pattern.visible(slot, lengths[:, None, None, None, None] - 1)
        seen &= (here >= 0)[..., None]
        ids, seen = _computed_once((jnp.maximum(here, 0), seen))

        def take(leaf):
            # The list holds ids of the pool only: a second check would cost a pass over the copy.
            return leaf.at[ids.reshape(-1)].get(mode="promise_in_bounds")

        key, value = _gather(pools, ids, take, dtype)
        return _Chunk(key, value, seen.reshape(key.shape[:-1]))

    used = (physical >= 0).any((0, 1))
    last = jnp.where(used, jnp.arange(1, turns * width + 1), 0).max()
    return _Reader(turns, (last + width - 1) // width, read)


def _runs(ids: Int32[Array, "B K w"], joined: int) -> Int32[Array, "B m K r"]:
    """Runs of `joined` entries; m is in front of K so that two cores share the copy evenly."""
    batch, kv_heads, _ = ids.shape
    return ids.reshape(batch, kv_heads, -1, joined).swapaxes(1, 2)


def _strided(pools, lengths, kv_heads, pattern, table, chunk, dtype) -> _Reader:
    """The multiples of the stride that are neither sinks nor in the window, token by token."""
    batch = lengths.shape[0]
    pages, size, _ = pools[0].shape
    if table is None:
        table = contiguous_table(batch, kv_heads, pages // (batch * kv_heads))
    stride, slots = pattern.stride, table.shape[2] * size
    listed = -(-slots // stride)
    turns = -(-listed // chunk)
    joined = min(_RUN_TOKENS, listed)
    width = -(-listed // (turns * joined)) * joined

    def read(index):
        position = (index * width + jnp.arange(width)) * stride
        far = (position < lengths[:, None] - pattern.window) & (position >= pattern.sinks)
        page = jnp.minimum(position // size, table.shape[2] - 1)
        page = jnp.take(table, page, axis=2)  # B K width
        there = (page >= 0) & (page < pages) & far[:, None]
        row = jnp.where(there, page * size + position % size, 0)
        row, there = _computed_once((_runs(row, joined), _runs(there, joined)))

        def take(leaf):
            flat = leaf.reshape(-1, 1, leaf.shape[2])
            shared = size // leaf.shape[1]  # tokens that share a row: scales by channel
            return flat.at[row.reshape(-1) // shared].get(mode="promise_in_bounds")

        return _Chunk(*_gather(pools, row, take, dtype), there)

    end = (lengths - pattern.window).max()
    return _Reader(turns, jnp.clip(-(-end // (stride * width)), 0, turns), read)
