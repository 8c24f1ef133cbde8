"""Causal attention of a chunk on Hopper GPUs: Pallas Mosaic GPU, TMA copies and `wgmma`.

The loop of FlashAttention (arXiv 2205.14135, 2407.08608). A block of threads serves one tile of
queries: one warpgroup copies key blocks into shared memory, the others multiply 64 rows each. A
row is a query of one head; heads that share a KV head may lie side by side in a tile, so that
their keys are read once. Which key blocks a tile visits: `pallas_kernels.prefill.key_blocks`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.page_lists import contiguous_table
from pallas_kernels.patterns import Pattern
from pallas_kernels.prefill.key_blocks import QueryTiles, selected_pages
from pallas_kernels.prefill.mosaic_body import attend
from pallas_kernels.prefill.mosaic_copy import Shape
from pallas_kernels.prefill.tiles import PrefillTiles, candidate_tiles, default_tiles
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.types import AttentionOutput

__all__ = [
    "PrefillTiles", "candidate_tiles", "default_tiles", "prefill_attention", "unsupported"
]  # fmt: skip


def unsupported(query, key_pages, value_pages, query_block: int | None = None) -> str | None:
    """Why `prefill_attention` cannot serve these arrays; None where it can."""
    del query_block  # any
    if isinstance(key_pages, QuantizedPages) or isinstance(value_pages, QuantizedPages):
        return "reads plain pages, not quantised ones"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, not {query.dtype}"
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        if pages.dtype != query.dtype:
            return f"needs {name} of the query's {query.dtype}, not {pages.dtype}"
    dim = query.shape[-1]
    if dim % 16 or dim > 256:
        return f"needs a head_dim that is a multiple of 16, 256 at the most, not {dim}"
    if key_pages.shape[1] % 8:
        return f"needs a page size that is a multiple of 8, not {key_pages.shape[1]}"
    return None


def prefill_attention(
    query: Float[Array, "B T H D"],
    key_pages: Float[Array, "N P D"],
    value_pages: Float[Array, "N P D"],
    starts: Int32[Array, " B"],
    counts: Int32[Array, " B"],
    *,
    kv_heads: int,
    pattern: Pattern,
    table: Int32[Array, "B K C"] | None,
    selected: Int32[Array, "B K Q M"] | None,
    query_block: int,
    tiles: PrefillTiles,
) -> AttentionOutput:
    """See `pallas_kernels.prefill.api.prefill_attention`; `unsupported` says what is served.

    Slots from `starts + counts` on may hold anything, and so may pages that are not visited; the
    slots before it that share a key block with a visible one hold finite numbers.

    Raises:
        ValueError: the arrays are not served, or the tiles cannot be run on them.
    """
    batch, tokens, heads, dim = query.shape
    pool, size, _ = key_pages.shape
    reason = unsupported(query, key_pages, value_pages, query_block)
    if reason is not None:
        raise ValueError(f"the Hopper prefill kernel {reason}")
    tiles.check(heads // kv_heads)
    queries = QueryTiles(tokens, query_block, tiles.tokens)
    if selected is not None and table is None:
        table = contiguous_table(batch, kv_heads, pool // (batch * kv_heads))
    lists = () if table is None else (table,)
    if selected is not None:
        assert table is not None
        lists = selected_pages(
            selected, table, starts, counts, tiles=queries, pattern=pattern, size=size, pool=pool
        )
    shape = Shape(
        tiles=tiles,
        queries=queries,
        pattern=pattern,
        kv_heads=kv_heads,
        heads=heads,
        dim=dim,
        size=size,
        pool=pool,
        pages=pool // (batch * kv_heads) if table is None else table.shape[2],
        listed=None if selected is None else selected.shape[3],
        # The widest rows of 128, 64 or 32 bytes that a head divides into.
        swizzle=next(width for width in (64, 32, 16) if dim % width == 0),
    )
    kernel = _kernel(shape, batch, query.dtype)
    out, lse = kernel(queries.spread(query), key_pages, value_pages, starts, counts, *lists)
    return AttentionOutput(queries.gather(out), queries.gather(_by_token(lse, shape)))


def _kernel(shape: Shape, batch: int, dtype):
    """The kernel: out [B, T2, H, D] and lse [B, H / heads, tiles, warpgroups, rows]."""
    tiles, queries = shape.tiles, shape.queries
    # pyright takes dataclasses of a protocol for abstract.
    swizzled = (
        plgpu.TilingTransform((8, shape.swizzle)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(2 * shape.swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    rows = (tiles.warpgroups, tiles.queries)
    block = (tiles.stages, tiles.keys, shape.dim)
    barrier = functools.partial(plgpu.Barrier, num_barriers=tiles.stages)
    grid = (shape.kv_heads * shape.parts, queries.count, batch)

    def prefill(*refs, **scratch):  # named, for profiles
        attend(shape, *refs, **scratch)

    return plgpu.kernel(
        prefill,
        out_type=[
            jax.ShapeDtypeStruct(
                (batch, queries.count * tiles.tokens, shape.heads, shape.dim), dtype
            ),
            jax.ShapeDtypeStruct((batch, grid[0], queries.count, *rows), jnp.float32),
        ],
        grid=grid,
        grid_names=("group", "tile", "row"),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types={
            "queries": plgpu.SMEM((*rows, shape.dim), dtype, transforms=swizzled),
            "weights": plgpu.SMEM((*rows, tiles.keys), dtype, transforms=swizzled),
            "keys": plgpu.SMEM(block, dtype, transforms=swizzled),
            "values": plgpu.SMEM(block, dtype, transforms=swizzled),
            "positions": plgpu.SMEM((tiles.stages, tiles.keys), jnp.int32),
            "spans": plgpu.SMEM((tiles.stages, 2), jnp.int32),
            "logs": plgpu.SMEM(rows, jnp.float32),
            "query_ready": plgpu.Barrier(num_arrivals=tiles.heads, num_barriers=tiles.warpgroups),
            "key_ready": barrier(num_arrivals=shape.units + 1),
            "value_ready": barrier(num_arrivals=shape.units),
            "value_copied": plgpu.Barrier(num_arrivals=shape.units),
            "key_free": barrier(num_arrivals=tiles.warpgroups),
            "value_free": barrier(num_arrivals=tiles.warpgroups),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


def _by_token(lse: Float[Array, "B groups tiles W R"], shape: Shape) -> Float[Array, "B T2 H"]:
    """Rows of a warpgroup are queries of its first head, then of its second ..."""
    batch, groups, count, warpgroups, _ = lse.shape
    heads, each = shape.tiles.heads, shape.tiles.each
    lse = lse[..., : heads * each].reshape(batch, groups, count, warpgroups, heads, each)
    lse = lse.transpose(0, 2, 3, 5, 1, 4)
    return lse.reshape(batch, count * warpgroups * each, shape.heads)
