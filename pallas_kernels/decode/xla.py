"""Decode attention in plain XLA, any back end: time follows what is read, not the capacity.

The pages to read go by in chunks, with an online softmax over them ("Self-attention Does Not Need
O(n^2) Memory", arXiv 2112.05682). A chunk is copied once, small enough to be still in cache when
it is multiplied; the loop ends behind the longest row.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.page_lists import PageList, contiguous_table, list_pages
from pallas_kernels.patterns import Pattern
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.quant.reference import dequantize
from pallas_kernels.types import AttentionOutput

# Measured on two cores with 1 MiB of second-level cache each: the keys of a chunk, in bytes where
# they lie side by side or are gathered, and in tokens. Shorter chunks pay for the loop (25 us a
# turn), longer ones fall out of cache.
_RUN_BYTES = 4 << 20
_GATHERED_BYTES = 1 << 20
_CHUNK_TOKENS = (512, 2048)

# Tokens are gathered one by one at less than half the rate of whole pages: below this stride
# reading everything is faster.
_LEAST_GATHERED_STRIDE = 4

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
    # XLA's CPU back end multiplies a single 16-bit row by widening all keys in a copy; a twin row
    # avoids that and costs next to nothing where memory is the bound.
    twin = group == 1 and query.dtype.itemsize == 2
    rows = jnp.repeat(grouped, 2, axis=3) if twin else grouped
    out, lse = _attend(rows, readers)
    out, lse = out[:, :, :group], lse[:, :, :group]
    return AttentionOutput(
        out.reshape(batch, heads, dim).astype(query.dtype), lse.reshape(batch, heads)
    )


def _attend(
    query: Float[Array, "B 1 K G D"], readers: list[_Reader]
) -> tuple[Float32[Array, "B K G D"], Float32[Array, "B K G"]]:
    """Online softmax over all chunks of all readers."""
    batch, _, kv_heads, group, dim = query.shape
    carry = (
        jnp.full((batch, kv_heads, group), -jnp.inf, jnp.float32),
        jnp.zeros((batch, kv_heads, group), jnp.float32),
        jnp.zeros((batch, kv_heads, group, dim), jnp.float32),
    )
    for reader in readers:

        def turn(index, carry, reader=reader):
            return _accumulate(carry, query, reader.read(index))

        if reader.most == 1:
            carry = turn(jnp.int32(0), carry)
        else:
            carry = lax.fori_loop(0, reader.turns, turn, carry)
    peak, total, out = carry
    safe = jnp.where(total == 0, 1.0, total)
    return out / safe[..., None], jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe))


def _accumulate(carry, query: Float[Array, "B 1 K G D"], chunk: _Chunk):
    """One step of the online softmax: (peak of the scores, sum of weights, output)."""
    peak, total, out = carry
    batch, runs, kv_heads, tokens, dim = chunk.key.shape
    group = query.shape[3]
    apart = (batch, runs, kv_heads)
    spread = jnp.broadcast_to(query, (*apart, group, dim)).reshape(-1, group, dim)
    # Keys on the left: the form that XLA's CPU product runs fastest for a handful of queries.
    scores = jnp.einsum(
        "nsd,ngd->nsg",
        chunk.key.reshape(-1, tokens, dim),
        spread,
        preferred_element_type=jnp.float32,
    )
    scores = scores.swapaxes(1, 2).reshape(*apart, group, tokens) * dim**-0.5
    scores = jnp.where(chunk.seen[:, :, :, None], scores, -jnp.inf)
    new_peak = jnp.maximum(peak, scores.max((1, 4)))
    # A finite stand-in keeps exp(-inf - peak) at 0 where no key was seen yet.
    base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
    weights = jnp.exp(scores - base[:, None, :, :, None])
    shrink = jnp.exp(peak - base)
    # Slots that nobody may see can hold NaN, which a weight of 0 would not silence.
    value = jnp.where(chunk.seen[..., None], chunk.value, 0)
    added = jnp.einsum(
        "ngs,nsd->ngd",
        weights.astype(value.dtype).reshape(-1, group, tokens),
        value.reshape(-1, tokens, dim),
        preferred_element_type=jnp.float32,
    )
    added = added.reshape(*apart, group, dim).sum(1)
    return new_peak, total * shrink + weights.sum((1, 4)), out * shrink[..., None] + added


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


def _gather(pools, rows: Int32[Array, "B K m"], take: Callable, dtype) -> tuple[Array, Array]:
    """What `take` gets of every leaf for the ids in `rows`, as keys and values [B, 1, K, s, D]."""
    batch, kv_heads, _ = rows.shape
    key, value = (_plain(_of_leaves(pool, take), dtype) for pool in pools)
    shape = (batch, 1, kv_heads, -1, key.shape[-1])
    return key.reshape(shape), value.reshape(shape)


def _listed(pools, pages: PageList, lengths, pattern, chunk, dtype) -> _Reader:
    """The pages of a list, copied together."""
    batch, kv_heads, listed = pages.physical.shape
    size = pools[0].shape[1]
    turns = max(1, -(-listed * size // chunk))
    step = max(1, -(-listed // turns))
    spare = ((0, 0), (0, 0), (0, turns * step - listed))
    physical, logical = (jnp.pad(each, spare, constant_values=-1) for each in pages)

    def read(index):
        here, which = (
            lax.dynamic_slice_in_dim(each, index * step, step, axis=2)
            for each in (physical, logical)
        )
        slot = which[..., None] * size + jnp.arange(size)
        seen = pattern.visible(slot, lengths[:, None, None, None] - 1)
        seen &= (here >= 0)[..., None]
        ids = jnp.maximum(here, 0)

        def take(leaf):
            # The list holds ids of the pool only: a second check would cost a pass over the copy.
            return leaf.at[ids.reshape(-1)].get(mode="promise_in_bounds")

        key, value = _gather(pools, ids, take, dtype)
        return _Chunk(key, value, seen.reshape(batch, 1, kv_heads, step * size))

    used = (physical >= 0).any((0, 1))
    last = jnp.where(used, jnp.arange(1, turns * step + 1), 0).max()
    return _Reader(turns, (last + step - 1) // step, read)


def _strided(pools, lengths, kv_heads, pattern, table, chunk, dtype) -> _Reader:
    """The multiples of the stride that are neither sinks nor in the window, token by token."""
    batch = lengths.shape[0]
    pages, size, _ = pools[0].shape
    if table is None:
        table = contiguous_table(batch, kv_heads, pages // (batch * kv_heads))
    stride, slots = pattern.stride, table.shape[2] * size
    turns = max(1, -(-slots // (stride * chunk)))
    step = -(-slots // (stride * turns))

    def read(index):
        position = (index * step + jnp.arange(step)) * stride
        far = (position < lengths[:, None] - pattern.window) & (position >= pattern.sinks)
        page = jnp.minimum(position // size, table.shape[2] - 1)
        page = jnp.take(table, page, axis=2)  # B K step
        there = (page >= 0) & (page < pages) & far[:, None]
        row = jnp.where(there, page * size + position % size, 0)

        def take(leaf):
            flat = leaf.reshape(-1, 1, leaf.shape[2])
            shared = size // leaf.shape[1]  # tokens that share a row: scales by channel
            return flat.at[row.reshape(-1) // shared].get(mode="promise_in_bounds")

        key, value = _gather(pools, row, take, dtype)
        return _Chunk(key, value, there[:, None])

    end = (lengths - pattern.window).max()
    return _Reader(turns, jnp.clip(-(-end // (stride * step)), 0, turns), read)
