"""Patterns, block tables and chosen pages: which pages are read, and attention over them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_numpy import attend, visible
from jax.experimental import checkify

from pallas_kernels import (
    decode_attention,
    dequantize,
    page_scores,
    prefill_attention,
    quantize,
    summarize_pages,
    top_k,
)
from pallas_kernels.page_lists import list_pages, visible_pages
from pallas_kernels.patterns import Pattern

STATIC = ("kv_heads", "window", "sinks", "stride", "implementation")
decode = jax.jit(decode_attention, static_argnames=STATIC)
prefill = jax.jit(prefill_attention, static_argnames=(*STATIC, "query_block"))

# float32: rounding of sums of up to 130 products.
TOLERANCE = 1e-5


def assert_near(got, want):
    np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)


PATTERNS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 20},
    {"window": 20, "sinks": 4},
    {"window": 20, "sinks": 20, "stride": 9},
    {"window": 3, "stride": 33},
    {"window": 2, "stride": 2},
    {"window": 1, "stride": 1},
    {"window": 500, "sinks": 3, "stride": 5},
]
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 130]


def int32(values):
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize("options", PATTERNS)
@pytest.mark.parametrize("size", [1, 16, 48])
def test_the_pages_of_a_pattern_are_those_that_hold_a_visible_position(options, size):
    count = -(-130 // size) + 1
    pages = np.asarray(visible_pages(int32(LENGTHS), Pattern(**options), size, count))
    for length, row in zip(LENGTHS, pages, strict=True):
        needed = {key // size for key in visible(length - 1, **{"window": None, **options})}
        listed = row[row >= 0].tolist()
        assert len(set(listed)) == len(listed)
        assert needed <= set(listed) <= set(range(-(-length // size)))
        if "stride" not in options:  # a stride may list pages that hold no multiple of it
            assert needed == set(listed)


def test_a_window_lists_few_pages_of_many():
    pages = visible_pages(int32([100_000]), Pattern(1024, 4), 64, 2048)
    assert pages.shape == (1, 17 + 1)
    pages = visible_pages(int32([100_000]), Pattern(1024, 4, 1000), 64, 2048)
    assert pages.shape[1] <= 17 + 1 + 132


def test_literal_pages():
    """Two sequences of two KV heads, pages of 4: what the table lacks or no row holds is out."""
    table = int32([[[7, 5, -1], [6, 4, 2]], [[0, 1, 3], [8, 9, 10]]])
    pages = list_pages(
        int32([9, 4]), Pattern(), kv_heads=2, pages=11, size=4, table=table, selected=None
    )
    np.testing.assert_array_equal(
        pages.physical, [[[7, 5, -1], [6, 4, 2]], [[0, -1, -1], [8, -1, -1]]]
    )
    np.testing.assert_array_equal(
        pages.logical, [[[0, 1, -1], [0, 1, 2]], [[0, -1, -1], [0, -1, -1]]]
    )
    chosen = int32([[[2, 0], [2, -1]], [[0, 1], [1, 0]]])
    pages = list_pages(
        int32([9, 4]), Pattern(), kv_heads=2, pages=11, size=4, table=table, selected=chosen
    )
    np.testing.assert_array_equal(pages.physical, [[[-1, 7], [2, -1]], [[0, -1], [-1, 8]]])


@dataclasses.dataclass
class Scene:
    """Tokens of each row and their pages, scattered over a pool whose spare memory is NaN."""

    key: np.ndarray  # B S K D
    value: np.ndarray
    pools: tuple[jax.Array, jax.Array]
    table: np.ndarray  # B K C
    size: int


def scene(rng, ends, kv_heads, dim, size, *, missing=()):
    """`missing`: (row, KV head, logical page) entries of -1."""
    count = -(-max(*ends, 1) // size)
    number = len(ends) * kv_heads * count + 7
    table = rng.permutation(number)[: len(ends) * kv_heads * count]
    table = table.reshape(len(ends), kv_heads, count).astype(np.int32)
    tokens = rng.normal(size=(2, len(ends), count * size, kv_heads, dim)).astype(np.float32)
    pools = np.full((2, number, size, dim), np.nan, np.float32)
    for row, end in enumerate(ends):
        for head in range(kv_heads):
            for slot in range(end):
                page = table[row, head, slot // size]
                pools[:, page, slot % size] = tokens[:, row, slot, head]
    for where in missing:
        table[where] = -1
    return Scene(tokens[0], tokens[1], (jnp.asarray(pools[0]), jnp.asarray(pools[1])), table, size)


def allowed(scene, row, lists):
    """The slots of listed pages that the table has, of each KV head."""
    table = scene.table[row]
    return [
        [
            page * scene.size + slot
            for page in pages
            if 0 <= page and table[head, page] >= 0
            for slot in range(scene.size)
        ]
        for head, pages in enumerate(lists)
    ]


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("options", PATTERNS)
def test_decode_over_tables_equals_numpy(options, chosen, implementation):
    """Lengths of all kinds, a missing page, chosen pages in any order with gaps."""
    rng = np.random.default_rng(3)
    held = scene(rng, LENGTHS, 2, 16, 16, missing=[(7, 0, 1), (6, 1, 3)])
    count = held.table.shape[2]
    lists = np.full((len(LENGTHS), 2, 5), -1, np.int32)
    for row in range(len(LENGTHS)):
        for head in range(2):
            lists[row, head, rng.permutation(5)[:4]] = rng.permutation(count)[:4]
    query = rng.normal(size=(len(LENGTHS), 6, 16)).astype(np.float32)
    out, lse = decode(
        query, *held.pools, int32(LENGTHS), kv_heads=2, table=held.table,
        selected=lists if chosen else None, implementation=implementation, **options,
    )  # fmt: skip
    pattern = {"window": None, **options}
    for row, length in enumerate(LENGTHS):
        everything = [range(count)] * 2
        slots = allowed(held, row, lists[row] if chosen else everything)
        one = attend(
            query[row][None], held.key[row], held.value[row], [length - 1], allowed=[slots],
            **pattern,
        )  # fmt: skip
        assert_near(out[row], one[0][0])
        assert_near(lse[row], one[1][0])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("block", [None, 7])
@pytest.mark.parametrize("options", PATTERNS)
def test_prefill_over_tables_equals_numpy(options, block, implementation):
    """Chunks of 20 behind nothing, behind much, none at all, and shorter than the chunk."""
    rng = np.random.default_rng(4)
    starts, counts = [0, 110, 9, 40], [20, 20, 0, 13]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    held = scene(rng, ends, 2, 16, 16, missing=[(1, 0, 1)])
    count = held.table.shape[2]
    blocks = 1 if block is None else -(-20 // block)
    lists = np.full((4, 2, blocks, 4), -1, np.int32)
    for where in np.ndindex(4, 2, blocks):
        lists[where][rng.permutation(4)[:3]] = rng.permutation(count)[:3]
    query = rng.normal(size=(4, 20, 6, 16)).astype(np.float32)
    for row, number in enumerate(counts):
        query[row, number:] = np.nan
    out, lse = prefill(
        query, *held.pools, int32(starts), int32(counts), kv_heads=2, table=held.table,
        selected=None if block is None else lists, query_block=block,
        implementation=implementation, **options,
    )  # fmt: skip
    pattern = {"window": None, **options}
    for row in range(4):
        positions = [starts[row] + t if t < counts[row] else -1 for t in range(20)]
        slots = [
            allowed(held, row, [range(count)] * 2 if block is None else lists[row, :, t // block])
            for t in range(20)
        ]
        one = attend(
            query[row], held.key[row], held.value[row], positions, allowed=slots, **pattern
        )
        assert_near(out[row], one[0])
        assert_near(lse[row], one[1])


@pytest.mark.parametrize("options", [{}, {"window": 20, "sinks": 4, "stride": 9}])
@pytest.mark.parametrize("bits", [8, 4])
def test_decode_of_quantised_pages_equals_that_of_their_numbers(bits, options):
    """Both layouts, in place and listed; scales of 8 tokens of a channel, 8 channels of a token."""
    rng = np.random.default_rng(5)
    lengths = int32([0, 33, 64])
    query = rng.normal(size=(3, 6, 16)).astype(np.float32)
    pools = [jnp.asarray(rng.normal(size=(24, 16, 16)), jnp.float32) for _ in range(2)]
    coded = [
        quantize(pool, bits=bits, by=by, group=8)
        for pool, by in zip(pools, ("channel", "token"), strict=True)
    ]
    plain = [dequantize(each, jnp.float32) for each in coded]
    for table in (None, np.arange(24, dtype=np.int32)[::-1].reshape(3, 2, 4)):
        given = {"kv_heads": 2, "table": table, **options}
        want = decode(query, *plain, lengths, implementation="reference", **given)
        for implementation in ("reference", "xla"):
            got = decode(query, *coded, lengths, implementation=implementation, **given)
            jax.tree.map(assert_near, got, want)


def test_a_budget_of_no_pages_sees_nothing():
    rng = np.random.default_rng(6)
    pools = [jnp.asarray(rng.normal(size=(8, 4, 16)), jnp.float32) for _ in range(2)]
    query = jnp.asarray(rng.normal(size=(2, 4, 16)), jnp.float32)
    for lists in (jnp.zeros((2, 2, 0), jnp.int32), jnp.full((2, 2, 3), -1, jnp.int32)):
        for implementation in ("reference", "xla"):
            out, lse = decode(
                query, *pools, int32([5, 8]), kv_heads=2, selected=lists,
                implementation=implementation,
            )  # fmt: skip
            assert (out == 0).all() and jnp.isneginf(lse).all()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_top_pages_from_one_to_all(implementation):
    """Budgets of 1 page, some, all and more than there are: the last two are dense."""
    rng = np.random.default_rng(7)
    pools = [jnp.asarray(rng.normal(size=(24, 16, 16)), jnp.float32) for _ in range(2)]
    query = jnp.asarray(rng.normal(size=(3, 6, 16)), jnp.float32)
    lengths = int32([0, 33, 64])
    summaries = summarize_pages(pools[0], lengths, kv_heads=2)
    scores = page_scores(query, summaries, lengths, kv_heads=2, size=16)
    given = {"kv_heads": 2, "implementation": implementation}
    dense = decode(query, *pools, lengths, **given)
    for budget in (1, 2, 4, 9):
        chosen = top_k(scores, budget)
        got = decode(query, *pools, lengths, selected=chosen, **given)
        held = (np.asarray(chosen) >= 0).sum(-1)
        np.testing.assert_array_equal(held, np.minimum([[0], [3], [4]], budget).repeat(2, 1))
        if budget >= 4:
            jax.tree.map(assert_near, got, dense)
        else:
            assert (got.lse[2] < dense.lse[2]).all()  # fewer keys, a smaller sum


def small(**changes):
    zeros = jnp.zeros((8, 4, 16))
    arguments = {
        "query": jnp.zeros((2, 4, 16)), "key_pages": zeros, "value_pages": zeros,
        "lengths": int32([1, 2]), "kv_heads": 2,
    }  # fmt: skip
    return {**arguments, **changes}


@pytest.mark.parametrize(
    "changes,error,message",
    [
        ({"selected": jnp.full((2, 2, 1), 2, jnp.int32)}, ValueError, "selected .* outside -1 .*2"),
        ({"selected": jnp.full((2, 2, 1, 1), 0, jnp.int32)}, ValueError, "expected .B, K, M."),
        ({"selected": jnp.full((2, 1, 1), 0, jnp.int32)}, ValueError, r"selected .* \(2, 2\)"),
        ({"selected": jnp.zeros((2, 2, 1))}, TypeError, "selected is float32"),
    ],
)  # fmt: skip
def test_wrong_lists_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        decode_attention(**small(**changes))


@pytest.mark.parametrize("page", [-2, 8, 2**30])
def test_ids_inside_jit_are_looked_at_under_checkify(page):
    """Unasked they weigh 0, as -1 does: nothing outside the pool is read."""
    table = jnp.full((2, 2, 2), page, jnp.int32).at[0, 0].set(int32([3, -1]))

    def run(table):
        return decode_attention(**small(table=table))

    error, _ = jax.jit(checkify.checkify(run))(table)
    with pytest.raises(checkify.JaxRuntimeError, match=f"table holds .* -1 ... 7 .*: {page}"):
        error.throw()
    error, _ = jax.jit(checkify.checkify(run))(jnp.full((2, 2, 2), 7, jnp.int32))
    error.throw()
    assert jnp.isneginf(jax.jit(run)(table).lse[1]).all()


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"query_block": 4}, "selected is not given, query_block = 4"),
        ({"selected": jnp.zeros((2, 2, 1, 1), jnp.int32)}, "query_block = None"),
        ({"selected": jnp.zeros((2, 2, 1, 1), jnp.int32), "query_block": 0}, "query_block = 0"),
        ({"selected": jnp.zeros((2, 2, 1, 1), jnp.int32), "query_block": 2}, r"\[B, K, 2, M\]"),
    ],
)
def test_wrong_blocks_of_queries_are_named(changes, message):
    arguments = small(**changes, query=jnp.zeros((2, 3, 4, 16)))
    lengths = arguments.pop("lengths")
    with pytest.raises(ValueError, match=message):
        prefill_attention(**arguments, starts=lengths, counts=lengths)


def test_quantised_pages_are_checked():
    keys = quantize(jnp.ones((8, 4, 16)), bits=8, by="channel", group=4)
    values = quantize(jnp.ones((8, 4, 16)), bits=8, by="token", group=16)
    decode_attention(**small(key_pages=keys, value_pages=values))
    with pytest.raises(ValueError, match="key_pages have 8 bits by token"):
        decode_attention(**small(key_pages=values, value_pages=values))
    cut = dataclasses.replace(keys, scales=keys.scales[:, :, :8])
    with pytest.raises(ValueError, match=r"key_pages: scales \(8, 1, 8\)"):
        decode_attention(**small(key_pages=cut, value_pages=values))
    lengths = int32([1, 1])
    anything: Any = keys  # a type checker would refuse it too
    with pytest.raises(TypeError, match="key_pages are quantised"):
        prefill_attention(
            jnp.zeros((2, 1, 4, 16)), anything, anything, lengths, lengths, kv_heads=2
        )  # fmt: skip
