"""The Mosaic GPU selection kernels in the interpreter, against the reference.

A race between blocks, a read out of bounds or of what was never written raises there.
"""

import functools

import jax
import jax.numpy as jnp
import mma_on_cpu  # noqa: F401  (a meaning for plgpu.mma in the interpreter)
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cards import CARDS
from pallas_kernels.quant.api import quantize
from pallas_kernels.topk import mosaic, reference
from pallas_kernels.topk.api import page_scores, token_scores
from pallas_kernels.topk.mosaic import Tiles
from pallas_kernels.topk.summaries import summarize_pages

LENGTHS = jnp.asarray([0, 1, 7, 63, 64, 65, 1000], jnp.int32)


@pytest.fixture(autouse=True)
def interpreter():
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def draw(heads, kv_heads, dim, count, size, dtype, lengths=LENGTHS):
    """query with zeros in it, pages in the contiguous layout with NaN behind every length."""
    rng = np.random.default_rng(dim)
    query = rng.normal(size=(len(lengths), heads, dim)).astype(jnp.dtype(dtype))
    query[:, :, ::5] = 0
    keys = rng.normal(size=(len(lengths), count, kv_heads, size, dim)).astype(jnp.dtype(dtype))
    spare = np.arange(count)[:, None] * size + np.arange(size) >= np.asarray(lengths)[:, None, None]
    keys[np.broadcast_to(spare[:, :, None], keys.shape[:-1])] = np.nan
    return jnp.asarray(query), jnp.asarray(keys.reshape(-1, size, dim))


def assert_close(got, want):
    """Products of 16-bit numbers are exact in float32, and summed there in another order."""
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# H, K, D, page size, pages, dtype, tiles: every count of warps along the rows, groups of 1, 3, 7
# and 16, one block and several, blocks left without work, parts of a page.
TOKENS = [
    (4, 4, 64, 64, 17, "bfloat16", None),
    (7, 1, 80, 16, 64, "float16", Tiles(3, 16)),
    (6, 2, 96, 48, 22, "bfloat16", Tiles(5, 48)),
    (16, 1, 128, 128, 8, "bfloat16", Tiles(1, 64)),
    (3, 1, 16, 32, 33, "float16", Tiles(40, 32)),
]


@pytest.mark.parametrize("tabled", [False, True])
@pytest.mark.parametrize("heads,kv_heads,dim,size,count,dtype,tiles", TOKENS)
def test_token_scores(heads, kv_heads, dim, size, count, dtype, tiles, tabled):
    query, pages = draw(heads, kv_heads, dim, count, size, dtype)
    table = None
    if tabled:
        # The pool backwards, every third page of it missing.
        order = np.arange(len(pages), dtype=np.int32)[::-1].reshape(len(LENGTHS), kv_heads, count)
        missing = np.arange(count) % 3 == 1
        apart = np.asarray(pages).reshape(len(LENGTHS), count, kv_heads, size, dim).swapaxes(1, 2)
        pool = np.empty_like(pages)
        pool[order] = np.where(missing[:, None, None], np.nan, apart)
        pages, table = jnp.asarray(pool), jnp.asarray(np.where(missing, -1, order))
    options = {"kv_heads": kv_heads, "table": table}
    if tiles is None:
        got = token_scores(query, pages, LENGTHS, implementation="mosaic", **options)
    else:
        got = mosaic.token_scores(query, pages, LENGTHS, tiles=tiles, **options)
    assert_close(got, reference.token_scores(query, pages, LENGTHS, **options))


# H, K, D, page size, pages, dtype, tiles: pages that no step divides, the last step on its own.
PAGES = [
    (4, 1, 64, 16, 64, "bfloat16", None),
    (6, 2, 40, 8, 130, "float16", Tiles(2, 64)),
    (16, 1, 128, 10, 101, "bfloat16", Tiles(7, 32)),
]


