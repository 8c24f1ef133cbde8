"""Bytes that decode attention must move, and bytes that the kernels do move.

Decode is bound by device memory, so this ratio bounds what a kernel can reach. Counted is what
crosses device memory. The partial results of splits are not among it: they are written and read
back at once, within half of the second-level cache, or come to less than a twentieth of what is
needed (`partials` is their size; tests/test_traffic.py holds the default tiles to that).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from pallas_kernels.page_lists import list_pages
from pallas_kernels.patterns import Pattern


@dataclasses.dataclass(frozen=True)
class Stored:
    """How keys and values lie in the pool.

    Attributes:
        dim, size: D, P.
        bits: of a number, 16, 8 or 4.
        group: numbers that share a scale and an offset (16 bits each); None where none do.
    """

    dim: int
    size: int
    bits: int = 16
    group: int | None = None

    @property
    def token_bytes(self) -> float:
        """A key and a value, with their share of scales and offsets."""
        each = self.bits / 8 + (4 / self.group if self.group else 0)
        return 2 * self.dim * each


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one decode step of one layer.

    Attributes:
        needed: keys and values of the visible tokens, the query and the output.
        moved: the listed pages as a whole, page lists, the query, the output.
        partials: results of splits, written and read back.
    """

    needed: float
    moved: float
    partials: float

    @property
    def ratio(self) -> float:
        return self.moved / self.needed


def decode_traffic(
    lengths: Int[np.ndarray, " B"],
    stored: Stored,
    pattern: Pattern,
    *,
    heads: int,
    kv_heads: int,
    count: int,
    selected: Int[np.ndarray, "B K M"] | None = None,
    splits: int = 1,
    rows: int = 16,
) -> Traffic:
    """The traffic of `decode_attention` for rows of these lengths.

    Args:
        lengths: tokens each row holds.
        stored: the pool.
        pattern: visible positions.
        heads, kv_heads, count: H, K, C.
        selected: chosen logical pages.
        splits: blocks that share a KV head; each writes its own result.
        rows: query rows that a block writes.
    """
    batch, size = len(lengths), stored.size
    pages = list_pages(
        jnp.asarray(lengths, jnp.int32),
        pattern,
        kv_heads=kv_heads,
        pages=batch * kv_heads * count,
        size=size,
        table=None,
        selected=None if selected is None else jnp.asarray(selected, jnp.int32),
    )
    logical = np.asarray(pages.logical)
    read = int((logical >= 0).sum()) * size
    slots = np.arange(count * size)
    sees = np.asarray(pattern.visible(slots, np.asarray(lengths)[:, None] - 1))  # type: ignore
    tokens = 0
    for row in range(batch):
        for head in range(kv_heads):
            listed = np.isin(slots // size, logical[row, head])
            tokens += int((sees[row] & listed).sum())
    ends = 2 * 2 * batch * heads * stored.dim  # query in, output out, 16 bits each
    lists = 2 * 4 * logical.size + 4 * batch * (1 + kv_heads)
    partial = batch * kv_heads * splits * rows * (stored.dim + 1) * 4
    return Traffic(
        needed=tokens * stored.token_bytes + ends,
        moved=read * stored.token_bytes + ends + lists,
        partials=2 * partial,
    )


def page_scores_bytes(batch: int, kv_heads: int, count: int, dim: int) -> int:
    """Bytes that choosing pages moves: every summary once (16 bits), a float32 score a page."""
    return batch * kv_heads * count * (2 * dim * 2 + 4)
