"""Page summaries, scores of pages and tokens, and the best of them, against numpy in float64."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiles import in_place

from pallas_kernels.quant.api import dequantize, quantize
from pallas_kernels.topk.api import page_scores, token_scores, top_k
from pallas_kernels.topk.summaries import new_summaries, summarize_pages, update_summaries

LENGTHS = np.asarray([0, 1, 7, 63, 64, 65, 1000], np.int32)
IMPLEMENTATIONS = ["reference", "xla"]


def compiled(op: Callable, *static: str) -> Callable[..., Any]:
    return jax.jit(op, static_argnames=static)


scores_of_pages = compiled(page_scores, "kv_heads", "size", "implementation")
scores_of_tokens = compiled(token_scores, "kv_heads", "implementation")
summarize = compiled(summarize_pages, "kv_heads")
update = compiled(update_summaries, "size")
best = compiled(top_k, "k")

# H, K, D, page size, dtype: groups of 1, 3, 4, 7 and 8, and pages that the lengths do not fill.
SHAPES = [
    (4, 4, 16, 16, "float32"),
    (6, 2, 80, 48, "float32"),
    (4, 1, 64, 64, "bfloat16"),
    (7, 1, 16, 8, "float16"),
    (16, 2, 16, 1, "bfloat16"),
    (2, 2, 96, 64, "bfloat16"),
]
# Products of rounded inputs are exact in float32, and summed there: the order differs, no more.
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def draw(kv_heads, dim, size, dtype, *, heads=None, lengths=LENGTHS, spare=np.nan):
    """query [B, H, D] with zeros in it, keys [B, S, K, D] and pages, `spare` behind the lengths."""
    rng = np.random.default_rng(dim)
    batch, count = len(lengths), -(-max(lengths) // size) + 1
    query = rng.normal(size=(batch, heads or kv_heads, dim)).astype(jnp.dtype(dtype))
    query[:, :, ::5] = 0
    keys = rng.normal(size=(batch, count * size, kv_heads, dim)).astype(jnp.dtype(dtype))
    keys[np.arange(count * size) >= lengths[:, None]] = spare
    pages = keys.reshape(batch, count, size, kv_heads, dim).swapaxes(2, 3)
    return query, keys, pages.reshape(-1, size, dim)


def shuffled(pages, batch, kv_heads, holes):
    """The same pages in another order in a larger pool, and their table with -1 at `holes`."""
    rng = np.random.default_rng(1)
    count = len(pages) // (batch * kv_heads)
    place = rng.permutation(len(pages) + 5)[: len(pages)]
    pool = np.full((len(pages) + 5, *pages.shape[1:]), np.nan, pages.dtype)
    pool[place] = pages
    table = place.reshape(batch, count, kv_heads).swapaxes(1, 2).astype(np.int32)
    table = np.where(holes, -1, table)
    pool[place[np.broadcast_to(holes, table.shape).swapaxes(1, 2).reshape(-1)]] = np.nan
    return pool, table


def numpy_summaries(keys, size, there=True):
    """Page by page [B, K, C, 2D]; NaN keys and pages that are not there do not count."""
    batch, slots, kv_heads, dim = keys.shape
    out = np.full((batch, kv_heads, slots // size, 2 * dim), np.inf, keys.dtype)
    out[..., :dim] = -np.inf
    there = np.broadcast_to(there, out.shape[:3])
    for row, head, page in np.ndindex(out.shape[:3]):
        held = keys[row, page * size : (page + 1) * size, head]
        held = held[~np.isnan(held[:, 0].astype(np.float32))]
        if len(held) and there[row, head, page]:
            out[row, head, page] = np.concatenate([held.max(0), held.min(0)])
    return out.reshape(batch * kv_heads, -1, 2 * dim)


def numpy_scores(query, keys, there: Any = True):
    """float64 [B, K, S]; NaN keys and slots that are not there get -inf."""
    batch, _, kv_heads, dim = keys.shape
    grouped = query.astype(np.float64).reshape(batch, kv_heads, -1, dim)
    scores = np.einsum("bkgd,bskd->bkgs", grouped, keys.astype(np.float64)).max(2) / dim**0.5
    return np.where(np.isnan(scores) | ~np.broadcast_to(there, scores.shape), -np.inf, scores)


@pytest.mark.parametrize("heads,kv_heads,dim,size,dtype", SHAPES[1:5])
def test_summaries_of_pages(heads, kv_heads, dim, size, dtype):
    _, keys, pages = draw(kv_heads, dim, size, dtype)
    got = summarize(pages, LENGTHS, kv_heads=kv_heads)
    assert got.dtype == pages.dtype
    np.testing.assert_array_equal(got, numpy_summaries(keys, size))
    holes = np.arange(len(pages) // (len(LENGTHS) * kv_heads)) % 3 == 1
    pool, table = shuffled(pages, len(LENGTHS), kv_heads, holes)
    got = summarize(pool, LENGTHS, kv_heads=kv_heads, table=table)
    np.testing.assert_array_equal(got, numpy_summaries(keys, size, ~holes))


@pytest.mark.parametrize("size,dtype", [(1, "float32"), (8, "bfloat16"), (48, "float16")])
@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
@pytest.mark.parametrize("rows", [1, 3])
def test_chunks_of_any_size_give_the_same_summaries(size, dtype, chunk, rows):
    """Rows that start and end at different times; the last page's capacity is reached."""
    lengths = np.asarray([96, 41, 0][:rows], np.int32)
    _, keys, pages = draw(2, 16, size, dtype, lengths=lengths)
    want = np.asarray(summarize(pages, lengths, kv_heads=2))
    # Stale summaries of an earlier sequence: every page held is begun anew.
    stale = np.full_like(want, np.nan)
    fresh = np.asarray(new_summaries(rows, 2, want.shape[1], 16, want.dtype))
    got = {"stale": stale, "fresh": fresh}
    room = want.shape[1] * size
    for start in range(0, 96, chunk):
        counts = np.clip(lengths - start, 0, chunk).astype(np.int32)
        # A row that has ended may stand anywhere, its full capacity included.
        starts = np.where(counts, start, room if start % 2 else lengths).astype(np.int32)
        new = np.full((rows, chunk, 2, 16), np.nan, want.dtype)
        part = keys[:, start : start + chunk]
        new[:, : part.shape[1]] = part
        got = {name: update(each, new, starts, counts, size=size) for name, each in got.items()}
    np.testing.assert_array_equal(got["fresh"], want)
    held = (np.arange(want.shape[1]) * size < lengths[:, None]).repeat(2, 0)
    np.testing.assert_array_equal(np.asarray(got["stale"])[held], want[held])
    assert np.isnan(np.asarray(got["stale"])[~held].astype(np.float32)).all()


