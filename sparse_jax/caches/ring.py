"""Sinks, a ring of the latest tokens, and strided tokens behind it: what `Window` and `Strided` do.

A layer's slots, all heads alike: `sinks` slots for the first tokens, a ring of `window` slots for
the latest ones (position p stands in slot `sinks + (p - sinks) % window`), and one for each
multiple of the stride that has left the window. Filled slots are always a prefix. Keys carry the
RoPE of their true positions, so decode is dense attention over that prefix, whatever its order.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import (
    AttentionOutput,
    append_tokens,
    decode_attention,
    gather_tokens,
    merge_attention,
    prefill_attention,
    read_slots,
    slot_attention,
    write_slots,
)
from sparse_jax.caches.base import (
    Projections,
    Span,
    context_limit,
    promised_bytes,
)
from sparse_jax.caches.layers import (
    check_dtypes,
    new_pools,
    query_positions,
    to_pages,
    with_layer,
)
from sparse_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RingState:
    """Contiguous pages (`pallas_kernels.pages`) of kept tokens, for every layer."""

    keys: tuple[Float[Array, "N P D"], ...]  # L of them, rotated
    values: tuple[Float[Array, "N P D"], ...]
    lengths: Int32[Array, " B"]


class _Slots(NamedTuple):
    """Tokens in pages, and where the one in each slot stands: -1 for an empty slot."""

    keys: Float[Array, "N P D"]
    values: Float[Array, "N P D"]
    positions: Int32[Array, "B S"]
    kv_heads: int

    @classmethod
    def of(cls, tokens: list[Array], positions: Int32[Array, "B S"]) -> "_Slots":
        """Of keys and values [B, S, K, D]."""
        keys, values = (to_pages(each) for each in tokens)
        batch, slots, kv_heads, _ = tokens[0].shape
        spare = keys.shape[0] * keys.shape[1] // (batch * kv_heads) - slots
        positions = jnp.pad(positions, ((0, 0), (0, spare)), constant_values=-1)
        return cls(keys, values, positions, kv_heads)

    def attend(self, query, first, last) -> AttentionOutput:
        return slot_attention(
            query,
            self.keys,
            self.values,
            self.positions[:, None],
            first,
            last,
            kv_heads=self.kv_heads,
        )


class RingMethod:
    """The cache protocol for kept positions that `window`, `sinks` and `stride` fix."""

    window: int
    sinks: int
    stride: int | None

    def init(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> RingState:
        if self.window > context_limit(config):
            raise ValueError(
                f"window = {self.window} tokens, but the model's context is "
                f"{context_limit(config)}; give a smaller window, or use Dense()"
            )
        slots = min(self.sinks + self.window, capacity) + self._strided(capacity)
        return RingState(
            keys=new_pools(config, batch, slots, dtype),
            values=new_pools(config, batch, slots, dtype),
            lengths=jnp.zeros(batch, jnp.int32),
        )

    def prefill(
        self,
        config: ModelConfig,
        state: RingState,
        layer: int,
        projected: Projections,
        span: Span,
    ) -> tuple[Float[Array, "B T H D"], RingState]:
        check_dtypes(projected, state.keys[layer].dtype)
        pools = state.keys[layer], state.values[layer]
        fresh = projected.key, projected.value
        batch, _, kv_heads, _ = projected.key.shape
        held = [gather_tokens(pool, batch, kv_heads) for pool in pools]
        # What the chunk can see: the slots before it, and itself.
        both = [jnp.concatenate(each, axis=1) for each in zip(held, fresh, strict=True)]
        query, limit = projected.query, config.windows[layer]
        at = query_positions(span.starts, query.shape[1])
        slots = _Slots.of(both, self._chunk_positions(span, held[0].shape[1], query.shape[1]))
        if limit is not None:
            out = self._attend_limited(query, slots, at, limit)
        else:
            out = self._attend_near(query, both, span)
            if self.stride is not None:
                out = merge_attention(out, self._attend_far(query, slots, at, None))
        source = self._sources(span, held[0].shape[1])
        after = [
            to_pages(jnp.take_along_axis(each, source[:, :, None, None], axis=1), pool.shape[1])
            for each, pool in zip(both, pools, strict=True)
        ]
        return out.out, _replaced(state, layer, *after)

    def decode(
        self,
        config: ModelConfig,
        state: RingState,
        layer: int,
        projected: Projections,
        span: Span,
    ) -> tuple[Float[Array, "B 1 H D"], RingState]:
        check_dtypes(projected, state.keys[layer].dtype)
        kv_heads = config.num_kv_heads
        lengths = span.starts + span.counts
        slot = self._slot(span.starts)
        leaving = span.starts - self.window  # of the window, when this token comes

        def add(pool, new):
            if self.stride is not None:
                kept = (span.counts > 0) & (leaving >= self.sinks) & (leaving % self.stride == 0)
                each_head = jnp.broadcast_to(slot[:, None, None], (slot.shape[0], kv_heads, 1))
                old = read_slots(pool, each_head)  # the token that the new one replaces
                far = jnp.where(kept, self._far(leaving), -1)
                pool = write_slots(pool, old, jnp.broadcast_to(far[:, None, None], each_head.shape))
            return append_tokens(pool, new, slot, span.counts)

        keys = add(state.keys[layer], projected.key)
        values = add(state.values[layer], projected.value)
        state = _replaced(state, layer, keys, values)
        limit = config.windows[layer]
        if limit is None:
            out, _ = decode_attention(
                projected.query[:, 0], keys, values, self._filled(lengths), kv_heads=kv_heads
            )
            return out[:, None], state
        count = keys.shape[0] * keys.shape[1] // (lengths.shape[0] * kv_heads)
        slots = _Slots(keys, values, self._positions(lengths, count), kv_heads)
        at = (lengths - 1)[:, None]
        return self._attend_limited(projected.query, slots, at, limit).out, state

    def advance(
        self, config: ModelConfig, state: RingState, counts: Int32[Array, " B"]
    ) -> RingState:
        return dataclasses.replace(state, lengths=state.lengths + counts)

    def finish_prefill(self, config: ModelConfig, state: RingState, room: int) -> RingState:
        return state

    def nbytes(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> int:
        return promised_bytes(self, config, batch, capacity, dtype)  # type: ignore[arg-type]

    # Where tokens stand.

    @property
    def _near(self) -> int:
        return self.sinks + self.window

    def _strided(self, length: Any) -> Any:
        """Multiples of the stride behind the sinks that have left the window of `length` tokens."""
        if self.stride is None:
            return 0
        most = jnp.maximum if isinstance(length, jax.Array) else max
        return most(0, -(-(length - self.window) // self.stride) - -(-self.sinks // self.stride))

    def _slot(self, position: Array) -> Array:
        """Where a token stands while it is near."""
        ring = self.sinks + (position - self.sinks) % self.window
        return jnp.where(position < self._near, position, ring)

    def _far(self, position: Array) -> Array:
        """Where a multiple of the stride stands once it has left the window."""
        assert self.stride is not None
        return self._near + position // self.stride - -(-self.sinks // self.stride)

    def _filled(self, lengths: Int32[Array, " B"]) -> Int32[Array, " B"]:
        """Slots in use: a prefix."""
        return jnp.minimum(lengths, self._near) + self._strided(lengths)

    def _positions(self, lengths: Int32[Array, " B"], slots: int) -> Int32[Array, "B S"]:
        """Of the token in each slot, after `lengths` tokens; -1 for an empty slot."""
        slot = jnp.arange(slots, dtype=jnp.int32)
        newest = lengths[:, None] - 1
        round_ = (newest - slot) // self.window  # times that the ring has come round to the slot
        ring = slot + jnp.maximum(round_, 0) * self.window
        position = jnp.where(slot < self.sinks, slot, ring)
        if self.stride is not None:
            far = (slot - self._near + -(-self.sinks // self.stride)) * self.stride
            position = jnp.where(slot < self._near, position, far)
        return jnp.where(slot < self._filled(lengths)[:, None], position, -1)

    def _sources(self, span: Span, slots: int) -> Int32[Array, "B S"]:
        """For each slot after a chunk, where its token stands among slots before and chunk."""
        after = self._positions(span.starts + span.counts, slots)
        slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), after.shape)
        before = self._positions(span.starts, slots)
        moved = self._slot(jnp.maximum(after, 0))  # a strided token that was near before
        old = jnp.where(before == after, slot, moved)
        return jnp.where(
            after < 0,
            slot,
            jnp.where(after < span.starts[:, None], old, slots + after - span.starts[:, None]),
        )

    # Attention of a chunk over the slots before it and over itself.

    def _attend_near(self, query, both, span: Span) -> AttentionOutput:
        """Sinks and window, in positions that are shifted together: first the sinks, then the
        ring in order, then the chunk. Distances within the window are the true ones."""
        tokens = query.shape[1]
        slots = both[0].shape[1] - tokens
        held = jnp.minimum(span.starts, self._near)[:, None]
        place = jnp.arange(min(self._near, slots) + tokens, dtype=jnp.int32)
        position = place + jnp.where(place < self.sinks, 0, span.starts[:, None] - held)
        index = jnp.where(place < held, self._slot(position), slots + place - held)
        index = jnp.minimum(index, slots + tokens - 1)
        keys, values = (
            to_pages(jnp.take_along_axis(each, index[:, :, None, None], axis=1)) for each in both
        )
        return prefill_attention(
            query,
            keys,
            values,
            held[:, 0],
            span.counts,
            kv_heads=both[0].shape[2],
            window=self.window,
            sinks=self.sinks,
        )

    def _attend_far(self, query, slots: "_Slots", at, limit: int | None) -> AttentionOutput:
        """What is kept though it has left the window, and that the model's own window allows."""
        kept = self._is_kept(slots.positions, sinks=limit is not None)
        kept = slots._replace(positions=jnp.where(kept, slots.positions, -1))
        first = jnp.zeros_like(at) if limit is None else at - limit + 1
        return kept.attend(query, first, at - self.window)

    def _attend_limited(self, query, slots: "_Slots", at, limit: int) -> AttentionOutput:
        """All of it, for a layer whose own window is `limit` tokens."""
        near = slots.attend(query, at - min(limit, self.window) + 1, at)
        if limit <= self.window:
            return near
        return merge_attention(near, self._attend_far(query, slots, at, limit))

    def _chunk_positions(self, span: Span, slots: int, tokens: int) -> Int32[Array, "B S"]:
        """Of the tokens in the slots before a chunk, and of the chunk's."""
        at = query_positions(span.starts, tokens)
        chunk = jnp.where(jnp.arange(tokens) < span.counts[:, None], at, -1)
        return jnp.concatenate([self._positions(span.starts, slots), chunk], axis=1)

    def _is_kept(self, position: Array, sinks: bool) -> Bool[Array, "B S"]:
        kept = (position < self.sinks) if sinks else jnp.zeros(position.shape, bool)
        if self.stride is not None:
            kept |= (position >= self.sinks) & (position % self.stride == 0)
        return kept


def _replaced(state: RingState, layer: int, keys: Array, values: Array) -> RingState:
    return dataclasses.replace(
        state,
        keys=with_layer(state.keys, layer, keys),
        values=with_layer(state.values, layer, values),
    )
