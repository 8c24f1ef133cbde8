"""The Hopper decode kernel in the interpreter, against the reference.

A race, a read out of bounds or an unbalanced barrier raises there; shared memory that was never
written, pages that are in no list and slots that the newest token does not see hold NaN.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cards import CARDS
from pallas_kernels.decode import mosaic_hopper, reference
from pallas_kernels.decode.mosaic_hopper import HopperTiles, candidate_tiles, default_tiles
from pallas_kernels.page_lists import PageList, list_pages
from pallas_kernels.patterns import DENSE, Pattern
from pallas_kernels.quant.api import quantize

LENGTHS = (0, 1, 7, 63, 64, 65, 1000)
SHORT = (0, 65, 130)


def draw(heads, kv_heads, dim, size, dtype, lengths, *, pattern=DENSE, missing=False):
    """query, key pages, value pages, lengths, table: a pool in random order with pages to spare."""
    rng = np.random.default_rng(dim + size)
    batch, count = len(lengths), -(-max(lengths) // size)
    query = rng.normal(size=(batch, heads, dim)).astype(jnp.dtype(dtype))
    pages = batch * kv_heads * count
    table = rng.permutation(pages + 3)[:pages].reshape(batch, kv_heads, count).astype(np.int32)
    position: Any = np.arange(count * size).reshape(count, size)
    newest: Any = np.asarray(lengths)[:, None, None, None] - 1
    live = np.asarray(pattern.visible(position, newest))  # B 1 C P
    if missing:
        gone = (np.arange(count) % 3 == 1) & (np.arange(kv_heads)[:, None] == 0)
        table = np.where(gone, -1, table)
    pools = []
    for _ in range(2):
        pool = np.full((pages + 3, size, dim), np.nan, jnp.dtype(dtype))
        tokens = rng.normal(size=(*table.shape, size, dim)).astype(pool.dtype)
        tokens[np.broadcast_to(~live, tokens.shape[:-1])] = np.nan
        pool[table[table >= 0]] = tokens[table >= 0]
        pools.append(jnp.asarray(pool))
    return jnp.asarray(query), *pools, jnp.asarray(lengths, jnp.int32), jnp.asarray(table)


def run(arrays, tiles, *, kv_heads, pattern=DENSE, selected=None):
    query, key_pages, value_pages, lengths, table = arrays
    count, size, _ = key_pages.shape
    pages = list_pages(
        lengths, pattern, kv_heads=kv_heads, pages=count, size=size, table=table, selected=selected
    )
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        return mosaic_hopper.decode_attention(
            query, key_pages, value_pages, pages, lengths,
            kv_heads=kv_heads, pattern=pattern, tiles=tiles,
        )  # fmt: skip


def check(arrays, got, *, kv_heads, pattern=DENSE, selected=None):
    query, key_pages, value_pages, lengths, table = arrays
    want = reference.decode_attention(
        query.astype(jnp.float32), key_pages.astype(jnp.float32), value_pages.astype(jnp.float32),
        lengths, kv_heads=kv_heads, pattern=pattern, table=table, selected=selected,
    )  # fmt: skip
    assert got.out.dtype == query.dtype and got.lse.dtype == jnp.float32
    # Scores are products of 16-bit numbers summed in float32; weights are rounded to 16 bits.
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.out.astype(jnp.float32), want.out, rtol=1e-2, atol=1e-2)
    nothing = np.isneginf(want.lse)
    assert (np.asarray(got.out)[nothing] == 0).all()
    return nothing


# H, K, D, page size, dtype, tiles, pattern, lengths: pages smaller than a step, as large, larger
# and neither; one share and several, more shares than steps; one stage and several.
CASES = {
    "whole pages": (8, 1, 128, 64, "bfloat16", HopperTiles(3, 64, 2), DENSE, LENGTHS),
    "window 1": (14, 2, 64, 16, "float16", HopperTiles(2, 64, 2), Pattern(1), LENGTHS),
    "ranges": (3, 1, 80, 16, "bfloat16", HopperTiles(2, 64, 3), Pattern(70, 4, 48), LENGTHS),
    "dense list": (1, 1, 64, 128, "float16", HopperTiles(1, 128, 1), Pattern(9, 3, 4), SHORT),
    "two sides": (20, 1, 256, 24, "bfloat16", HopperTiles(1, 64, 2), DENSE, SHORT),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    heads, kv_heads, dim, size, dtype, tiles, pattern, lengths = CASES[name]
    arrays = draw(heads, kv_heads, dim, size, dtype, lengths, pattern=pattern)
    got = run(arrays, tiles, kv_heads=kv_heads, pattern=pattern)
    nothing = check(arrays, got, kv_heads=kv_heads, pattern=pattern)
    assert nothing[0].all() and not nothing[1:].any()


def test_selected_pages_and_missing_ones():
    """Lists in any order, -1 between them, pages that the table lacks, a list of -1 only."""
    lengths = (0, 65, 130, 400)
    arrays = draw(8, 2, 96, 128, "bfloat16", lengths, missing=True)
    selected = np.full((4, 2, 5), -1, np.int32)
    selected[1, 0, 2] = 0
    selected[2, :, 1::2] = [[1, 0], [0, 1]]
    selected[3, 0, :4] = [3, -1, 1, 0]
    selected[3, 1, 4] = 2
    selected = jnp.asarray(selected)
    got = run(arrays, HopperTiles(2, 64, 2), kv_heads=2, selected=selected)
    nothing = check(arrays, got, kv_heads=2, selected=selected)
    assert nothing[0].all() and nothing[1, 4:].all() and not nothing[1, :4].any()


@pytest.mark.parametrize("listed", [0, 3])
def test_lists_of_nothing(listed):
    query, key_pages, value_pages, lengths, _ = draw(4, 2, 64, 64, "float16", (0, 65))
    nowhere = jnp.full((2, 2, listed), -1, jnp.int32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = mosaic_hopper.decode_attention(
            query, key_pages, value_pages, PageList(nowhere, nowhere), lengths,
            kv_heads=2, pattern=DENSE, tiles=HopperTiles(2, 64, 2),
        )  # fmt: skip
    assert (got.out == 0).all() and np.isneginf(got.lse).all()


# H, K, D, page size, pages, dtype: tiles by default, lowered for the card but not run.
LOWERED = [
    (32, 8, 128, 16, 8192, "bfloat16"),
    (32, 8, 64, 8, 64, "float16"),
    (9, 3, 80, 48, 20, "bfloat16"),
    (64, 1, 192, 128, 8, "bfloat16"),
]


@pytest.mark.parametrize("heads,kv_heads,dim,size,listed,dtype", LOWERED)
def test_lowers_for_the_card(heads, kv_heads, dim, size, listed, dtype):
    tiles = default_tiles(
        CARDS["h100"], batch=1, kv_heads=kv_heads, group=heads // kv_heads,
        listed=listed, size=size, dim=dim,
    )  # fmt: skip
    pool: Any = jax.ShapeDtypeStruct((listed * kv_heads, size, dim), dtype)
    entries: Any = jax.ShapeDtypeStruct((1, kv_heads, listed), jnp.int32)
    run = functools.partial(
        mosaic_hopper.decode_attention, kv_heads=kv_heads, pattern=Pattern(999, 4, 64), tiles=tiles
    )
    traced = jax.jit(run).trace(
        jax.ShapeDtypeStruct((1, heads, dim), dtype), pool, pool, PageList(entries, entries),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )  # fmt: skip
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("card", ["h100", "h200"])
def test_tiles_fit(card, dim):
    card = CARDS[card]
    for batch, listed, size in ((1, 2048, 64), (1, 1, 8), (64, 512, 16), (512, 3, 128)):
        shape = dict(batch=batch, kv_heads=8, group=4, listed=listed, size=size, dim=dim)
        default = default_tiles(card, **shape)
        candidates = candidate_tiles(card, **shape)
        assert candidates[0] == default
        sides = 1 if dim <= 128 else 2
        for tiles in candidates:
            ring = tiles.stages * tiles.keys * 2 * (dim + dim // sides)
            assert ring + 128 * (dim + tiles.keys) + 1024 <= card.shared_per_block
            assert tiles.stages >= 2
            assert tiles.splits == 1 or tiles.splits * 4 * tiles.keys <= listed * size
        if listed == 2048:  # 128K tokens: every processor has work
            assert default.splits * 8 * sides >= card.processors


REFUSALS = [
    ({"dtype": "float32"}, "bfloat16 or float16, not float32"),
    ({"dim": 24}, "head_dim.*16.*24"),
    ({"dim": 144}, "head_dim.*32 from 160.*144"),
    ({"dim": 288}, "head_dim.*256.*288"),
    ({"heads": 65}, "64 query heads a KV head, not 65"),
    ({"batch": 65536}, r"65535 KV heads of all sequences, not 65536 \* 1"),
    ({"size": 12}, "page size.*8, not 12"),
    ({"pages": "float16"}, "key_pages of the query's dtype bfloat16, not float16"),
    ({"quantized": True}, "plain pages; key_pages are quantised"),
    ({"tiles": HopperTiles(1, 48, 2)}, "tiles = HopperTiles.*keys must be 64 or 128"),
    ({"tiles": HopperTiles(0, 64, 2)}, "tiles = HopperTiles.*splits and stages at least 1"),
]


@pytest.mark.parametrize("changed,message", REFUSALS)
def test_refusals(changed, message):
    case = {"dtype": "bfloat16", "dim": 64, "heads": 4, "size": 16, "pages": None} | changed
    query = jnp.zeros((case.get("batch", 1), case["heads"], case["dim"]), case["dtype"])
    pool: Any = jnp.zeros((2, case["size"], case["dim"]), case["pages"] or case["dtype"])
    if "quantized" in changed:
        pool = quantize(pool, bits=8, by="channel", group=8)
    nowhere = jnp.full((1, 1, 1), -1, jnp.int32)
    with pytest.raises(ValueError, match=message):
        mosaic_hopper.decode_attention(
            query, pool, pool, PageList(nowhere, nowhere), jnp.zeros(1, jnp.int32),
            kv_heads=1, pattern=DENSE, tiles=case.get("tiles", HopperTiles(1, 64, 2)),
        )  # fmt: skip
