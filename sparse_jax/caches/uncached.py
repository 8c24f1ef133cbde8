"""No cache: a chunk attends to itself. It makes `forward`, the oracle of the cached paths."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels import reference_attention
from sparse_jax.caches.base import Projections, Span
from sparse_jax.config import ModelConfig

# Queries worked on at once: bounds the dense scores at B * H * 256 * T floats.
_BLOCK = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class UncachedState:
    """Nothing is kept but the lengths."""

    lengths: Int32[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Uncached:
    """Dense masks, one softmax, float32 products at full precision. Prefill of one chunk only."""

    def init(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> UncachedState:
        return UncachedState(lengths=jnp.zeros(batch, jnp.int32))

    def prefill(
        self,
        config: ModelConfig,
        state: UncachedState,
        layer: int,
        projected: Projections,
        span: Span,
    ) -> tuple[Float[Array, "B T H D"], UncachedState]:
        query, key, _, value = projected
        batch, tokens, heads, dim = query.shape
        block = min(_BLOCK, tokens)
        blocks = -(-tokens // block)
        window = config.windows[layer]
        padded = jnp.pad(query, ((0, 0), (0, blocks * block - tokens), (0, 0), (0, 0)))
        padded = padded.reshape(batch, blocks, block, heads, dim).swapaxes(0, 1)
        slot = jnp.arange(tokens)

        def one_block(inputs):
            index, queries = inputs
            at = (index * block + jnp.arange(block))[None, :, None]
            mask = (slot <= at) & (at < span.counts[:, None, None])
            if window is not None:
                mask &= slot > at - window
            return reference_attention(queries, key, value, mask).out

        out = lax.map(one_block, (jnp.arange(blocks), padded))
        out = out.swapaxes(0, 1).reshape(batch, blocks * block, heads, dim)
        return out[:, :tokens], state

    def decode(self, config, state, layer, projected, span):
        raise NotImplementedError("Uncached keeps no tokens to decode from; use Dense()")

    def advance(
        self, config: ModelConfig, state: UncachedState, counts: Int32[Array, " B"]
    ) -> UncachedState:
        return UncachedState(lengths=state.lengths + counts)

    def finish_prefill(self, config: ModelConfig, state: UncachedState, room: int) -> UncachedState:
        return state

    def nbytes(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> int:
        return 4 * batch
