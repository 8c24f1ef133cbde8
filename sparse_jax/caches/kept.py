"""A prompt that is compressed once, at its end: what `SnapKV` and `PyramidKV` do.

While the prompt comes in, everything is held, as in `Dense`, and each layer's latest queries
besides. `finish_prefill` chooses the tokens to keep, for every KV head by itself, and moves them
into pools of their own size. Whatever comes later, of an answer or of further turns, is appended
behind them and stays. Keys carry the RoPE of their true positions, and slots are in the order of
positions, so that causal attention over the filled slots is attention over what is held.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import (
    append_tokens,
    decode_attention,
    new_pages,
    prefill_attention,
    read_slots,
    slot_attention,
)
from sparse_jax.caches.base import Projections, Span, bytes_of, promised_bytes
from sparse_jax.caches.budgets import Budget, most_tokens, tokens_of
from sparse_jax.caches.choosing import (
    all_positions,
    best_positions,
    recent_mass,
    remember_queries,
)
from sparse_jax.caches.dense import Dense, append_to_layer
from sparse_jax.caches.layers import (
    check_int,
    new_pools,
    page_layout,
    query_positions,
    with_layer,
)
from sparse_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptState:
    """A prompt so far: all its tokens in contiguous pages, and its latest queries."""

    keys: tuple[Float[Array, "N P D"], ...]  # L of them, rotated; slot p holds position p
    values: tuple[Float[Array, "N P D"], ...]
    queries: tuple[Float[Array, "B W H D"], ...]  # rotated; position p stands at p % W
    lengths: Int32[Array, " B"]
    capacity: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptState:
    """What is kept of a prompt, in order, and behind it every later token."""

    keys: tuple[Float[Array, "N P D"], ...]  # L of them, rotated
    values: tuple[Float[Array, "N P D"], ...]
    positions: tuple[Int32[Array, "B K M"], ...]  # of the prompt's tokens; -1 behind them
    dropped: Int32[Array, "L B"]  # tokens, of each head
    lengths: Int32[Array, " B"]


class KeptMethod:
    """The cache protocol for prompts that are compressed once."""

    window: int
    sinks: int
    pool: int

    def budgets(self, config: ModelConfig, capacity: int) -> tuple[Budget, ...]:
        """What each layer may keep of a prompt."""
        raise NotImplementedError

    def init(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> PromptState:
        self.budgets(config, capacity)  # refuses what doesn't fit the model
        shape = (batch, min(self.window, capacity), config.num_heads, config.head_dim)
        return PromptState(
            keys=new_pools(config, batch, capacity, dtype),
            values=new_pools(config, batch, capacity, dtype),
            queries=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
            lengths=jnp.zeros(batch, jnp.int32),
            capacity=capacity,
        )

    def prefill(
        self,
        config: ModelConfig,
        state: PromptState | KeptState,
        layer: int,
        projected: Projections,
        span: Span,
    ) -> tuple[Float[Array, "B T H D"], PromptState | KeptState]:
        if isinstance(state, PromptState):
            state = _with_queries(state, layer, projected, span)
            return Dense().prefill(config, state, layer, projected, span)  # type: ignore[arg-type]
        state, slots = _append(state, layer, projected, span)
        limit = config.windows[layer]
        if limit is not None:
            return _attend_limited(state, layer, projected.query, span, limit), state
        out, _ = prefill_attention(
            projected.query,
            state.keys[layer],
            state.values[layer],
            slots,
            span.counts,
            kv_heads=config.num_kv_heads,
        )
        return out, state

    def decode(
        self,
        config: ModelConfig,
        state: PromptState | KeptState,
        layer: int,
        projected: Projections,
        span: Span,
    ) -> tuple[Float[Array, "B 1 H D"], PromptState | KeptState]:
        if isinstance(state, PromptState):
            state = _with_queries(state, layer, projected, span)
            return Dense().decode(config, state, layer, projected, span)  # type: ignore[arg-type]
        state, slots = _append(state, layer, projected, span)
        limit = config.windows[layer]
        if limit is not None:
            return _attend_limited(state, layer, projected.query, span, limit), state
        out, _ = decode_attention(
            projected.query[:, 0],
            state.keys[layer],
            state.values[layer],
            slots + span.counts,
            kv_heads=config.num_kv_heads,
        )
        return out[:, None], state

    def advance(
        self, config: ModelConfig, state: PromptState | KeptState, counts: Int32[Array, " B"]
    ) -> PromptState | KeptState:
        return dataclasses.replace(state, lengths=state.lengths + counts)

    def finish_prefill(
        self, config: ModelConfig, state: PromptState | KeptState, room: int
    ) -> KeptState:
        """Compresses the first prompt, and leaves `room` slots behind what is kept of it (never
        more slots than the prompt's own). Later prompts stay whole: a second call changes nothing.
        """
        if isinstance(state, KeptState):
            return state
        keys, values, positions, dropped = [], [], [], []
        for layer, budget in enumerate(self.budgets(config, state.capacity)):
            most = most_tokens(budget, state.capacity, self._least)
            counts = tokens_of(budget, state.lengths, self._least)
            chosen = self._choose(config, state, layer, most, counts)
            old = state.keys[layer], state.values[layer]
            if most < state.capacity:
                old = [_moved(pool, chosen, counts, most + room) for pool in old]
            keys.append(old[0])
            values.append(old[1])
            positions.append(chosen)
            dropped.append(state.lengths - counts)
        return KeptState(
            keys=tuple(keys),
            values=tuple(values),
            positions=tuple(positions),
            dropped=jnp.stack(dropped),
            lengths=state.lengths,
        )

    def room(self, state: PromptState | KeptState) -> Int32[Array, " B"]:
        """Tokens that each row can still take."""
        if isinstance(state, PromptState):
            return state.capacity - state.lengths
        slots = [_slots(state, layer) for layer in range(len(state.keys))]
        return (jnp.array(slots, jnp.int32)[:, None] + state.dropped - state.lengths).min(0)

    def nbytes(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> int:
        """Of the state that the prompt is read into."""
        return promised_bytes(self, config, batch, capacity, dtype)  # type: ignore[arg-type]

    def kept_bytes(
        self, config: ModelConfig, batch: int, capacity: int, room: int, dtype: Any
    ) -> int:
        """Of the state that `finish_prefill` leaves, with `room` tokens to come."""
        return bytes_of(
            lambda: self.finish_prefill(config, self.init(config, batch, capacity, dtype), room)
        )

    @property
    def _least(self) -> int:
        return self.sinks + self.window

    def _check_kept(self) -> None:
        name = type(self).__name__
        check_int(name, 1, window=self.window, pool=self.pool)
        check_int(name, 0, sinks=self.sinks)
        if self.pool % 2 == 0:
            raise ValueError(
                f"{name}: pool = {self.pool}; give an odd number: a token and its neighbours, as "
                "many on each side"
            )

    def _choose(
        self, config: ModelConfig, state: PromptState, layer: int, most: int, counts
    ) -> Int32[Array, "B K M"]:
        if most == state.capacity:
            return all_positions(state.lengths, config.num_kv_heads, most)
        mass = recent_mass(
            state.queries[layer],
            state.keys[layer],
            state.values[layer],
            state.lengths,
            kv_heads=config.num_kv_heads,
            limit=config.windows[layer],
        )
        return best_positions(
            mass,
            state.lengths,
            counts,
            most=most,
            window=self.window,
            sinks=self.sinks,
            pool=self.pool,
        )


def held_positions(state: KeptState, layer: int) -> Int32[Array, "B K S"]:
    """Where the token in each slot of a layer stands; -1 for an empty slot."""
    kept = state.positions[layer]
    slots = _slots(state, layer)
    kept = jnp.pad(kept, ((0, 0), (0, 0), (0, slots - kept.shape[2])), constant_values=-1)
    slot = jnp.arange(slots, dtype=jnp.int32)
    dropped = state.dropped[layer][:, None, None]
    later = jnp.where(slot + dropped < state.lengths[:, None, None], slot + dropped, -1)
    return jnp.where(kept >= 0, kept, later)


def _slots(state: KeptState, layer: int) -> int:
    """S: slots of each head of each row, rounded up to whole pages."""
    batch, kv_heads, _ = state.positions[layer].shape
    pages, size, _ = state.keys[layer].shape
    return pages // (batch * kv_heads) * size


def _with_queries(
    state: PromptState, layer: int, projected: Projections, span: Span
) -> PromptState:
    ring = remember_queries(state.queries[layer], projected.query, span)
    return dataclasses.replace(state, queries=with_layer(state.queries, layer, ring))


def _moved(
    pool: Float[Array, "N P D"],
    chosen: Int32[Array, "B K M"],
    counts: Int32[Array, " B"],
    slots: int,
) -> Float[Array, "N P D"]:
    """The chosen tokens in order, in a pool with `slots` slots, or in place if it has no more."""
    batch, kv_heads, _ = chosen.shape
    pages, size, dim = pool.shape
    kept = read_slots(pool, chosen)
    count, new_size = page_layout(slots)
    if count * new_size < pages // (batch * kv_heads) * size:
        pool = new_pages(batch, kv_heads, count, new_size, dim, pool.dtype)
    return append_tokens(pool, kept, jnp.zeros_like(counts), counts)


def _append(
    state: KeptState, layer: int, projected: Projections, span: Span
) -> tuple[KeptState, Int32[Array, " B"]]:
    """The state with a chunk behind what a layer holds, and the slot of its first token."""
    slots = span.starts - state.dropped[layer]
    return append_to_layer(state, layer, projected, Span(slots, span.counts)), slots


def _attend_limited(
    state: KeptState, layer: int, query: Array, span: Span, limit: int
) -> Float[Array, "B T H D"]:
    """In a layer whose own window is `limit` tokens: by positions, not by slots."""
    tokens = query.shape[1]
    at = query_positions(span.starts, tokens)
    valid = jnp.arange(tokens) < span.counts[:, None]
    seen = dataclasses.replace(state, lengths=span.starts + span.counts)
    out, _ = slot_attention(
        query,
        state.keys[layer],
        state.values[layer],
        held_positions(seen, layer),
        at - limit + 1,
        jnp.where(valid, at, -1),
        kv_heads=state.positions[layer].shape[1],
    )
    return out
