"""Which of the two decode kernels serves a card and arrays, and with which tiles."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int32

from pallas_kernels.cards import Card
from pallas_kernels.decode import mosaic_hopper, mosaic_portable
from pallas_kernels.mosaic_support import mosaic_card
from pallas_kernels.page_lists import list_pages
from pallas_kernels.patterns import Pattern
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.tuned import tiles_for
from pallas_kernels.types import AttentionOutput

Pages = Float[Array, "N P D"] | QuantizedPages


class Kernel(NamedTuple):
    """One of the kernels; what the members take stands in its module."""

    unsupported: Callable[..., str | None]
    tiles: Callable[..., Any]
    run: Callable[..., AttentionOutput]


def _portable_tiles(card: Card, key_pages: Pages, **shape):
    bits = key_pages.bits if isinstance(key_pages, QuantizedPages) else 16
    return tiles_for(card, "decode_portable", mosaic_portable.default_tiles, **shape, bits=bits)


def _hopper_tiles(card: Card, key_pages: Pages, **shape):
    del key_pages
    return tiles_for(card, "decode_hopper", mosaic_hopper.default_tiles, **shape)


PORTABLE = Kernel(
    mosaic_portable.unsupported,
    _portable_tiles,
    mosaic_portable.decode_attention,
)
HOPPER = Kernel(
    mosaic_hopper.unsupported,
    _hopper_tiles,
    mosaic_hopper.decode_attention,
)


def choose(
    query: Float[Array, "B H D"], key_pages: Pages, value_pages: Pages, *, kv_heads: int
) -> Kernel | str:
    """The kernel for the current card: Hopper's own where it serves the arrays, else the portable
    one; or why there is none."""
    card = mosaic_card()
    if isinstance(card, str):
        return card
    arrays = (query, key_pages, value_pages)
    if card.is_hopper and HOPPER.unsupported(*arrays, kv_heads=kv_heads) is None:
        return HOPPER
    return PORTABLE.unsupported(*arrays, kv_heads=kv_heads) or PORTABLE


def demand(
    kernel: Kernel, query, key_pages: Pages, value_pages: Pages, *, kv_heads: int
) -> Kernel | str:
    """The kernel that was asked for, or why it cannot run here."""
    card = mosaic_card()
    if isinstance(card, str):
        return card
    if kernel is HOPPER and not card.is_hopper:
        return f"needs a Hopper card; this one is {card.kind}, sm_{card.capability[0]}x"
    return kernel.unsupported(query, key_pages, value_pages, kv_heads=kv_heads) or kernel


def run(
    kernel: Kernel,
    query: Float[Array, "B H D"],
    key_pages: Pages,
    value_pages: Pages,
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    pattern: Pattern,
    table: Int32[Array, "B K C"] | None,
    selected: Int32[Array, "B K M"] | None,
) -> AttentionOutput:
    """See `pallas_kernels.decode.api.decode_attention`."""
    batch, heads, dim = query.shape
    count, size, _ = key_pages.shape
    pages = list_pages(
        lengths, pattern, kv_heads=kv_heads, pages=count, size=size, table=table, selected=selected
    )
    card = mosaic_card()
    assert isinstance(card, Card)
    tiles = kernel.tiles(
        card,
        key_pages,
        batch=batch,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        listed=max(1, pages.physical.shape[2]),
        size=size,
        dim=dim,
    )
    return kernel.run(
        query, key_pages, value_pages, pages, lengths,
        kv_heads=kv_heads, pattern=pattern, tiles=tiles,
    )  # fmt: skip
