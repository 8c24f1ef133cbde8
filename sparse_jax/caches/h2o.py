"""Heavy hitters and the latest tokens: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference
of Large Language Models", arXiv 2306.14048."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import (
    attention_mass,
    decode_attention,
    prefill_attention,
    slot_attention,
)
from sparse_jax.caches.base import Projections, Span, promised_bytes
from sparse_jax.caches.budgets import (
    Budgets,
    check_budgets,
    check_layers,
    most_tokens,
    of_layer,
)
from sparse_jax.caches.dense import Dense
from sparse_jax.caches.held import Held
from sparse_jax.caches.layers import (
    check_dtypes,
    check_int,
    new_pools,
    page_layout,
    query_positions,
    with_layer,
)
from sparse_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class H2OState:
    """Held tokens in contiguous pages, in no order; in each head of a row the first slots are full.

    A layer whose slots are as many as the capacity holds every token at its own position, and
    keeps no `positions` and no `mass`.
    """

    keys: tuple[Float[Array, "N P D"], ...]  # L of them, rotated
    values: tuple[Float[Array, "N P D"], ...]
    positions: tuple[Int32[Array, "B K S"] | None, ...]  # -1 for an empty slot
    mass: tuple[Float32[Array, "B K S"] | None, ...]  # attention received so far
    lengths: Int32[Array, " B"]
    slots: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # that may be filled


@dataclasses.dataclass(frozen=True)
class H2O:
    """Never holds more than `budget` tokens: evicts those that got least attention so far.

    A token's mass is the attention that it got from all queries since it came, those of a KV
    head's group summed; each query weighs what is held when it comes. When the budget is full, the
    `interval` tokens of least mass go (of equals the earlier ones), for each KV head its own: from
    then on between budget - interval and budget are held. The first `sinks` tokens and the last
    `window` never go; what a layer's own window has left behind goes first. All of this happens at
    the same positions however a prompt is cut into chunks.

    Attributes:
        budget: tokens held, sinks and window included, or their share of the cache's capacity; a
            tuple has one for each layer.
        window: latest tokens kept.
        sinks: tokens at the start, kept for good.
        interval: tokens evicted at a time, and queries that a prompt goes through at a time.
    """

    budget: Budgets = 1024
    window: int = 256
    sinks: int = 4
    interval: int = 64

    def __post_init__(self):
        check_int("H2O", 1, window=self.window, interval=self.interval)
        check_int("H2O", 0, sinks=self.sinks)
        check_budgets("H2O", self.budget, self._least, "sinks + window + interval")

    def init(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> H2OState:
        check_layers("H2O", self.budget, config)
        slots = tuple(
            most_tokens(of_layer(self.budget, layer), capacity, self._least)
            for layer in range(config.num_layers)
        )
        keys, values = (new_pools(config, batch, slots, dtype) for _ in range(2))

        def each_slot(make):
            return tuple(
                make((batch, config.num_kv_heads, math.prod(page_layout(most))))
                if most < capacity
                else None
                for most in slots
            )

        return H2OState(
            keys=keys,
            values=values,
            positions=each_slot(lambda shape: jnp.full(shape, -1, jnp.int32)),
            mass=each_slot(lambda shape: jnp.zeros(shape, jnp.float32)),
            lengths=jnp.zeros(batch, jnp.int32),
            slots=slots,
        )

    def prefill(
        self, config: ModelConfig, state: H2OState, layer: int, projected: Projections, span: Span
    ) -> tuple[Float[Array, "B T H D"], H2OState]:
        check_dtypes(projected, state.keys[layer].dtype)
        held = self._held(state, layer)
        if held is None:
            return Dense().prefill(config, state, layer, projected, span)  # type: ignore[arg-type]
        batch, tokens = projected.query.shape[:2]
        if tokens == 1:
            return self.decode(config, state, layer, projected, span)
        size = min(tokens, self.interval)
        offset = jnp.arange(size, dtype=jnp.int32)
        rows = jnp.arange(batch)[:, None]

        def turn(carry):
            done, held, out = carry
            at = span.starts + done
            counts = jnp.minimum(span.counts - done, held.until_full(at))
            counts = jnp.minimum(counts, size)
            place = done[:, None] + offset
            # Past the end stands padding, which nothing looks at.
            index = jnp.minimum(place, tokens - 1)[:, :, None, None]
            part = projected._replace(
                query=jnp.take_along_axis(projected.query, index, axis=1),
                key=jnp.take_along_axis(projected.key, index, axis=1),
                value=jnp.take_along_axis(projected.value, index, axis=1),
            )
            new, held = self._step(config, layer, held, part, Span(at, counts))
            place = jnp.where(offset < counts[:, None], place, tokens)
            return done + counts, held, out.at[rows, place].set(new, mode="drop")

        carry = (jnp.zeros(batch, jnp.int32), held, jnp.zeros_like(projected.query))
        _, held, out = lax.while_loop(lambda carry: (carry[0] < span.counts).any(), turn, carry)
        return out, _with_held(state, layer, held)

    def decode(
        self, config: ModelConfig, state: H2OState, layer: int, projected: Projections, span: Span
    ) -> tuple[Float[Array, "B 1 H D"], H2OState]:
        check_dtypes(projected, state.keys[layer].dtype)
        held = self._held(state, layer)
        if held is None:
            return Dense().decode(config, state, layer, projected, span)  # type: ignore[arg-type]
        out, held = self._step(config, layer, held, projected, span)
        return out, _with_held(state, layer, held)

    def advance(self, config: ModelConfig, state: H2OState, counts: Int32[Array, " B"]) -> H2OState:
        return dataclasses.replace(state, lengths=state.lengths + counts)

    def finish_prefill(self, config: ModelConfig, state: H2OState, room: int) -> H2OState:
        return state

    def nbytes(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> int:
        return promised_bytes(self, config, batch, capacity, dtype)  # type: ignore[arg-type]

    @property
    def _least(self) -> int:
        return self.sinks + self.window + self.interval

    def _step(
        self, config: ModelConfig, layer: int, held: Held, projected: Projections, span: Span
    ) -> tuple[Float[Array, "B T H D"], Held]:
        """Takes in tokens up to the next burst, after the burst that is due before the first."""
        query, key, _, value = projected
        tokens, limit, kv_heads = query.shape[1], config.windows[layer], config.num_kv_heads
        due = (span.counts > 0) & held.is_full(span.starts)
        held = self._evict(held, due, span.starts, limit)
        filled = held.filled(span.starts)
        held = held.append(key, value, span)
        at = query_positions(span.starts, tokens)
        first = jnp.zeros_like(at) if limit is None else at - limit + 1
        last = jnp.where(jnp.arange(tokens) < span.counts[:, None], at, -1)
        if limit is not None:
            out, lse = slot_attention(
                query, held.keys, held.values, held.positions, first, last, kv_heads=kv_heads
            )
        elif tokens == 1:
            # A row without a token sees nothing, so that it adds no mass.
            lengths = jnp.where(span.counts > 0, filled + 1, 0)
            out, lse = decode_attention(
                query[:, 0], held.keys, held.values, lengths, kv_heads=kv_heads
            )
            out, lse = out[:, None], lse[:, None]
        else:
            # Causal by slots: what was held stands in front of the new tokens.
            out, lse = prefill_attention(
                query, held.keys, held.values, filled, span.counts, kv_heads=kv_heads
            )
        added = attention_mass(
            query, held.keys, lse, held.positions, first, last, kv_heads=kv_heads
        )
        return out, dataclasses.replace(held, mass=held.mass + added)

    def _evict(
        self, held: Held, due: Bool[Array, " B"], at: Int32[Array, " B"], limit: int | None
    ) -> Held:
        """In the rows that are due, the `interval` tokens of least mass go."""

        def evict(_, held: Held) -> Held:
            now = at[:, None, None]
            score = held.mass
            if limit is not None:  # no query will see these any more
                score = jnp.where(held.positions <= now - limit, -1.0, score)
            stays = (held.positions < self.sinks) | (held.positions >= now - self.window)
            # Empty slots have no mass that means anything, and are none to go.
            score = jnp.where(stays | (held.positions < 0), jnp.inf, score)
            slot = jnp.broadcast_to(jnp.arange(score.shape[2], dtype=jnp.int32), score.shape)
            _, _, order = lax.sort((score, held.positions, slot), num_keys=2)
            return held.without(order[..., : self.interval], due)

        # A loop of no turn or one: a `cond` would copy the pools.
        return lax.fori_loop(0, due.any().astype(jnp.int32), evict, held)

    def _held(self, state: H2OState, layer: int) -> Held | None:
        """A layer of the state; None where nothing ever goes."""
        positions, mass = state.positions[layer], state.mass[layer]
        if positions is None or mass is None:
            return None
        return Held(
            keys=state.keys[layer],
            values=state.values[layer],
            positions=positions,
            mass=mass,
            slots=state.slots[layer],
            interval=self.interval,
        )


def _with_held(state: H2OState, layer: int, held: Held) -> H2OState:
    return dataclasses.replace(
        state,
        keys=with_layer(state.keys, layer, held.keys),
        values=with_layer(state.values, layer, held.values),
        positions=with_layer(state.positions, layer, held.positions),
        mass=with_layer(state.mass, layer, held.mass),
    )
