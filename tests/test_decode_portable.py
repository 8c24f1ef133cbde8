"""The portable decode kernel in the interpreter, against the reference.

A race between blocks, a read out of bounds or of what was never written raises there. Everything
that no row may see is NaN: spare pages, slots behind a length, their scales and offsets.
"""

import dataclasses

import jax
import jax.numpy as jnp
import mma_on_cpu  # noqa: F401  (registers the product)
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cards import CARDS
from pallas_kernels.decode import mosaic_portable, reference
from pallas_kernels.decode.mosaic_portable import PortableTiles
from pallas_kernels.page_lists import PageList, list_pages
from pallas_kernels.patterns import DENSE, Pattern
from pallas_kernels.quant.api import quantize
from pallas_kernels.quant.pages import QuantizedPages

LENGTHS = (0, 1, 7, 63, 64, 65, 1000)
SOME = (0, 1, 65, 130)


@pytest.fixture(autouse=True)
def interpreter():
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """bits: of keys and of values; groups: tokens and channels that share constants; chosen: how
    many pages are selected, None for all."""

    heads: tuple[int, int]
    dim: int
    size: int
    tiles: PortableTiles
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = SOME
    pattern: Pattern = DENSE
    bits: tuple[int, int] = (16, 16)
    groups: tuple[int, int] = (0, 0)
    chosen: int | None = None