def test_a_full_cache_takes_its_last_tokens():
    keys = np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)
    rows = [np.asarray([each], np.int32) for each in (0, 13, 3)]
    summaries = update(
        new_summaries(1, 1, 4, 1, jnp.float32), keys[:, :13], rows[0], rows[1], size=4
    )
    summaries = update(summaries, keys[:, 13:], rows[1], rows[2], size=4)
    np.testing.assert_array_equal(summaries, [[[3, 0], [7, 4], [11, 8], [15, 12]]])


@pytest.mark.parametrize("batch,tokens", [(1, 1), (1, 37), (3, 1), (3, 37)])
def test_update_is_in_place(batch, tokens):
    summaries = jax.ShapeDtypeStruct((batch * 2, 512, 64), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((batch, tokens, 2, 32), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((batch,), jnp.int32)
    donated = jax.jit(functools.partial(update_summaries, size=16), donate_argnums=0)
    aliased, temporary = in_place(donated.lower(summaries, new, rows, rows).compile())
    assert aliased >= summaries.size * 2
    assert temporary < summaries.size / 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads,kv_heads,dim,size,dtype", SHAPES)
def test_scores(implementation, heads, kv_heads, dim, size, dtype):
    """Tokens equal numpy; pages equal the sum over channels, and no token scores above its page."""
    query, keys, pages = draw(kv_heads, dim, size, dtype, heads=heads)
    options = {"kv_heads": kv_heads, "implementation": implementation}
    tokens = np.asarray(scores_of_tokens(query, pages, LENGTHS, **options))
    assert_close(tokens, numpy_scores(query, keys))
    summaries = numpy_summaries(keys, size)
    stale = summaries.reshape(len(LENGTHS), kv_heads, -1, 2 * dim)
    stale[0, :, 1:], stale[-1, :, -1] = np.nan, np.nan  # pages behind the length
    got = scores_of_pages(query, summaries, LENGTHS, size=size, **options)
    apart = stale.astype(np.float64)[:, :, None]
    grouped = query.astype(np.float64).reshape(len(LENGTHS), kv_heads, -1, 1, dim)
    with np.errstate(invalid="ignore"):
        bound = np.maximum(grouped * apart[..., :dim], grouped * apart[..., dim:])
    want = bound.sum(-1).max(2) / dim**0.5
    held = np.arange(want.shape[2]) * size < LENGTHS[:, None, None]
    want = np.where(held, want, -np.inf)
    # float16's least number stands in for the query's zeros: less than 1e-5 in all.
    assert_close(got, want)
    below = tokens.reshape(*want.shape, size).max(-1)[held.repeat(kv_heads, 1)]
    got = np.asarray(got)[held.repeat(kv_heads, 1)]
    assert (below <= got + 1e-5 * (1 + np.abs(got))).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads,kv_heads,dim,size,dtype", SHAPES[1:4])
def test_scores_through_a_table(implementation, heads, kv_heads, dim, size, dtype):
    query, keys, pages = draw(kv_heads, dim, size, dtype, heads=heads)
    holes = np.arange(len(pages) // (len(LENGTHS) * kv_heads)) % 3 == 1
    pool, table = shuffled(pages, len(LENGTHS), kv_heads, holes)
    options = {"kv_heads": kv_heads, "implementation": implementation}
    got = scores_of_tokens(query, pool, LENGTHS, table=table, **options)
    want = numpy_scores(query, keys, ~np.repeat(holes, size))
    assert_close(got, want)
    # Pages without a key are neutral: -inf, whatever zeros the query has.
    summaries = numpy_summaries(keys, size, ~holes)
    got = np.asarray(scores_of_pages(query, summaries, LENGTHS, size=size, **options))
    held = ~holes & (np.arange(got.shape[2]) * size < LENGTHS[:, None, None])
    assert not np.isnan(got).any()
    np.testing.assert_array_equal(np.isneginf(got), ~np.broadcast_to(held, got.shape))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits,dtype,tabled", [(8, "bfloat16", False), (4, "float32", True)])
def test_scores_of_quantised_tokens(implementation, bits, dtype, tabled):
    query, _, pages = draw(2, 16, 16, dtype, heads=6, spare=0)
    options = {"kv_heads": 2, "implementation": implementation}
    table = None
    if tabled:
        pages, table = shuffled(pages, len(LENGTHS), 2, np.arange(64) == 5)
        pages[np.isnan(pages)] = 0
    quantized = quantize(jnp.asarray(pages), bits=bits, by="channel", group=8)
    got = scores_of_tokens(query, quantized, LENGTHS, table=table, **options)
    plain = np.asarray(dequantize(quantized, jnp.float32))
    want = scores_of_tokens(
        query.astype(np.float32), plain, LENGTHS, table=table,
        kv_heads=2, implementation="reference",
    )  # fmt: skip
    assert_close(got, want)


def numpy_top(scores, k):
    """Row by row: sort by (score descending, index), drop -inf, fill up with -1."""
    rows = []
    for row in np.asarray(scores, np.float64).reshape(-1, scores.shape[-1]):
        row = np.where(np.isnan(row), np.inf, row)
        order = sorted((i for i in range(len(row)) if row[i] > -np.inf), key=lambda i: (-row[i], i))
        rows.append((order + [-1] * len(row))[: min(k, len(row))])
    return np.asarray(rows, np.int32).reshape(*scores.shape[:-1], -1)


@pytest.mark.parametrize("k", [1, 3, 16, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_top_k_among_ties_and_masks(k, dtype):
    rng = np.random.default_rng(k)
    scores = rng.integers(-3, 4, (2, 6, 32)).astype(np.float32)  # ties everywhere
    scores[scores == 1] = -0.0  # a tie with 0
    scores[0, 0] = -np.inf
    scores[0, 1, 3:] = -np.inf
    scores[0, 2, 7], scores[0, 2, 4] = np.inf, np.nan
    scores[0, 3] = np.where(np.arange(32) == 20, float(jnp.finfo(dtype).min), -np.inf)
    scores[0, 4, 9] = -np.nan
    scores[1][rng.random((6, 32)) < 0.6] = -np.inf
    scores = scores.astype(jnp.dtype(dtype))
    got = best(scores, k=k)
    assert got.dtype == jnp.int32 and got.shape == (2, 6, min(k, 32))
    np.testing.assert_array_equal(got, numpy_top(scores, k))


def test_top_k_of_many():
    scores = np.random.default_rng(0).normal(size=(2, 5000)).astype(np.float32)
    np.testing.assert_array_equal(best(scores, k=300), numpy_top(scores, 300))
    assert best(scores, k=0).shape == (2, 0) and top_k(jnp.zeros((3, 0)), 4).shape == (3, 0)


@pytest.mark.parametrize(
    "k,error,message",
    [(-1, ValueError, "k = -1"), (2.0, TypeError, "k = 2.0"), (True, TypeError, "k = True")],
)
def test_top_k_refuses(k, error, message):
    with pytest.raises(error, match=message):
        top_k(jnp.zeros((2, 4)), k)


QUERY = np.zeros((2, 4, 16), np.float32)
PAGES = np.zeros((12, 8, 16), np.float32)
ROWS = np.zeros(2, np.int32)
TABLE = np.zeros((2, 2, 3), np.int32)
TOKEN_REFUSALS = [
    ({"query": QUERY[0]}, ValueError, "query has shape"),
    ({"kv_heads": 3}, ValueError, "H = 4 query heads are no multiple of K = 3"),
    ({"key_pages": PAGES[..., :8]}, ValueError, "head_dim 8, the query 16"),
    ({"key_pages": PAGES[:11]}, ValueError, "N = 11 pages"),
    ({"key_pages": PAGES.astype(np.float16)}, TypeError, "key_pages float16"),
    ({"lengths": ROWS[:1]}, ValueError, r"lengths has shape \(1,\)"),
    ({"lengths": ROWS.astype(np.int16)}, TypeError, "lengths is int16"),
    ({"table": TABLE + 12}, ValueError, "table holds a page id outside -1 ... 11"),
    ({"table": TABLE[:1]}, ValueError, "table has shape"),
    ({"implementation": "triton"}, ValueError, "implementation = 'triton'"),
    ({"implementation": "mosaic"}, ValueError, 'implementation = "mosaic" needs an NVIDIA GPU'),
]


@pytest.mark.parametrize("wrong,error,message", TOKEN_REFUSALS)
def test_token_scores_refuse(wrong, error, message):
    right = {"query": QUERY, "key_pages": PAGES, "lengths": ROWS, "kv_heads": 2}
    with pytest.raises(error, match=message):
        token_scores(**{**right, **wrong})


SUMMARIES = np.zeros((4, 3, 32), np.float32)
PAGE_REFUSALS = [
    (
        {"summaries": SUMMARIES[:2]},
        ValueError,
        r"summaries have shape \(2, 3, 32\); .*\[4, C, 32\]",
    ),
    ({"summaries": SUMMARIES[..., :16]}, ValueError, r"summaries have shape \(4, 3, 16\)"),
    ({"summaries": SUMMARIES[:, :0]}, ValueError, "summaries have shape"),
    ({"summaries": SUMMARIES.astype(np.float16)}, TypeError, "summaries float16"),
    ({"kv_heads": 3}, ValueError, "no multiple of K = 3"),
    ({"size": 0}, ValueError, "size = 0"),
    ({"implementation": "mosaic"}, ValueError, 'implementation = "mosaic" needs an NVIDIA GPU'),
]


@pytest.mark.parametrize("wrong,error,message", PAGE_REFUSALS)
def test_page_scores_refuse(wrong, error, message):
    right = {"query": QUERY, "summaries": SUMMARIES, "lengths": ROWS, "kv_heads": 2, "size": 8}
    with pytest.raises(error, match=message):
        page_scores(**{**right, **wrong})


NEW = np.zeros((2, 3, 2, 16), np.float32)
UPDATE_REFUSALS = [
    ({"new": NEW[0]}, ValueError, r"new has shape \(3, 2, 16\)"),
    ({"new": NEW[:1]}, ValueError, r"summaries have shape \(4, 3, 32\); new .* needs \[2, C, 32\]"),
    ({"new": NEW.astype(np.float16)}, TypeError, "new float16"),
    ({"counts": ROWS[:1]}, ValueError, "counts has shape"),
    ({"size": 0}, ValueError, "size = 0"),
]


@pytest.mark.parametrize("wrong,error,message", UPDATE_REFUSALS)
def test_update_refuses(wrong, error, message):
    right = {"summaries": SUMMARIES, "new": NEW, "starts": ROWS, "counts": ROWS, "size": 8}
    with pytest.raises(error, match=message):
        update_summaries(**{**right, **wrong})
