"""Scores of pages and tokens on NVIDIA GPUs: Pallas Mosaic GPU, `mma.sync`, sm_80 and later.

One block of threads serves a share of one KV head's rows (page summaries, or keys). Rows go from
global memory straight into the left operand, 64 at a time, and the group's queries, 8 or 16 of
them, are the right one: each row is read once, whatever the group. Blocks stop at the row's
length, so that what lies behind it costs nothing.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.cards import Card
from pallas_kernels.mosaic_support import mosaic_card
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.topk.xla import signed_halves
from pallas_kernels.tuned import tiles_for

_HEADS = 8  # columns of one mma.sync tile
_MOST_HEADS = 16


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    Attributes:
        splits: blocks of threads that share one KV head of one sequence.
        rows: rows (pages or tokens) that a block multiplies at a time, a multiple of 16; for
            tokens it divides the page size.
    """

    splits: int
    rows: int


def unsupported_pages(query, summaries, *, kv_heads: int) -> str | None:
    """Why `page_scores` cannot serve these arrays; None where it can."""
    if summaries.shape[1] < 64:
        return f"scores 64 pages at a time; summaries {summaries.shape} have fewer"
    return _unsupported(query, kv_heads, step=8)


def unsupported_tokens(query, key_pages, *, kv_heads: int) -> str | None:
    """Why `token_scores` cannot serve these arrays; None where it can."""
    if isinstance(key_pages, QuantizedPages):
        return "scores plain pages, not quantised ones"
    if key_pages.shape[1] % 16:
        return f"needs a page size that is a multiple of 16, not {key_pages.shape[1]}"
    return _unsupported(query, kv_heads, step=16)


def _unsupported(query, kv_heads: int, *, step: int) -> str | None:
    _, heads, dim = query.shape
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, not {query.dtype}"
    if dim % step or dim > 256:
        return f"needs a head_dim that is a multiple of {step}, 256 at the most, not {dim}"
    if heads // kv_heads > _MOST_HEADS:
        return f"serves {_MOST_HEADS} query heads a KV head, not {heads // kv_heads}"
    return None


