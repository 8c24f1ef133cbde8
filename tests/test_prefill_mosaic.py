"""The Hopper prefill kernel in the interpreter, against the reference, and the work that it does.

A race, a read out of bounds or of what was never written raises there. Every slot that no tile of
queries should read holds NaN: those behind a row's end, pages that no row owns, and key blocks that
a pattern or a list passes over.

The interpreter runs the warpgroups of a block as threads that wait for each other inside of XLA's
pool, and where that has no more threads than warpgroups they wait forever. Its size is the number
of processors unless NPROC says otherwise when the process begins, so the cases run in a child.
"""

import dataclasses
import functools
import os
import random
import subprocess
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cards import CARDS
from pallas_kernels.patterns import DENSE, Pattern
from pallas_kernels.prefill import mosaic, reference
from pallas_kernels.prefill.key_blocks import (
    QueryTiles,
    block_at,
    blocks_visited,
    pattern_visits,
    selected_pages,
)
from pallas_kernels.prefill.mosaic import PrefillTiles


@dataclasses.dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    dim: int
    size: int
    tiles: PrefillTiles
    pattern: Pattern = DENSE
    dtype: str = "bfloat16"
    tokens: int = 65
    starts: tuple[int, ...] = (0, 0, 3, 300)
    counts: tuple[int, ...] = (7, 65, 64, 1)
    tabled: bool = False
    query_block: int | None = None
    listed: int = 0


CASES = {
    "one head a group, two warpgroups, an empty row, a chunk behind cached keys": Case(
        1, 1, 64, 16, PrefillTiles(64, 64, 2), starts=(0, 0, 0, 62), counts=(0, 1, 63, 65)
    ),
    "group of 4, blocks of 128 keys made of pages of 64, window of one": Case(
        4, 1, 128, 64, PrefillTiles(64, 128, 2, 4, 1), Pattern(1), "float16"
    ),
    "group of 3, head of 80, window and sinks, missing pages": Case(
        3, 1, 80, 16, PrefillTiles(64, 64, 3, 3, 2), Pattern(20, 5), tabled=True
    ),
    "group of 7, head of 96, pages of 128, a stride longer than a block": Case(
        7, 1, 96, 128, PrefillTiles(64, 64, 2, 7, 2), Pattern(30, 3, 70), tokens=17,
        starts=(0, 290, 600), counts=(17, 9, 17),
    ),
    "a stride shorter than a block, two KV heads, half a group a tile": Case(
        4, 2, 64, 48, PrefillTiles(64, 64, 2, 1, 2), Pattern(5, 0, 7), starts=(0, 100),
        counts=(65, 65), tabled=True,
    ),
    "selected pages of 16, four a block, blocks of queries cut short": Case(
        8, 2, 64, 16, PrefillTiles(64, 64, 2, 4, 1), tokens=70, query_block=24, listed=6,
        starts=(0, 130), counts=(65, 70), tabled=True,
    ),
    "selected pages of 128 in halves, under a window": Case(
        4, 1, 64, 128, PrefillTiles(64, 64, 2, 4, 2), Pattern(123, 4), query_block=64, listed=4,
        starts=(0, 300), counts=(60, 65),
    ),
    "values in parts of 64 columns, one query": Case(
        2, 1, 256, 8, PrefillTiles(64, 64, 2, 2, 1), tokens=1, starts=(0, 64, 65),
        counts=(1, 1, 0),
    ),
}  # fmt: skip


