"""Slots that tokens leave again: where they stand, and what moves when some go.

In each head of a row the filled slots are always the first ones, as many in all heads, in no order.
When they are all full, a *burst* empties `interval` of them at once: each head chooses its own, and
what stands in the last `interval` slots moves into the gaps. A row's bursts come before position
`slots`, then every `interval` positions, so that its length alone tells how many slots are filled.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import append_tokens, read_slots, write_slots
from sparse_jax.caches.base import Span


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """One layer's slots, S of them with those that only round up a page."""

    keys: Float[Array, "N P D"]
    values: Float[Array, "N P D"]
    positions: Int32[Array, "B K S"]  # -1 for an empty slot
    mass: Float32[Array, "B K S"]  # of an empty slot: anything
    slots: int = dataclasses.field(metadata={"static": True})  # that may be filled
    interval: int = dataclasses.field(metadata={"static": True})

    def is_full(self, at: Int32[Array, " B"]) -> Bool[Array, " B"]:
        """Whether a burst must come before a row's token at position `at`."""
        return (at >= self.slots) & ((at - self.slots) % self.interval == 0)

    def filled(self, at: Int32[Array, " B"]) -> Int32[Array, " B"]:
        """Slots in use when the token at position `at` comes, after the burst that may be due."""
        later = self.slots - self.interval + (at - self.slots) % self.interval
        return jnp.where(at < self.slots, at, later)

    def until_full(self, at: Int32[Array, " B"]) -> Int32[Array, " B"]:
        """Tokens from position `at` on that fit before the next burst."""
        return self.slots - self.filled(at)

    def append(
        self, key: Float[Array, "B T K D"], value: Float[Array, "B T K D"], span: Span
    ) -> "Held":
        """With new tokens, which must fit, and mass 0 for them."""
        filled = self.filled(span.starts)
        index = jnp.arange(self.positions.shape[2]) - filled[:, None]
        fresh = (index >= 0) & (index < span.counts[:, None])
        position = (span.starts[:, None] + index)[:, None]
        return dataclasses.replace(
            self,
            keys=append_tokens(self.keys, key, filled, span.counts),
            values=append_tokens(self.values, value, filled, span.counts),
            positions=jnp.where(fresh[:, None], position, self.positions),
            mass=jnp.where(fresh[:, None], 0.0, self.mass),
        )

    def without(self, leaving: Int32[Array, "B K I"], due: Bool[Array, " B"]) -> "Held":
        """After a burst in the rows that are due, all of whose slots are full.

        leaving: `interval` different slots of each head.
        """
        batch, kv_heads, slots = self.positions.shape
        edge = self.slots - self.interval
        tail = jnp.broadcast_to(jnp.arange(edge, self.slots, dtype=jnp.int32), leaving.shape)
        row = jnp.arange(batch)[:, None, None]
        head = jnp.arange(kv_heads)[:, None]
        goes = jnp.zeros((batch, kv_heads, slots), bool).at[row, head, leaving].set(True)
        moves = ~goes[..., edge : self.slots] & due[:, None, None]
        # The i-th that moves goes to the i-th gap: there are as many of both below the edge.
        gaps = jnp.sort(jnp.where(leaving < edge, leaving, slots), axis=-1)
        order = jnp.maximum(jnp.cumsum(moves, axis=-1) - 1, 0)
        target = jnp.where(moves, jnp.take_along_axis(gaps, order, axis=-1), -1)
        dropped = jnp.where(moves, target, slots)  # where there is none: past the end

        def pool(pages):
            return write_slots(pages, read_slots(pages, tail), target)

        def moved(old):
            return old.at[row, head, dropped].set(old[..., edge : self.slots], mode="drop")

        empty = due[:, None, None] & (jnp.arange(slots) >= edge)
        return dataclasses.replace(
            self,
            keys=pool(self.keys),
            values=pool(self.values),
            positions=jnp.where(empty, -1, moved(self.positions)),
            mass=moved(self.mass),
        )
