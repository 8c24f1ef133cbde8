"""What the methods share: one pool of pages a layer, and its layout."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import new_pages
from sparse_jax.caches.base import Projections
from sparse_jax.config import ModelConfig

# The least page that a layout goes down to by itself: what one step of the GPU kernels takes.
_SHORT_PAGE = 64
# Beyond this, longer pages are no faster to read.
LONG_PAGE = 256


def page_layout(slots: int, page: int = LONG_PAGE) -> tuple[int, int]:
    """(pages, tokens a page) for a number of slots: pages of `page` tokens, or shorter ones.

    Long pages are faster to read, short ones waste less where the slots are no multiple of them:
    the page is halved, down to 64 tokens, until the rounding costs no more than a 32nd. Few slots
    have one page of their own size, rounded up to 16.
    """
    size = page
    while size % 2 == 0 and size // 2 >= _SHORT_PAGE and -slots % size > slots // 32:
        size //= 2
    size = min(size, -(-slots // 16) * 16)
    return -(-slots // size), size


def new_pools(
    config: ModelConfig,
    batch: int,
    slots: int | tuple[int, ...],
    dtype: Any,
    page: int = LONG_PAGE,
) -> tuple[jax.Array, ...]:
    """Zeroed pages for each sequence, one array a layer.

    slots: that each head has at the least, of every layer, or of each.
    """
    each = slots if isinstance(slots, tuple) else (slots,) * config.num_layers
    return tuple(
        new_pages(batch, config.num_kv_heads, *page_layout(many, page), config.head_dim, dtype)
        for many in each
    )


def with_layer(layers: tuple, layer: int, new: Any) -> tuple:
    """The tuple with one layer's entry replaced."""
    return (*layers[:layer], new, *layers[layer + 1 :])


def check_dtypes(projected: Projections, dtype: Any) -> None:
    """Demands keys and values in the cache's dtype: nothing is cast on the way in.

    Raises:
        TypeError: they are of another.
    """
    for name in ("key", "value"):
        given = getattr(projected, name).dtype
        if given != dtype:
            raise TypeError(
                f"the model's {name}s are {given}, the cache is {dtype}; make the cache in the "
                "parameters' dtype"
            )


def to_pages(tokens: Float[Array, "B S K D"], size: int | None = None) -> Float[Array, "N P D"]:
    """Tokens in order as contiguous pages of `size` tokens (None: of `page_layout`), with zeros
    behind them."""
    batch, slots, kv_heads, dim = tokens.shape
    if size is None:
        _, size = page_layout(slots)
    count = -(-slots // size)
    tokens = jnp.pad(tokens, ((0, 0), (0, count * size - slots), (0, 0), (0, 0)))
    apart = tokens.reshape(batch, count, size, kv_heads, dim).swapaxes(2, 3)
    return apart.reshape(-1, size, dim)


def query_positions(starts: Int32[Array, " B"], tokens: int) -> Int32[Array, "B T"]:
    """Where each token of a chunk stands."""
    return starts[:, None] + jnp.arange(tokens, dtype=jnp.int32)


def check_int(method: str, least: int, **fields: int) -> None:
    """Demands ints.

    Raises:
        ValueError: one is no int, or below `least`.
    """
    for name, value in fields.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{method}: {name} = {value!r}; give an int >= {least}")