def candidate_tiles(
    card: Card, *, batch: int, kv_heads: int, count: int, dim: int, size: int | None = None
) -> list[Tiles]:
    """Tiles worth measuring, for what `default_tiles` takes."""
    found = []
    for rows in _row_counts(count, dim, size)[:3]:
        for blocks in (2, 4, 8):
            wanted = -(-blocks * card.processors // (batch * kv_heads))
            found.append(Tiles(max(1, min(wanted, -(-count // rows))), rows))
    return list(dict.fromkeys(found))


def default_tiles(
    card: Card, *, batch: int, kv_heads: int, count: int, dim: int, size: int | None = None
) -> Tiles:
    """Tiles that always work: 64 rows where they fit, four blocks of threads a processor.

    Args:
        card: the GPU.
        batch, kv_heads: B, K.
        count: rows that each KV head of each sequence has: pages, or positions.
        dim: width of a row: 2 D for pages, D for tokens.
        size: tokens a page; None for pages, any 64 of which lie side by side.
    """
    rows = _row_counts(count, dim, size)[0]
    wanted = -(-4 * card.processors // (batch * kv_heads))
    return Tiles(max(1, min(wanted, -(-count // rows))), rows)


def _row_counts(count: int, dim: int, size: int | None) -> list[int]:
    """Rows that a block can take at a time, the likely best first."""
    fitting = (
        rows for rows in (64, 32, 128, 48, 16) if rows <= count and (size or rows) % rows == 0
    )
    # 16-bit pairs of the rows in each thread: 255 registers hold them and all the rest.
    return [rows for rows in fitting if rows * dim // (64 * _row_warps(rows)) <= 128]


def page_scores(
    query: Float[Array, "B H D"],
    summaries: Float[Array, "BK C 2D"],
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    size: int,
    tiles: Tiles | None = None,
) -> Float32[Array, "B K C"]:
    """See `pallas_kernels.topk.api.page_scores`; `unsupported_pages` says what is served."""
    batch, _, dim = query.shape
    _, count, width = summaries.shape
    if tiles is None:
        tiles = tiles_for(
            _card(), "page_scores", default_tiles,
            batch=batch, kv_heads=kv_heads, count=count, dim=width, size=None,
        )  # fmt: skip
    rows, splits = _checked(tiles, fits=tiles.rows <= count)
    steps = -(-count // rows)
    share = -(-steps // splits)
    right = _columns(signed_halves(query), kv_heads, rows)
    layouts = _layouts(query.dtype, rows)

    def score_pages(lengths_ref, right_ref, summaries_ref, out_ref):
        row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
        needed = pl.cdiv(pl.cdiv(lengths_ref[row], size), rows)
        first = split * share
        columns = plgpu.load(right_ref.at[row, head].T, layout=layouts.right, optimized=False)

        @pl.loop(first, jnp.minimum(jnp.minimum(first + share, steps), needed))
        def _(step):
            # The last step begins early rather than reading past the end.
            start = jnp.minimum(step * rows, count - rows)
            source = summaries_ref.at[row * kv_heads + head, pl.ds(start, rows)]
            best = layouts.best(source, columns)
            plgpu.store(out_ref.at[row, head, step], best * dim**-0.5, optimized=False)

    blocks = plgpu.kernel(
        score_pages,
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, steps, rows), jnp.float32),
        grid=(batch, kv_heads, splits),
        grid_names=("row", "head", "split"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(lengths, right, summaries)
    whole = blocks[:, :, : steps - 1].reshape(batch, kv_heads, -1)
    scores = jnp.concatenate([whole, blocks[:, :, -1, steps * rows - count :]], 2)
    return jnp.where(jnp.arange(count) * size < lengths[:, None, None], scores, -jnp.inf)


def token_scores(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"],
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    table: Int32[Array, "B K C"] | None,
    tiles: Tiles | None = None,
) -> Float32[Array, "B K S"]:
    """See `pallas_kernels.topk.api.token_scores`; `unsupported_tokens` says what is served."""
    batch, _, dim = query.shape
    pool, size, _ = key_pages.shape
    count = pool // (batch * kv_heads) if table is None else table.shape[2]
    if tiles is None:
        tiles = tiles_for(
            _card(), "token_scores", default_tiles,
            batch=batch, kv_heads=kv_heads, count=count * size, dim=dim, size=size,
        )  # fmt: skip
    rows, splits = _checked(tiles, fits=size % tiles.rows == 0)
    parts = size // rows  # steps a page
    share = -(-count * parts // splits)
    right = _columns(query, kv_heads, rows)
    layouts = _layouts(query.dtype, rows)

    def score_tokens(lengths_ref, *refs):
        *table_refs, right_ref, pages_ref, out_ref = refs
        row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
        needed = jnp.minimum(pl.cdiv(lengths_ref[row], rows), count * parts)
        first = split * share
        columns = plgpu.load(right_ref.at[row, head].T, layout=layouts.right, optimized=False)

        @pl.loop(first, jnp.minimum(first + share, needed))
        def _(step):
            page = step // parts
            start = step % parts * rows

            def score(physical):
                source = pages_ref.at[physical, pl.ds(start, rows)]
                best = layouts.best(source, columns)
                plgpu.store(out_ref.at[row, head, step], best * dim**-0.5, optimized=False)

            if not table_refs:
                score((row * count + page) * kv_heads + head)
            for table_ref in table_refs:
                physical = table_ref[row, head, page]
                pl.when((physical >= 0) & (physical < pool))(functools.partial(score, physical))

    tables = () if table is None else (table,)
    scores = plgpu.kernel(
        score_tokens,
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, count * parts, rows), jnp.float32),
        grid=(batch, kv_heads, splits),
        grid_names=("row", "head", "split"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(lengths, *tables, right, key_pages)
    # Blocks write nothing for pages that are not there.
    seen = jnp.arange(count * size) < lengths[:, None, None]
    if table is not None:
        seen &= jnp.repeat((table >= 0) & (table < pool), size, axis=2)
    return jnp.where(seen, scores.reshape(batch, kv_heads, -1), -jnp.inf)


@dataclasses.dataclass(frozen=True)
class _Layouts:
    """Register layouts of a product of `rows` rows with `columns` heads."""

    left: Any
    right: Any
    total: Any

    def best(self, source, columns):
        """The largest product of each row of a ref with the columns."""
        left = plgpu.load(source, layout=self.left, optimized=False)
        zero = jnp.zeros((left.shape[0], columns.shape[1]), jnp.float32)
        return plgpu.mma(plgpu.layout_cast(zero, self.total), left, columns).max(axis=1)


def _checked(tiles: Tiles, *, fits: bool) -> tuple[int, int]:
    """The rows and splits of tiles that can be run."""
    if tiles.rows < 16 or tiles.rows % 16 or not fits or tiles.splits < 1:
        raise ValueError(
            f"tiles = {tiles}: rows must be a multiple of 16, no more than the pages there are "
            "(page_scores) or a divisor of the page size (token_scores), and splits at least 1"
        )
    return tiles.rows, tiles.splits


def _row_warps(rows: int) -> int:
    """How many of the four warps lie along the rows; the others along the heads."""
    return next(warps for warps in (4, 2, 1) if rows % (16 * warps) == 0)


def _layouts(dtype, rows: int) -> _Layouts:
    warps = _row_warps(rows)
    return _Layouts(
        plgpu.Layout.MMA_LHS(dtype, m_warps=warps),
        plgpu.Layout.MMA_RHS(dtype, m_warps=warps),
        plgpu.Layout.MMA_ACC(dtype, m_warps=warps),
    )


def _columns(query: Float[Array, "B H D"], kv_heads: int, rows: int) -> Float[Array, "B K n D"]:
    """The heads of each group, repeated up to what the product needs: no change to a maximum."""
    batch, _, dim = query.shape
    grouped = query.reshape(batch, kv_heads, -1, dim)
    group = grouped.shape[2]
    step = _HEADS * 4 // _row_warps(rows)
    wanted = -(-group // step) * step
    return jnp.take(grouped, jnp.arange(wanted) % group, axis=2)


def _card() -> Card:
    card = mosaic_card()
    if isinstance(card, str):
        raise ValueError(f"a Mosaic kernel {card}")
    return card
