"""The page layout of keys and values, and writing new tokens into it.

One layer's keys are `[N, P, D]`: N pages of P tokens of one KV head. In the *contiguous* layout
used here, page c of sequence b and KV head k is page `(b * C + c) * K + k` (C pages a sequence),
so that the K pages of the same tokens lie side by side in one block. The leading axis is flat on
purpose: with a size-1 batch or head axis XLA's CPU back end rewrites shapes around the in-place
update and copies the whole cache (measured: 150 MiB of temporaries for 120 MiB of cache).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


def pages_per_sequence(pages: Float[Array, "N P D"], batch: int, kv_heads: int) -> int:
    """C, the number of pages each KV head of each sequence owns."""
    return pages.shape[0] // (batch * kv_heads)


def by_sequence(
    pages: Float[Array, "N P D"], batch: int, kv_heads: int
) -> Float[Array, "B C K P D"]:
    """The contiguous layout with its axes apart (a view)."""
    count = pages_per_sequence(pages, batch, kv_heads)
    return pages.reshape(batch, count, kv_heads, *pages.shape[1:])


def append_tokens(
    pages: Float[Array, "N P D"],
    new: Float[Array, "B T K D"],
    starts: Int32[Array, " B"],
    counts: Int32[Array, " B"],
) -> Float[Array, "N P D"]:
    """Writes each row's first `counts` new tokens at positions `starts ...`, in place.

    Slots outside `[starts, starts + counts)` keep their bits, and rows with count 0 are untouched.
    The caller has checked `starts + counts <= C * P`: nothing here can report it under `jit`.
    Moves O(B T) tokens, whatever the capacity.
    """
    batch, tokens, kv_heads, _ = new.shape
    count = pages_per_sequence(pages, batch, kv_heads)
    append_row = _append_one if tokens == 1 else _append_many

    def append(row, pages):
        return append_row(pages, new[row], starts[row], counts[row], row, count)

    if batch == 1:
        return append(0, pages)
    # A loop, still in place: unrolled, 64 rows take a minute to compile for every layer.
    return lax.fori_loop(0, batch, append, pages)


def _append_one(pages, new, start, length, row, count):
    """One token [1, K, D]: read its slot, choose, write it back."""
    _, kv_heads, dim = new.shape
    size = pages.shape[1]
    # A finished row at full capacity has no slot of its own: aim at its last one, keep it.
    position = jnp.minimum(start, count * size - 1)
    at = ((row * count + position // size) * kv_heads, position % size, 0)
    old = lax.dynamic_slice(pages, at, (kv_heads, 1, dim))
    block = jnp.where(length > 0, new.swapaxes(0, 1), old)
    return lax.dynamic_update_slice(pages, block, at)


def _append_many(pages, new, start, length, row, count):
    """Read-modify-write of the run of pages that `start ... start + length` can touch."""
    tokens, kv_heads, dim = new.shape
    size = pages.shape[1]
    touched = min(count, (tokens + size - 2) // size + 1)
    first = jnp.minimum(start // size, count - touched)
    offset = start - first * size
    # T spare slots behind the run, so that the pad tokens of a chunk fall off its end.
    run = jnp.zeros((touched * size + tokens, kv_heads, dim), new.dtype)
    run = lax.dynamic_update_slice(run, new, (offset, 0, 0))[: touched * size]
    run = run.reshape(touched, size, kv_heads, dim).swapaxes(1, 2)
    run = run.reshape(touched * kv_heads, size, dim)
    slot = jnp.arange(touched * size).reshape(touched, 1, size)
    fresh = (slot >= offset) & (slot < offset + length)
    fresh = jnp.broadcast_to(fresh, (touched, kv_heads, size)).reshape(-1, size, 1)
    at = ((row * count + first) * kv_heads, 0, 0)
    old = lax.dynamic_slice(pages, at, run.shape)
    return lax.dynamic_update_slice(pages, jnp.where(fresh, run, old), at)


def write_slots(
    pages: Float[Array, "N P D"],
    new: Float[Array, "B T K D"],
    slots: Int32[Array, "B K T"],
) -> Float[Array, "N P D"]:
    """Writes each token to a slot of its own for every KV head, in place; -1 writes nothing.

    For tokens that stand in no order: `append_tokens` is faster for those that do. No two tokens
    may aim at one slot.
    """
    batch, _, kv_heads, dim = new.shape
    size, count = pages.shape[1], pages_per_sequence(pages, batch, kv_heads)
    row = _slot_rows(slots, size, count)
    flat = pages.reshape(-1, dim)
    # Aimed past the end, where it is dropped: a negative index would wrap.
    row = jnp.where((slots >= 0) & (slots < count * size), row, flat.shape[0])
    tokens = new.swapaxes(1, 2).reshape(-1, dim)
    return flat.at[row.reshape(-1)].set(tokens, mode="drop").reshape(pages.shape)


def read_slots(
    pages: Float[Array, "N P D"], slots: Int32[Array, "B K T"]
) -> Float[Array, "B T K D"]:
    """The tokens of some slots of every KV head (a copy). -1 reads slot 0."""
    batch, kv_heads, _ = slots.shape
    size, count = pages.shape[1], pages_per_sequence(pages, batch, kv_heads)
    row = _slot_rows(jnp.clip(slots, 0, count * size - 1), size, count)
    return pages.reshape(-1, pages.shape[2]).at[row].get(mode="promise_in_bounds").swapaxes(1, 2)


def _slot_rows(slots: Int32[Array, "B K T"], size: int, count: int) -> Int32[Array, "B K T"]:
    """Which row of a pool seen as `[N * P, D]` each slot of each KV head is."""
    batch, kv_heads, _ = slots.shape
    sequence = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    head = jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
    return ((sequence * count + slots // size) * kv_heads + head) * size + slots % size


def gather_tokens(
    pages: Float[Array, "N P D"], batch: int, kv_heads: int
) -> Float[Array, "B S K D"]:
    """Every slot of every sequence in token order (a copy: for references and tests)."""
    apart = by_sequence(pages, batch, kv_heads)  # B C K P D
    tokens = jnp.moveaxis(apart, 2, 3)  # B C P K D
    return tokens.reshape(batch, -1, kv_heads, pages.shape[2])


def new_pages(batch: int, kv_heads: int, count: int, size: int, dim: int, dtype) -> jax.Array:
    """Zeroed pages in the contiguous layout: `[batch * count * kv_heads, size, dim]`."""
    return jnp.zeros((batch * count * kv_heads, size, dim), dtype)