@pytest.mark.parametrize("heads,kv_heads,dim,size,count,dtype,tiles", PAGES)
def test_page_scores(heads, kv_heads, dim, size, count, dtype, tiles):
    query, pages = draw(heads, kv_heads, dim, count, size, dtype)
    summaries = np.array(summarize_pages(pages, LENGTHS, kv_heads=kv_heads))
    rows = summaries.reshape(len(LENGTHS), kv_heads, count, -1)
    rows[0], rows[1, :, 1:], rows[5, :, -1] = np.nan, np.nan, np.nan  # behind the length
    rows[6, 0, 2] = np.repeat([-np.inf, np.inf], dim)  # neutral, as a page that is not there
    summaries = jnp.asarray(summaries)
    if tiles is None:
        got = page_scores(
            query, summaries, LENGTHS, kv_heads=kv_heads, size=size, implementation="mosaic"
        )
    else:
        got = mosaic.page_scores(
            query, summaries, LENGTHS, kv_heads=kv_heads, size=size, tiles=tiles
        )
    want = reference.page_scores(query, summaries, LENGTHS, kv_heads=kv_heads, size=size)
    assert np.isneginf(got[6, 0, 2])
    assert_close(got, want)


@pytest.mark.parametrize(
    "size,dtype,served", [(16, "bfloat16", True), (8, "bfloat16", False), (16, "float32", False)]
)
def test_the_api_picks_the_kernel_where_it_serves(size, dtype, served):
    lengths = jnp.asarray([9], jnp.int32)
    query, pages = draw(2, 1, 16, 2, size, dtype, lengths=lengths)
    program = jax.make_jaxpr(functools.partial(token_scores, kv_heads=1))(query, pages, lengths)
    assert ("mgpu" in str(program)) == served


TOKEN_REFUSALS = [
    (2, 1, 16, 16, "float32", "float32"),
    (2, 1, 24, 16, "bfloat16", "head_dim.*16.*24"),
    (2, 1, 272, 16, "bfloat16", "head_dim.*256.*272"),
    (17, 1, 16, 16, "bfloat16", "16 query heads a KV head, not 17"),
    (2, 1, 16, 8, "bfloat16", "page size.*16, not 8"),
]


@pytest.mark.parametrize("heads,kv_heads,dim,size,dtype,reason", TOKEN_REFUSALS)
def test_token_scores_refuse(heads, kv_heads, dim, size, dtype, reason):
    lengths = jnp.asarray([9], jnp.int32)
    query, pages = draw(heads, kv_heads, dim, 2, size, dtype, lengths=lengths)
    options = {"kv_heads": kv_heads, "implementation": "mosaic"}
    with pytest.raises(ValueError, match=f'implementation = "mosaic".*{reason}'):
        token_scores(query, pages, lengths, **options)
    quantized = quantize(jnp.zeros_like(pages), bits=8, by="channel", group=8)
    with pytest.raises(ValueError, match='implementation = "mosaic".*quantised'):
        token_scores(query, quantized, lengths, **options)


def test_page_scores_refuse_few_pages():
    with pytest.raises(ValueError, match=r'"mosaic" scores 64 pages.*\(1, 63, 32\)'):
        page_scores(
            jnp.zeros((1, 2, 16), jnp.bfloat16), jnp.zeros((1, 63, 32), jnp.bfloat16),
            jnp.zeros(1, jnp.int32), kv_heads=1, size=8, implementation="mosaic",
        )  # fmt: skip


@pytest.mark.parametrize("tiles", [Tiles(1, 128), Tiles(1, 24), Tiles(0, 64)])
def test_tiles_that_do_not_fit_are_refused(tiles):
    query, pages = draw(2, 1, 16, 2, 64, "bfloat16", lengths=LENGTHS[:1])
    with pytest.raises(ValueError, match="tiles = Tiles.*rows must be"):
        mosaic.token_scores(query, pages, LENGTHS[:1], kv_heads=1, table=None, tiles=tiles)
    summaries = jnp.zeros((1, 64, 32), jnp.bfloat16)
    with pytest.raises(ValueError, match="tiles = Tiles.*rows must be"):
        mosaic.page_scores(query, summaries, LENGTHS[:1], kv_heads=1, size=64, tiles=tiles)


@pytest.mark.parametrize("count,size", [(64, None), (2001, None), (131072, 64), (48, 48), (16, 16)])
@pytest.mark.parametrize("card", CARDS)
def test_tiles_fit(card, count, size):
    shape = {"kv_heads": 8, "count": count, "dim": 256, "size": size}
    for batch in (1, 64):
        default = mosaic.default_tiles(CARDS[card], batch=batch, **shape)
        for tiles in [default, *mosaic.candidate_tiles(CARDS[card], batch=batch, **shape)]:
            assert tiles.rows <= count if size is None else size % tiles.rows == 0
            assert tiles.rows % 16 == 0 and 1 <= tiles.splits <= -(-count // tiles.rows)
