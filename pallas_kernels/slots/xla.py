"""Attention over slots in plain XLA: pages go by in chunks, with an online softmax over them
("Self-attention Does Not Need O(n^2) Memory", arXiv 2112.05682), which bounds the scores in memory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.quant.reference import dequantize
from pallas_kernels.twin_rows import with_twin
from pallas_kernels.types import AttentionOutput

# Bytes of float32 scores at a time, about.
_SCORE_BYTES = 16 << 20


def slot_attention(
    query, key_pages, value_pages, positions, first, last, *, kv_heads
) -> AttentionOutput:
    """See `pallas_kernels.slots.api.slot_attention`."""
    cut = _Cut.of(query, key_pages, positions, first, last, kv_heads)
    rows = (cut.batch, kv_heads, cut.rows.shape[3])

    def turn(index, carry):
        peak, total, out = carry
        scores, seen = cut.scores(key_pages, index)
        best = scores.max(2).reshape(cut.batch, cut.step, kv_heads, -1).max(1)
        best = jnp.maximum(peak, best)
        # A finite stand-in keeps exp(-inf - peak) at 0 where no key was seen yet.
        base = jnp.where(best == -jnp.inf, 0.0, best)
        weights = jnp.exp(scores - cut.each(base))
        value = cut.pages(value_pages, index)
        # Empty slots may hold NaN, which a weight of 0 would not silence.
        value = jnp.where(seen.any(1)[..., None], value, 0)
        added = jnp.einsum(
            "nrs,nsd->nrd",
            with_twin(weights.astype(value.dtype), axis=1),
            value,
            preferred_element_type=jnp.float32,
        )
        added = added[:, : weights.shape[1]].reshape(cut.batch, cut.step, *rows[1:], -1).sum(1)
        shrink = jnp.exp(peak - base)
        total = total * shrink + weights.sum(2).reshape(cut.batch, cut.step, *rows[1:]).sum(1)
        return best, total, out * shrink[..., None] + added

    carry = (
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, query.shape[3]), jnp.float32),
    )
    peak, total, out = cut.loop(turn, carry)
    safe = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe))
    return AttentionOutput(
        cut.by_query((out / safe[..., None]).astype(query.dtype)),
        cut.by_query(lse[..., None])[..., 0],
    )


def attention_mass(
    query, key_pages, lse, positions, first, last, *, kv_heads
) -> Float32[Array, "B K S"]:
    """See `pallas_kernels.slots.api.attention_mass`."""
    cut = _Cut.of(query, key_pages, positions, first, last, kv_heads)
    batch, tokens, heads, _ = query.shape
    norm = lse.reshape(batch, tokens, kv_heads, -1).swapaxes(1, 2).reshape(batch, kv_heads, -1)
    blind = norm == -jnp.inf
    norm = jnp.where(blind, 0.0, norm)

    def turn(index, mass):
        scores, _ = cut.scores(key_pages, index)
        weights = jnp.where(cut.each(blind), 0.0, jnp.exp(scores - cut.each(norm)))
        part = weights.sum(1).reshape(batch, cut.step, kv_heads, cut.size).swapaxes(1, 2)
        part = part.reshape(batch, kv_heads, -1)
        # The last chunk is moved back to fit: what it repeats is masked, and is added as 0.
        at = (0, 0, cut.first_page(index) * cut.size)
        old = lax.dynamic_slice(mass, at, part.shape)
        return lax.dynamic_update_slice(mass, old + part, at)

    slots = positions.shape[2]
    return cut.loop(turn, jnp.zeros((batch, kv_heads, slots), jnp.float32))


class _Cut(NamedTuple):
    """The work, cut into chunks of pages: entry n of a product is one page of one KV head."""

    rows: Float[Array, "B 1 K r D"]  # r = T * G queries of a KV head
    positions: Int32[Array, "B C 1_or_K P"]
    first: Int32[Array, "B 1 1 r 1"]
    last: Int32[Array, "B 1 1 r 1"]
    group: int
    count: int  # C
    step: int  # pages a chunk
    turns: int
    kv_heads: int

    @classmethod
    def of(cls, query, key_pages, positions, first, last, kv_heads) -> "_Cut":
        batch, tokens, heads, dim = query.shape
        pages, size, _ = key_pages.shape
        count, group = pages // (batch * kv_heads), heads // kv_heads
        rows = query.reshape(batch, tokens, kv_heads, group, dim).swapaxes(1, 2)
        wanted = _SCORE_BYTES // (4 * batch * heads * tokens * size)
        step = min(count, max(1, wanted))
        apart = positions.reshape(batch, -1, count, size).swapaxes(1, 2)

        def each(bounds):
            return jnp.repeat(bounds, group, axis=1)[:, None, None, :, None]

        return cls(
            rows.reshape(batch, 1, kv_heads, tokens * group, dim),
            apart, each(first), each(last), group, count, step, -(-count // step), kv_heads,
        )  # fmt: skip

    @property
    def batch(self) -> int:
        return self.rows.shape[0]

    @property
    def size(self) -> int:
        return self.positions.shape[3]

    def loop(self, turn, carry):
        return turn(0, carry) if self.turns == 1 else lax.fori_loop(0, self.turns, turn, carry)

    def first_page(self, index):
        """Of a chunk; the last one is moved back to fit."""
        return 0 if self.turns == 1 else jnp.minimum(index * self.step, self.count - self.step)

    def pages(self, pool, index) -> Float[Array, "n P D"]:
        """A chunk of the pool, in the query's dtype."""

        def take(leaf):
            apart = leaf.reshape(self.batch, -1, *leaf.shape[1:])
            at, many = self.first_page(index) * self.kv_heads, self.step * self.kv_heads
            run = apart if self.turns == 1 else lax.dynamic_slice_in_dim(apart, at, many, axis=1)
            return run.reshape(-1, *leaf.shape[1:])

        taken = jax.tree.map(take, pool)
        if isinstance(taken, QuantizedPages):
            taken = dequantize(taken)
        return taken.astype(self.rows.dtype)

    def scores(self, pool, index) -> tuple[Float32[Array, "n r P"], Bool[Array, "n r P"]]:
        """Scaled scores of a chunk, and whether the query sees the slot: -inf where not."""
        batch, _, kv_heads, rows, dim = self.rows.shape
        at = self.first_page(index)
        slots = self.positions
        if self.turns > 1:
            slots = lax.dynamic_slice_in_dim(slots, at, self.step, axis=1)
        slots = slots[:, :, :, None]  # B step K 1 P
        seen = (slots >= jnp.maximum(self.first, 0)) & (slots <= self.last)
        if self.turns > 1:
            fresh = at + jnp.arange(self.step) >= index * self.step
            seen &= fresh[:, None, None, None]
        seen = jnp.broadcast_to(seen, (batch, self.step, kv_heads, rows, self.size))
        seen = seen.reshape(-1, rows, self.size)
        spread = jnp.broadcast_to(self.rows, (batch, self.step, kv_heads, rows, dim))
        # Keys on the left: the form that XLA's CPU product runs fastest for a handful of queries.
        scores = jnp.einsum(
            "nsd,nrd->nsr",
            self.pages(pool, index),
            with_twin(spread.reshape(-1, rows, dim), axis=1),
            preferred_element_type=jnp.float32,
        )[:, :, :rows]
        return jnp.where(seen, scores.swapaxes(1, 2) * dim**-0.5, -jnp.inf), seen

    def each(self, by_row: Array) -> Array:
        """What belongs to the rows [B, K, r], for each entry of a chunk's product."""
        shape = (self.batch, self.step, *by_row.shape[1:])
        return jnp.broadcast_to(by_row[:, None], shape).reshape(-1, by_row.shape[2], 1)

    def by_query(self, by_row: Float[Array, "B K r d"]) -> Float[Array, "B T H d"]:
        batch, kv_heads, rows, dim = by_row.shape
        apart = by_row.reshape(batch, kv_heads, rows // self.group, self.group, dim)
        return apart.swapaxes(1, 2).reshape(batch, rows // self.group, -1, dim)
