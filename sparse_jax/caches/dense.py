"""Every key and value of every token, in pages: the baseline and the oracle of all methods."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import append_tokens, decode_attention, new_pages, prefill_attention
from sparse_jax.caches.base import Projections, Span
from sparse_jax.config import ModelConfig

# The least page that `Dense` goes down to by itself: what one step of the GPU kernels takes.
_SHORT_PAGE = 64


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
        page: tokens a page at the most. Long pages are faster to read, short ones waste less where
            the capacity is no multiple of them: the page is halved, down to 64 tokens, until the
            rounding costs no more than a 32nd of the capacity.
    """

    page: int = 256

    def __post_init__(self):
        if not isinstance(self.page, int) or self.page < 1:
            raise ValueError(f"page = {self.page!r}; give a number of tokens >= 1")

    def _layout(self, capacity: int) -> tuple[int, int]:
        """(pages a sequence, tokens a page); a short cache has one page of its own size."""
        size = self.page
        while size % 2 == 0 and size // 2 >= _SHORT_PAGE and -capacity % size > capacity // 32:
            size //= 2
        size = min(size, -(-capacity // 16) * 16)
        return -(-capacity // size), size

    def init(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> DenseState:
        count, size = self._layout(capacity)

        def pages():
            return new_pages(batch, config.num_kv_heads, count, size, config.head_dim, dtype)

        return DenseState(
            keys=tuple(pages() for _ in range(config.num_layers)),
            values=tuple(pages() for _ in range(config.num_layers)),
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
        state = _append(state, layer, projected, span)
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
        state = _append(state, layer, projected, span)
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

    def finish_prefill(self, config: ModelConfig, state: DenseState) -> DenseState:
        return state

    def truncate(self, state: DenseState, lengths: Int32[Array, " B"]) -> DenseState:
        return dataclasses.replace(state, lengths=lengths)

    def nbytes(self, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> int:
        count, size = self._layout(capacity)
        slots = batch * count * size
        per_slot = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return slots * per_slot * jnp.dtype(dtype).itemsize + 4 * batch


def _append(state: DenseState, layer: int, projected: Projections, span: Span) -> DenseState:
    """The state with the chunk's keys and values written into one layer."""
    for name in ("key", "value"):
        dtype = getattr(projected, name).dtype
        if dtype != state.keys[layer].dtype:
            raise TypeError(
                f"the model's {name}s are {dtype}, the cache is {state.keys[layer].dtype}; make "
                "the cache in the parameters' dtype"
            )
    keys, values = list(state.keys), list(state.values)
    keys[layer] = append_tokens(keys[layer], projected.key, *span)
    values[layer] = append_tokens(values[layer], projected.value, *span)
    return dataclasses.replace(state, keys=tuple(keys), values=tuple(values))
