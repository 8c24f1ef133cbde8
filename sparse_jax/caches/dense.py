"""Every key and value of every token, in pages: the baseline and the oracle of all methods."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import append_tokens, decode_attention, prefill_attention
from sparse_jax.caches.base import Projections, Span
from sparse_jax.caches.layers import (
    LONG_PAGE,
    check_dtypes,
    check_int,
    new_pools,
    page_layout,
    with_layer,
)
from sparse_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseState:
    """Contiguous pages (`pallas_kernels.pages`) for every layer.

    A layer's pages are an array of their own: slicing one layer out of a stacked cache costs
    XLA's CPU back end a copy of that layer at every step.
    """

    keys: tuple[Float[Array, "N P D"], ...]  # L of them, rotated
    values: tuple[Float[Array, "N P D"], ...]
    lengths: Int32[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Dense:
    """Keeps and attends to all tokens (within a layer's sliding window, if the model has one).

    Attributes:
        page: tokens a page at the most; shorter ones where they waste less (`page_layout`).
    """

    page: int = LONG_PAGE

    def __post_init__(self):
        check_int("Dense", 1, page=self.page)

    def init(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> DenseState:
        return DenseState(
            keys=new_pools(config, batch, capacity, dtype, self.page),
            values=new_pools(config, batch, capacity, dtype, self.page),
            lengths=jnp.zeros(batch, jnp.int32),
        )

    def prefill(
        self,
        config: ModelConfig,
        state: DenseState,
        layer: int,
        projected: Projections,
        span: Span,
    ) -> tuple[Float[Array, "B T H D"], DenseState]:
        state = append_to_layer(state, layer, projected, span)
        out, _ = prefill_attention(
            projected.query,
            state.keys[layer],
            state.values[layer],
            span.starts,
            span.counts,
            kv_heads=config.num_kv_heads,
            window=config.windows[layer],
        )
        return out, state

    def decode(
        self,
        config: ModelConfig,
        state: DenseState,
        layer: int,
        projected: Projections,
        span: Span,
    ) -> tuple[Float[Array, "B 1 H D"], DenseState]:
        state = append_to_layer(state, layer, projected, span)
        out, _ = decode_attention(
            projected.query[:, 0],
            state.keys[layer],
            state.values[layer],
            span.starts + span.counts,
            kv_heads=config.num_kv_heads,
            window=config.windows[layer],
        )
        return out[:, None], state

    def advance(
        self, config: ModelConfig, state: DenseState, counts: Int32[Array, " B"]
    ) -> DenseState:
        return dataclasses.replace(state, lengths=state.lengths + counts)

    def finish_prefill(self, config: ModelConfig, state: DenseState, room: int) -> DenseState:
        return state

    def truncate(self, state: DenseState, lengths: Int32[Array, " B"]) -> DenseState:
        return dataclasses.replace(state, lengths=lengths)

    def nbytes(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> int:
        count, size = page_layout(capacity, self.page)
        per_slot = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return batch * count * size * per_slot * jnp.dtype(dtype).itemsize + 4 * batch


def append_to_layer(state: Any, layer: int, projected: Projections, span: Span) -> Any:
    """The state, of `Dense` or alike, with a chunk's keys and values in one layer's pages."""
    check_dtypes(projected, state.keys[layer].dtype)
    return dataclasses.replace(
        state,
        keys=with_layer(state.keys, layer, append_tokens(state.keys[layer], projected.key, *span)),
        values=with_layer(
            state.values, layer, append_tokens(state.values[layer], projected.value, *span)
        ),
    )