def draw(case: Case):
    """query, key pages, value pages, table, selected: float32 of what the kernel gets, and that."""
    rng = np.random.default_rng(case.dim + case.size)
    heads, kv_heads = case.heads
    count = -(-max(case.lengths) // case.size)
    batch = len(case.lengths)
    pool = batch * kv_heads * count + 2
    shape = (pool, case.size, case.dim)
    query = rng.normal(size=(batch, heads, case.dim)).astype(jnp.dtype(case.dtype))
    table = rng.permutation(pool)[: pool - 2].reshape(batch, kv_heads, count).astype(np.int32)
    filled = np.zeros(pool, np.int32)
    for row, length in enumerate(case.lengths):
        filled[table[row]] = np.clip(length - np.arange(count) * case.size, 0, case.size)
    spare = np.arange(case.size) >= filled[:, None]
    pages = []
    for by, bits, group in zip(("channel", "token"), case.bits, case.groups, strict=True):
        numbers = rng.normal(size=shape).astype(jnp.dtype(case.dtype))
        numbers[spare] = np.nan
        numbers = jnp.asarray(numbers)
        if bits < 16:
            assert bits in (4, 8) and by in ("channel", "token")
            held = quantize(numbers, bits=bits, by=by, group=group, valid=jnp.asarray(filled))
            lost = spare.reshape(pool, -1, group).all(2) if by == "channel" else spare
            nan = jnp.asarray(np.where(lost, np.nan, 0))[..., None].astype(held.dtype)
            numbers = dataclasses.replace(
                held, scales=held.scales + nan, offsets=held.offsets + nan
            )
        pages.append(numbers)
    selected = None
    if case.chosen is not None:
        orders = [rng.permutation(count) for _ in range(batch * kv_heads)]
        selected = np.stack(orders)[:, : case.chosen].reshape(batch, kv_heads, -1)
        selected = jnp.asarray(np.where(rng.random(selected.shape) < 0.3, -1, selected), jnp.int32)
    return jnp.asarray(query), *pages, jnp.asarray(table), selected


CASES = {
    "bf16": Case((8, 2), 128, 64, PortableTiles(3, 64), lengths=LENGTHS),
    "f16, window 1, page 16": Case(
        (7, 1), 80, 16, PortableTiles(1, 32), "float16", LENGTHS, Pattern(1)
    ),
    "window, sinks, stride, page 128": Case(
        (3, 1), 96, 128, PortableTiles(2, 64), lengths=(0, 1, 130, 300), pattern=Pattern(70, 4, 37)
    ),
    "selected, page 8": Case((1, 1), 64, 8, PortableTiles(2, 64), lengths=(0, 65), chosen=6),
    "page 48": Case((16, 1), 256, 48, PortableTiles(2, 32), pattern=Pattern(60, 3)),
    "8 bits": Case(
        (2, 2), 64, 64, PortableTiles(2, 64), lengths=(0, 7, 130), bits=(8, 8), groups=(64, 64)
    ),
    "8 bits, short parts": Case(
        (4, 1), 96, 48, PortableTiles(1, 32), "float16", (0, 65), bits=(8, 8), groups=(24, 96)
    ),
    "4 bits": Case(
        (8, 1), 128, 128, PortableTiles(3, 64), "float16", (0, 1, 63, 300), bits=(4, 4),
        groups=(32, 32),
    ),
    "4 bits, short parts": Case(
        (3, 1), 80, 16, PortableTiles(2, 32), lengths=(0, 65), bits=(4, 4), groups=(16, 16),
        pattern=Pattern(40, 9),
    ),
    "4 bits, padded": Case(
        (4, 1), 80, 16, PortableTiles(2, 32), bits=(4, 4), groups=(16, 80), lengths=(0, 65)
    ),
    "4 bits, selected": Case(
        (4, 2), 64, 64, PortableTiles(1, 64), bits=(4, 4), groups=(64, 64), chosen=2
    ),
    "8-bit keys": Case((1, 1), 64, 16, PortableTiles(2, 32), bits=(8, 16), groups=(8, 0)),
    "8-bit values": Case((1, 1), 64, 64, PortableTiles(1, 32), bits=(16, 8), groups=(0, 32)),
}  # fmt: skip


def exact(numbers):
    """The same in float32, in which quantised pages are computed anyhow."""
    return numbers if isinstance(numbers, QuantizedPages) else numbers.astype(jnp.float32)


@pytest.mark.parametrize("name", CASES)
def test_decode(name):
    case = CASES[name]
    query, keys, values, table, selected = draw(case)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    kv_heads, size = case.heads[1], case.size
    pages = list_pages(
        lengths, case.pattern, kv_heads=kv_heads, pages=keys.shape[0], size=size, table=table,
        selected=selected,
    )  # fmt: skip
    got = mosaic_portable.decode_attention(
        query, keys, values, pages, lengths,
        kv_heads=kv_heads, pattern=case.pattern, tiles=case.tiles,
    )  # fmt: skip
    want = reference.decode_attention(
        exact(query),
        exact(keys),
        exact(values),
        lengths,
        kv_heads=kv_heads,
        pattern=case.pattern,
        table=table,
        selected=selected,
    )
    assert got.out.dtype == query.dtype and got.lse.dtype == jnp.float32
    nothing = np.isneginf(want.lse)
    assert nothing[0].all()
    np.testing.assert_array_equal(np.isneginf(got.lse), nothing)
    np.testing.assert_array_equal(got.out[nothing], 0)
    # Weights, and products of query and scales, are rounded to 16 bits.
    np.testing.assert_allclose(got.out.astype(jnp.float32), want.out, rtol=1e-2, atol=1e-2)
    # Products of 16-bit numbers are exact in float32; only their order differs.
    close = 1e-5 if case.bits[0] == 16 else 1e-2
    np.testing.assert_allclose(got.lse, want.lse, rtol=close, atol=close)


def attend(query, keys, values, physical, logical, tiles):
    """One row of 130 tokens."""
    pages = PageList(jnp.asarray(physical, jnp.int32), jnp.asarray(logical, jnp.int32))
    return mosaic_portable.decode_attention(
        query, keys, values, pages, jnp.asarray([130], jnp.int32),
        kv_heads=1, pattern=DENSE, tiles=tiles,
    )  # fmt: skip


@pytest.mark.parametrize("tiles", [PortableTiles(1, 64), PortableTiles(5, 32)])
def test_entries_without_a_page_are_not_read(tiles):
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.normal(size=(1, 2, 32)), jnp.bfloat16)
    keys, values = (jnp.asarray(rng.normal(size=(5, 32, 32)), jnp.bfloat16) for _ in range(2))
    keys, values = (each.at[jnp.asarray([0, 4])].set(jnp.nan) for each in (keys, values))
    # Page 0 would be what a clamped -1 reads; logical page 3 has one page, page 4 of the table two.
    physical, logical = [[[-1, 2, 4, -1, 1, -1]]], [[[0, 1, -1, 2, 3, -1]]]
    got = attend(query, keys, values, physical, logical, tiles)
    table = jnp.asarray([[[-1, 2, -1, 1, -1]]], jnp.int32)
    want = reference.decode_attention(
        exact(query), exact(keys), exact(values),
        jnp.asarray([130], jnp.int32), kv_heads=1, pattern=DENSE, table=table, selected=None,
    )  # fmt: skip
    np.testing.assert_allclose(got.out.astype(jnp.float32), want.out, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("entries", [0, 3])
def test_an_empty_list_sees_nothing(entries):
    query = jnp.ones((1, 2, 32), jnp.float16)
    pool = jnp.full((2, 16, 32), jnp.nan, jnp.float16)
    empty = np.full((1, 1, entries), -1)
    got = attend(query, pool, pool, empty, empty, PortableTiles(2, 32))
    np.testing.assert_array_equal(got.out, 0)
    np.testing.assert_array_equal(got.lse, -np.inf)


REFUSALS = [
    ((2, 16, "float32", 16, 0), "bfloat16 or float16, not float32"),
    ((2, 24, "bfloat16", 16, 0), "head_dim that is a multiple of 16.*not 24"),
    ((2, 272, "bfloat16", 16, 0), "256 at the most, not 272"),
    ((17, 64, "bfloat16", 16, 0), "16 query heads a KV head, not 17"),
    ((2, 64, "bfloat16", 12, 0), "8 tokens at a time; a page size of 12 does"),
    ((2, 64, "bfloat16", 16, 4), "a page size of 16 or a key group of 4 tokens"),
    ((2, 80, "bfloat16", 8, 8), "cannot spread 8 rows of 40 stored numbers of key_pages"),
]


@pytest.mark.parametrize("shapes,reason", REFUSALS)
def test_refusals(shapes, reason):
    heads, dim, dtype, size, group = shapes
    query = jnp.zeros((1, heads, dim), dtype)
    keys = values = jnp.zeros((2, size, dim), dtype)
    if group:
        keys = quantize(keys, bits=4, by="channel", group=group)
    empty = PageList(*(jnp.full((1, 1, 1), -1, jnp.int32),) * 2)
    with pytest.raises(ValueError, match=f"portable decode kernel.*{reason}"):
        mosaic_portable.decode_attention(
            query, keys, values, empty, jnp.asarray([0], jnp.int32),
            kv_heads=1, pattern=DENSE, tiles=PortableTiles(1, 32),
        )  # fmt: skip
    if heads <= 16:
        assert mosaic_portable.unsupported(query, keys, values)


def test_dtypes_that_differ_are_refused():
    query = jnp.zeros((1, 2, 64), jnp.float16)
    keys, values = jnp.zeros((2, 16, 64), jnp.float16), jnp.zeros((2, 16, 64), jnp.bfloat16)
    reason = mosaic_portable.unsupported(query, keys, values)
    assert reason == "needs value_pages of the query's dtype float16, not bfloat16"


@pytest.mark.parametrize("tiles", [PortableTiles(0, 32), PortableTiles(1, 48)])
def test_tiles_that_do_not_fit_are_refused(tiles):
    query, pool = jnp.zeros((1, 1, 32), jnp.float16), jnp.zeros((1, 16, 32), jnp.float16)
    with pytest.raises(ValueError, match="tiles = PortableTiles.*multiple of 32"):
        attend(query, pool, pool, [[[0]]], [[[0]]], tiles)


@pytest.mark.parametrize("dim,size,bits", [(64, 16, 16), (128, 64, 16), (256, 64, 4), (80, 8, 8)])
@pytest.mark.parametrize("card", CARDS)
def test_default_tiles(card, dim, size, bits):
    shape = {"kv_heads": 8, "group": 4, "size": size, "dim": dim, "bits": bits}
    for batch, tokens in ((1, 131072), (1, 4096), (64, 2048), (1, size)):
        listed = tokens // size
        default = mosaic_portable.default_tiles(CARDS[card], batch=batch, listed=listed, **shape)
        found = mosaic_portable.candidate_tiles(CARDS[card], batch=batch, listed=listed, **shape)
        assert found[0] == default and len(found) == len(set(found))
        for tiles in found:
            assert tiles.keys % 32 == 0 and 1 <= tiles.splits <= -(-tokens // tiles.keys)
        if tokens == 131072:
            # Whole rounds of as many blocks as the card holds, less a few.
            blocks = 8 * default.splits
            assert blocks >= 1.8 * CARDS[card].processors


def test_races_raise():
    """What the other tests rely on: two blocks that write one place are found."""

    def body(out_ref):
        out_ref[...] = jax.lax.broadcast(jax.lax.axis_index("block").astype(jnp.float32), (128,))

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), grid=(2,), grid_names=("block",)
    )
    with pytest.raises(Exception, match="[Rr]ace"):
        jax.block_until_ready(kernel())