def draw(case: Case):
    """Arguments of `prefill_attention`, NaN wherever it has no business."""
    rng = np.random.default_rng(1)
    batch, kv_heads, size = len(case.starts), case.kv_heads, case.size
    starts, counts = np.array(case.starts, np.int32), np.array(case.counts, np.int32)
    count = -(-int((starts + counts).max()) // size) + 1
    query = rng.normal(size=(batch, case.tokens, case.heads, case.dim))
    query[np.arange(case.tokens) >= counts[:, None]] = np.nan
    keys, values = rng.normal(size=(2, batch, kv_heads, count, size, case.dim))
    selected = None
    if case.query_block:
        blocks = -(-case.tokens // case.query_block)
        lists = [rng.permutation(count)[: case.listed] for _ in range(batch * kv_heads * blocks)]
        selected = np.array(lists, np.int32).reshape(batch, kv_heads, blocks, -1)
        selected[..., 1] = -1
        first = (starts // size)[:, None, None, None]  # one that the first queries see
        selected[selected == first] = -1
        selected[..., :1] = first
    table = np.arange(batch * kv_heads * count, dtype=np.int32).reshape(batch, kv_heads, count)
    if case.tabled:
        table = table[::-1, :, ::-1].copy()
        table[:, :, 1::3] = -1
    touched = may_read(case, starts, counts, count, selected)
    pool = []
    for pages in (keys, values):
        pages[~touched] = np.nan
        flat = np.full((batch * kv_heads * count + 2, size, case.dim), np.nan)
        flat[table[table >= 0]] = pages[table >= 0]
        pool.append(flat if case.tabled else flat[:-2])
        if not case.tabled:
            order = pages.swapaxes(1, 2)  # the contiguous layout: KV heads side by side
            pool[-1] = order.reshape(-1, size, case.dim)
    arrays = [jnp.asarray(a, case.dtype) for a in (query, *pool)]
    options = dict(
        kv_heads=kv_heads,
        pattern=case.pattern,
        table=jnp.asarray(table) if case.tabled else None,
        selected=None if selected is None else jnp.asarray(selected),
        query_block=case.query_block or case.tokens,
    )
    return (*arrays, jnp.asarray(starts), jnp.asarray(counts)), options


def may_read(case: Case, starts, counts, count, selected):
    """Slots [B, K, C, P] of the key blocks, or pages, that some query of the row sees part of."""
    slots = np.arange(count * case.size)
    offsets = np.arange(case.tokens)
    query = (starts[:, None] + offsets)[:, :, None]
    seen = np.asarray(case.pattern.visible(jnp.asarray(slots), jnp.asarray(query)))
    seen = seen & (offsets < counts[:, None])[:, :, None]
    seen = np.broadcast_to(seen[:, None], (len(starts), case.kv_heads, *seen.shape[1:]))
    run = case.tiles.keys
    if case.query_block is not None:
        run = case.size
        listed = (selected[..., None] == np.arange(count)).any(-2)  # B K Q C
        listed = np.repeat(listed, case.query_block, axis=2)[:, :, : case.tokens]
        seen = seen & np.repeat(listed, case.size, axis=3)
    held = slots < (starts + counts)[:, None, None]
    if case.pattern.stride is not None and case.pattern.stride < run:
        read = np.broadcast_to(held, seen.any(2).shape)
    else:
        edges = np.arange(0, len(slots), run)
        blocks = np.logical_or.reduceat(seen.any(2), edges, axis=2)
        read = np.repeat(blocks, run, axis=2)[:, :, : len(slots)] & held
    return read.reshape(len(starts), case.kv_heads, count, case.size)


def interpret(path: str) -> None:
    """Runs every case and writes what comes of it, an error too, to a file."""
    found = {}
    for index, case in enumerate(CASES.values()):
        arrays, options = draw(case)
        run = functools.partial(mosaic.prefill_attention, tiles=case.tiles, **options)
        try:
            with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
                got = jax.jit(run)(*arrays)
            assert got.out.dtype == arrays[0].dtype
            found[f"out{index}"] = np.asarray(got.out, np.float32)
            found[f"lse{index}"] = np.asarray(got.lse)
        except Exception:
            found[f"error{index}"] = np.array(traceback.format_exc())
    np.savez(path, **found)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("prefill") / "found.npz")
    env = {**os.environ, "NPROC": "16", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, __file__, path], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(path) as found:
        return dict(found)


@pytest.mark.parametrize("index,name", list(enumerate(CASES)))
def test_matches_reference(interpreted, index, name):
    """16-bit weights and outputs: 1e-2. Sums of exact products in float32: 1e-5."""
    case = CASES[name]
    assert f"error{index}" not in interpreted, str(interpreted[f"error{index}"])
    out, lse = interpreted[f"out{index}"], interpreted[f"lse{index}"]
    arrays, options = draw(case)
    query, key, value = (array.astype(jnp.float32) for array in arrays[:3])
    want = reference.prefill_attention(query, key, value, *arrays[3:], **options)
    assert out.shape == query.shape
    blind = np.isneginf(np.asarray(want.lse))
    padding = np.arange(case.tokens) >= np.asarray(arrays[4])[:, None]
    assert blind[padding].all() and not blind.all()
    assert (out[blind] == 0).all() and np.isneginf(lse[blind]).all()
    np.testing.assert_allclose(out[~blind], np.asarray(want.out)[~blind], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(lse[~blind], np.asarray(want.lse)[~blind], rtol=1e-5, atol=1e-5)


PATTERNS = [
    DENSE, Pattern(1), Pattern(64), Pattern(65, 1), Pattern(200, 70), Pattern(1, 0, 64),
    Pattern(10, 5, 100), Pattern(10, 130, 128), Pattern(3, 0, 1000), Pattern(7, 2, 3),
    Pattern(5, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_visits_only_what_is_seen(pattern, keys):
    """The visits are the key blocks with a visible position, each once and in order."""
    draws = random.Random(3)
    spans = [(0, 0), (5, 4), (63, 64), (64, 127), (0, 127), (640, 640)]
    for _ in range(40):
        first = draws.randrange(1500)
        spans.append((first, first + draws.randrange(130)))
    for first, last in spans:
        visits = pattern_visits(np.int32(first), np.int32(last), pattern, keys)
        got = [int(block_at(i, visits, pattern, keys)) for i in range(int(visits.total))]
        position = np.arange(last + 1)
        query = np.arange(first, last + 1)[:, None]
        seen = np.broadcast_to(position <= query, (len(query), len(position)))
        if pattern.window is not None:
            near = position > query - pattern.window
            near = near | (position < pattern.sinks)
            near = near | (position % (pattern.stride or 1 << 30) == 0) & (
                pattern.stride is not None
            )
            seen = seen & near
        want = np.unique(position[seen.any(0)] // keys).tolist() if len(query) else []
        if pattern.stride is not None and pattern.stride < keys and want:
            want = list(range(want[-1] + 1))
        assert got == want, (first, last)


def test_work_of_a_chunk():
    """128 queries behind 8192 cached keys: a window reads 2 or 3 blocks of 64 where all are 130."""
    tiles = QueryTiles(128, 128, 64)
    starts, counts = jnp.array([0, 8192, 8192], jnp.int32), jnp.array([128, 128, 0], jnp.int32)
    count = functools.partial(blocks_visited, starts, counts, tiles=tiles, keys=64)
    assert count(pattern=DENSE).tolist() == [[1, 2], [129, 130], [0, 0]]
    assert count(pattern=Pattern(65)).tolist() == [[1, 2], [2, 2], [0, 0]]
    assert count(pattern=Pattern(65, 4)).tolist() == [[1, 2], [3, 3], [0, 0]]
    # Positions 0, 1000 ... 8000 lie in 9 blocks, the first of which holds the sinks too.
    assert count(pattern=Pattern(65, 4, 1000)).tolist() == [[1, 2], [11, 11], [0, 0]]


def test_selected_pages_leaves_out_what_is_not_seen():
    """-1, pages behind the tile, before its window, or that the table lacks are not read."""
    tiles = QueryTiles(20, 16, 8)  # tiles of 8 queries: two a block, the last one of 4
    table = jnp.arange(12, dtype=jnp.int32).reshape(1, 1, 12)[..., ::-1].at[0, 0, 3].set(-1)
    chosen = jnp.array([[[[11, -1, 2, 3, 10, 0], [11, 9, -1, -1, 5, 1]]]], jnp.int32)
    rows = jnp.array([160], jnp.int32), jnp.array([18], jnp.int32)
    pages = functools.partial(selected_pages, chosen, table, *rows, tiles=tiles, size=16, pool=12)

    def lists(found):
        number = np.asarray(found.number)[0, 0]
        return [np.asarray(found.logical)[0, 0, i, :n].tolist() for i, n in enumerate(number)]

    assert lists(pages(pattern=DENSE)) == [[2, 10, 0], [2, 10, 0], [11, 9, 5, 1], []]
    assert lists(pages(pattern=Pattern(20, 3))) == [[10, 0], [10, 0], [11, 9], []]
    assert lists(pages(pattern=Pattern(2, 0, 80))) == [[10, 0], [10, 0], [11, 5], []]
    first = pages(pattern=DENSE)
    assert np.asarray(first.physical)[0, 0, 0, :3].tolist() == [9, 1, 11]


SHAPES = [(d, p, g, t) for d in (64, 80, 96, 128, 256) for p, g, t in ((16, 1, 300), (128, 7, 40))]


@pytest.mark.parametrize("dim,size,group,tokens", SHAPES)
def test_tiles_fit_and_lower(dim, size, group, tokens):
    """Every candidate fits the card, and the default one lowers for CUDA."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    query, pages = shape((2, tokens, group, dim)), shape((2 * 8, size, dim))
    assert mosaic.unsupported(query, pages, pages, tokens) is None
    options = dict(tokens=tokens, group=group, size=size, dim=dim)
    for card in (CARDS["h100"], CARDS["h200"]):
        for block in (None, 64):
            found = mosaic.candidate_tiles(card, **options, query_block=block)
            assert mosaic.default_tiles(card, **options, query_block=block) == found[0]
            for tiles in found:
                tiles.check(group)
                assert tiles.shared_memory(dim) < card.shared_per_block
    run = functools.partial(
        mosaic.prefill_attention, kv_heads=1, pattern=Pattern(100, 4, 256), table=None,
        selected=None, query_block=tokens, tiles=mosaic.default_tiles(CARDS["h100"], **options),
    )  # fmt: skip
    lowered = (
        jax.jit(run).trace(query, pages, pages, rows, rows).lower(lowering_platforms=("cuda",))
    )
    assert "mosaic_gpu" in lowered.as_text()


def test_refusals():
    """What is not served is said by name."""
    shape = jax.ShapeDtypeStruct
    query, pages = shape((1, 8, 2, 64), jnp.bfloat16), shape((4, 16, 64), jnp.bfloat16)
    half = shape((4, 16, 64), jnp.float16)
    assert mosaic.unsupported(query, pages, pages) is None
    assert "float32" in (mosaic.unsupported(query.update(dtype=jnp.float32), pages, pages) or "")
    assert "value_pages" in (mosaic.unsupported(query, pages, half) or "")
    small = shape((4, 12, 64), jnp.bfloat16)
    assert "12" in (mosaic.unsupported(query, small, small) or "")
    odd = shape((1, 8, 2, 72), jnp.bfloat16)
    assert "72" in (mosaic.unsupported(odd, pages, pages) or "")
    for tiles in (
        PrefillTiles(32, 64, 2), PrefillTiles(64, 48, 2), PrefillTiles(64, 64, 0),
        PrefillTiles(64, 64, 2, 2), PrefillTiles(64, 64, 2, 1, 4), PrefillTiles(64, 64, 2, 9),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="tiles = "):
            tiles.check(9)


if __name__ == "__main__":
    interpret(sys.argv[1])
