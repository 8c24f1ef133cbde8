"""Prefill and decode attention, every implementation, against float64 numpy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_numpy import attend, to_pages

from pallas_kernels import (
    AttentionOutput,
    decode_attention,
    merge_attention,
    prefill_attention,
    reference_attention,
)

IMPLEMENTATIONS = ["reference", "xla"]
STATIC = ("kv_heads", "window", "implementation")


def on_the_host(op: Callable, *static: str) -> Callable[..., Any]:
    """The compiled op between numpy arrays: each eager operation on a jax array of another shape
    would be a compile of its own."""
    compiled = jax.jit(op, static_argnames=static)
    return lambda *args, **options: jax.device_get(compiled(*args, **options))


decode = on_the_host(decode_attention, *STATIC)
prefill = on_the_host(prefill_attention, *STATIC)
reference = on_the_host(reference_attention)
merge = on_the_host(merge_attention)

# float32: rounding of sums of up to 1000 products. bfloat16 and float16: outputs, and the weights
# that the values are multiplied with, have 8 and 11 bits; scores are float32.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}

# H, K, D, page, window: every group of 1, 3, 4, 7, 8, 10, 20, 24, page of 1, 8, 16, 48, 64 and
# head dim of 16, 64, 80, 96, 128, 192, 256; windows of one, around a page, and beyond everything.
SHAPES = [
    (4, 2, 16, 16, None),
    (6, 2, 64, 1, None),
    (6, 6, 80, 16, 65),
    (8, 2, 96, 48, None),
    (7, 1, 128, 64, 7),
    (8, 1, 64, 8, 1),
    (48, 2, 16, 48, 64),
    (40, 2, 16, 64, None),
    (80, 4, 16, 8, 63),
    (3, 1, 192, 48, 5000),
    (2, 2, 256, 64, None),
]
HALVES = [SHAPES[0], SHAPES[2], SHAPES[4], SHAPES[6]]
CASES = [(*shape, "float32") for shape in SHAPES]
CASES += [(*shape, "bfloat16") for shape in HALVES] + [(*SHAPES[3], "float16")]
# The reference has no tiles to get wrong: fewer shapes, to spare compiles.
CASES = [("xla", *case) for case in CASES]
CASES += [("reference", *SHAPES[1], "float32"), ("reference", *SHAPES[4], "float32")]
CASES += [("reference", *HALVES[2], "bfloat16")]
LENGTHS = [1, 7, 63, 64, 65, 1000, 0]


def draw(rng, shape, dtype):
    return rng.normal(size=shape).astype(jnp.dtype(dtype))


def keys_and_values(rng, ends, kv_heads, dim, page, dtype, spare=np.nan):
    """(key, value) [B, S, K, D] and their pages; slots at and behind each row's end are `spare`."""
    key, value = (draw(rng, (len(ends), max(ends), kv_heads, dim), dtype) for _ in range(2))
    for row, end in enumerate(ends):
        key[row, end:] = value[row, end:] = spare
    pages = [to_pages(each, page, spare, extra=1) for each in (key, value)]
    return key, value, pages


def int32(values):
    return np.asarray(values, np.int32)


def assert_near(result, out, lse, dtype):
    tolerance = TOLERANCE[dtype]
    assert result.out.dtype == jnp.dtype(dtype) and result.lse.dtype == jnp.float32
    np.testing.assert_allclose(
        np.asarray(result.out, np.float64), out, rtol=tolerance, atol=tolerance
    )
    np.testing.assert_allclose(result.lse, lse, rtol=tolerance, atol=tolerance)
    blind = np.isneginf(lse)
    assert (np.asarray(result.out)[blind] == 0).all() and np.isneginf(result.lse[blind]).all()


@pytest.mark.parametrize("implementation,heads,kv_heads,dim,page,window,dtype", CASES)
def test_decode_equals_numpy(implementation, heads, kv_heads, dim, page, window, dtype):
    """All lengths in one batch, an empty row among them, all spare memory NaN."""
    rng = np.random.default_rng(heads)
    key, value, pages = keys_and_values(rng, LENGTHS, kv_heads, dim, page, dtype)
    query = draw(rng, (len(LENGTHS), heads, dim), dtype)
    result = decode(
        query, *pages, int32(LENGTHS),
        kv_heads=kv_heads, window=window, implementation=implementation,
    )  # fmt: skip
    parts = [
        attend(query[row][None], key[row], value[row], [length - 1], window)
        for row, length in enumerate(LENGTHS)
    ]
    out, lse = (np.concatenate(each) for each in zip(*parts, strict=True))
    assert_near(result, out, lse, dtype)


@pytest.mark.parametrize("lengths", [[3000, 7], [1800, 0], [20, 5]])
def test_dense_decode_of_a_pool_full_or_hardly_used(lengths):
    """XLA reads a mostly filled pool where it lies and a hardly filled one in chunks: one answer,
    and NaN in every slot that is not written."""
    slots, heads, kv_heads, dim, page = 3072, 8, 4, 128, 64
    rng = np.random.default_rng(1)
    key, value = (draw(rng, (2, slots, kv_heads, dim), "float32") for _ in range(2))
    for row, length in enumerate(lengths):
        key[row, length:] = value[row, length:] = np.nan
    pages = [to_pages(each, page, np.nan, extra=0) for each in (key, value)]
    query = draw(rng, (2, heads, dim), "float32")
    result = decode(query, *pages, int32(lengths), kv_heads=kv_heads, implementation="xla")
    parts = [
        attend(query[row][None], key[row], value[row], [length - 1], None)
        for row, length in enumerate(lengths)
    ]
    out, lse = (np.concatenate(each) for each in zip(*parts, strict=True))
    assert_near(result, out, lse, "float32")


# (tokens held before the chunk, valid tokens in it) of each row: cold, warm, empty, full, and
# chunks that end on a page's edge, one before and one behind it.
MIXED = [(0, 1), (0, 7), (0, 63), (0, 64), (0, 65), (935, 65), (7, 0), (0, 0), (63, 1), (1, 64)]
# Every query is valid and has 512 keys and more before it: blocks that need no mask.
DEEP = [(935, 65), (600, 65), (512, 65)]


def check_prefill(implementation, rows, tokens, heads, kv_heads, dim, page, window, dtype):
    rng = np.random.default_rng(dim)
    ends = [start + count for start, count in rows]
    key, value, pages = keys_and_values(rng, ends, kv_heads, dim, page, dtype)
    query = draw(rng, (len(rows), tokens, heads, dim), dtype)
    positions = []
    for row, (start, count) in enumerate(rows):
        query[row, count:] = np.nan  # padding may hold anything
        positions.append([start + t if t < count else -1 for t in range(tokens)])
    starts, counts = (int32(each) for each in zip(*rows, strict=True))
    result = prefill(
        query, *pages, starts, counts,
        kv_heads=kv_heads, window=window, implementation=implementation,
    )  # fmt: skip
    parts = [
        attend(query[row], key[row], value[row], positions[row], window) for row in range(len(rows))
    ]
    out, lse = (np.stack(each) for each in zip(*parts, strict=True))
    assert_near(result, out, lse, dtype)


@pytest.mark.parametrize("implementation,heads,kv_heads,dim,page,window,dtype", CASES)
def test_prefill_equals_numpy(implementation, heads, kv_heads, dim, page, window, dtype):
    """Rows with different numbers of cached keys before the chunk, and of tokens in it."""
    check_prefill(implementation, MIXED, 65, heads, kv_heads, dim, page, window, dtype)


@pytest.mark.parametrize("heads,page", [(4, 48), (16, 64)])
@pytest.mark.parametrize("window", [None, 65, 513])
def test_prefill_behind_a_long_context(heads, page, window):
    check_prefill("xla", DEEP, 65, heads, 2, 16, page, window, "float32")


@pytest.mark.parametrize(
    "kv_heads,page,window", [(1, 48, None), (1, 8, 300), (4, 1000, None), (1, 512, 1)]
)
def test_prefill_of_a_thousand_tokens(kv_heads, page, window):
    """Many blocks of queries and of keys, in a batch with a row that ends in the first."""
    rows = [(0, 1000), (0, 70)]
    check_prefill("xla", rows, 1000, 4, kv_heads, 16, page, window, "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 8])
def test_spare_memory_does_not_matter(implementation, window):
    """NaN, infinity or 0 in slots nobody wrote: the same bits come out."""
    results = []
    for spare in (0.0, np.nan, np.inf):
        rng = np.random.default_rng(0)
        _, _, pages = keys_and_values(rng, [9, 20, 0], 2, 16, 8, "float32", spare)
        query = draw(rng, (3, 4, 16), "float32")
        options = {"kv_heads": 2, "window": window, "implementation": implementation}
        results.append(
            (
                decode(query, *pages, int32([9, 20, 0]), **options),
                prefill(
                    np.stack([query] * 3, 1), *pages, int32([7, 17, 0]), int32([2, 3, 0]),
                    **options,
                ),
            )
        )  # fmt: skip
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])


@pytest.mark.parametrize(
    "implementation,heads,kv_heads",
    [("reference", 4, 2)]
    + [("xla", *shape) for shape in [(4, 2), (48, 2), (40, 2), (80, 4), (6, 6), (8, 1)]],
)
def test_heads_are_repeated_not_tiled(implementation, heads, kv_heads):
    """V of KV head h is the constant h: query head i gives i // (H / K)."""
    rng = np.random.default_rng(heads)
    key = draw(rng, (2, 5, kv_heads, 16), "float32")
    value = np.broadcast_to(np.arange(kv_heads, dtype=np.float32)[:, None], key.shape)
    pages = [to_pages(each, 4, np.nan) for each in (key, value)]
    query = draw(rng, (2, 3, heads, 16), "float32")
    expected = np.arange(heads) // (heads // kv_heads)
    options = {"kv_heads": kv_heads, "implementation": implementation}
    one = decode(query[:, 0], *pages, int32([5, 2]), **options).out
    many = prefill(query, *pages, int32([2, 0]), int32([3, 3]), **options).out
    for out in (one, many):
        wanted = np.broadcast_to(expected[:, None], out.shape)
        np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_window_counts_the_current_token(implementation):
    """Window 4, q = k = 0, V one-hot of the position: query 9 weighs 1/4 on 6 ... 9."""
    key = np.zeros((1, 12, 1, 16), np.float32)
    value = np.eye(12, 16, dtype=np.float32)[None, :, None]
    pages = [to_pages(each, 5, np.nan) for each in (key, value)]
    options = {"kv_heads": 1, "window": 4, "implementation": implementation}
    one = decode(np.zeros((1, 1, 16), np.float32), *pages, int32([10]), **options).out[0, 0]
    whole = prefill(
        np.zeros((1, 12, 1, 16), np.float32), *pages, int32([0]), int32([12]), **options
    ).out
    alone = prefill(
        np.zeros((1, 1, 1, 16), np.float32), *pages, int32([9]), int32([1]), **options
    ).out
    expected = np.zeros(16)
    expected[6:10] = 0.25
    for out in (one, whole[0, 9, 0], alone[0, 0, 0]):
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(whole[0, 1, 0, :3], [0.5, 0.5, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_window_of_the_length_is_no_window(implementation):
    rng = np.random.default_rng(0)
    _, _, pages = keys_and_values(rng, [12, 5], 2, 16, 8, "float32")
    query = draw(rng, (2, 4, 16), "float32")
    options = {"kv_heads": 2, "implementation": implementation}
    full, equal, shorter = (
        decode(query, *pages, int32([12, 5]), window=window, **options).out
        for window in (None, 12, 11)
    )
    np.testing.assert_allclose(equal, full, rtol=0, atol=1e-6)
    assert np.abs(shorter[0] - full[0]).max() > 1e-3
    np.testing.assert_allclose(shorter[1], full[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mask_is_stronger_than_any_score(implementation, dtype):
    """q = -20000, k = 1 and a masked 0, v = 1 and 100: a finite mask value would lose to it."""
    query = np.full((1, 1, 1), -20000, jnp.dtype(dtype))
    keys = np.array([1, 0], jnp.dtype(dtype)).reshape(1, 2, 1)
    values = np.array([1, 100], jnp.dtype(dtype)).reshape(1, 2, 1)
    options = {"kv_heads": 1, "implementation": implementation}
    one = decode(query, keys, values, int32([1]), **options)
    two = prefill(
        np.stack([query, query], 1), keys, values, int32([0]), int32([2]), **options
    )  # fmt: skip
    assert one.out.item() == 1.0 and two.out[0, 0].item() == 1.0
    assert one.lse.item() == two.lse[0, 0].item() == float(query[0, 0, 0])
    assert two.out[0, 1].item() == 100.0  # there the second key is visible, and wins


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scores_beyond_the_range_of_float16(implementation):
    """q . k = 64 * 64 * 64 is 4 times what float16 holds; scaled by 1/8 it still isn't small."""
    query = np.full((1, 1, 64), 64, np.float16)
    keys = np.stack([np.full((1, 64), 64), np.full((1, 64), 63.96875)], 1).astype(np.float16)
    values = np.stack([np.full((1, 64), 2), np.full((1, 64), 4)], 1).astype(np.float16)
    options = {"kv_heads": 1, "implementation": implementation}
    result = decode(query, keys, values, int32([2]), **options)
    out, lse = attend(query, keys.swapaxes(0, 1), values.swapaxes(0, 1), [1], None)
    assert_near(result, out, lse, "float16")


def parts_of(masks, dtype="float32"):
    rng = np.random.default_rng(0)
    query, key, value = (
        draw(rng, shape, dtype) for shape in [(2, 3, 4, 16), (2, 10, 2, 16), (2, 10, 2, 16)]
    )
    return [reference(query, key, value, mask) for mask in masks]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_parts_are_the_whole(dtype):
    """Three disjoint parts, in any order; some are empty for some queries, one query sees none."""
    rng = np.random.default_rng(1)
    owner = rng.integers(0, 4, size=(2, 3, 10))  # part 3 is seen by nobody
    owner[0, 0] = 0
    owner[1, 2] = 3
    whole, *parts = parts_of([owner < 3, *(owner == part for part in range(3))], dtype)
    for order in ([0, 1, 2], [2, 0, 1]):
        merged = merge(*(parts[index] for index in order))
        assert_near(
            merged, np.asarray(whole.out, np.float64), np.asarray(whole.lse, np.float64), dtype
        )


def test_an_empty_part_changes_nothing():
    seen = np.ones((2, 3, 10), bool)
    full, empty = parts_of([seen, ~seen])
    assert (empty.out == 0).all() and np.isneginf(empty.lse).all()
    for merged in (merge(full, empty), merge(empty, full, empty)):
        jax.tree.map(np.testing.assert_array_equal, merged, full)
    jax.tree.map(np.testing.assert_array_equal, merge(empty, empty), empty)
    jax.tree.map(np.testing.assert_array_equal, merge(full), full)


def numbers(shape, value=0.0, dtype="float32"):
    return jnp.asarray(np.full(shape, value, jnp.dtype(dtype)))


def test_merging_far_apart_scores_does_not_overflow():
    one, two = (
        AttentionOutput(numbers((1, 1, 2), value), numbers((1, 1), lse))
        for value, lse in ((3.0, -2e4), (5.0, 2e4))
    )
    merged = merge(one, two)
    assert (merged.out == 5).all() and merged.lse.item() == 2e4
    twice = merge(two, two)
    assert (twice.out == 5).all() and twice.lse.item() == pytest.approx(2e4 + np.log(2))


def test_merge_refuses_parts_that_do_not_belong_together():
    one = AttentionOutput(numbers((2, 3, 4, 16)), numbers((2, 3, 4)))
    with pytest.raises(ValueError, match="no parts"):
        merge_attention()
    with pytest.raises(ValueError, match="part 1 has out float16"):
        merge_attention(one, AttentionOutput(numbers((2, 3, 4, 16), 0, "float16"), one.lse))
    with pytest.raises(ValueError, match=r"part 2 has out float32\(1, 3, 4, 16\)"):
        merge_attention(one, one, AttentionOutput(numbers((1, 3, 4, 16)), numbers((1, 3, 4))))


GOOD = {
    "query": numbers((2, 4, 16)),
    "key_pages": numbers((12, 8, 16)),
    "value_pages": numbers((12, 8, 16)),
    "lengths": numbers(2, 1, "int32"),
    "kv_heads": 2,
}
BAD = [
    ({"query": numbers((2, 1, 4, 16, 1))}, ValueError, r"query has shape \(2, 1, 4, 16, 1\)"),
    ({"query": numbers((0, 4, 16))}, ValueError, r"query has shape \(0, (1, )?4, 16\)"),
    ({"kv_heads": 3}, ValueError, "H = 4 query heads .* K = 3"),
    ({"kv_heads": 0}, ValueError, "K = 0"),
    ({"key_pages": numbers((12, 4, 16))}, ValueError, r"key_pages \(12, 4, 16\) and value_pages"),
    ({"value_pages": numbers((8, 8, 16))}, ValueError, r"value_pages \(8, 8, 16\)"),
    ({"query": numbers((2, 4, 8))}, ValueError, "head_dim 16, the query 8"),
    (
        {"key_pages": numbers((10, 8, 16)), "value_pages": numbers((10, 8, 16))},
        ValueError,
        "N = 10 pages",
    ),
    ({"query": numbers((2, 4, 16), 0, "bfloat16")}, TypeError, "query bfloat16, key_pages float32"),
    ({"query": numbers((2, 4, 16), 0, "int32")}, TypeError, "query is int32"),
    ({"lengths": numbers(2)}, TypeError, "(lengths|starts) is float32"),
    ({"lengths": numbers((2, 1), 1, "int32")}, ValueError, r"(lengths|starts) has shape \(2, 1\)"),
    ({"window": 0}, ValueError, "window = 0"),
    ({"window": -3}, ValueError, "window = -3"),
    ({"window": 2.5}, ValueError, "window = 2.5"),
    ({"implementation": "triton"}, ValueError, "implementation = 'triton'; known: reference, xla"),
    ({"implementation": "mosaic"}, ValueError, '"mosaic" needs an NVIDIA GPU .* for cpu'),
    ({"sinks": 4}, ValueError, "sinks = 4, .* without a window"),
    ({"stride": 2}, ValueError, "stride = 2 without a window"),
    ({"window": 4, "stride": 0}, ValueError, "stride = 0"),
    ({"window": 4, "sinks": -1}, ValueError, "sinks = -1"),
    ({"table": numbers((2, 2, 3), 0, "int16")}, TypeError, "table is int16"),
    ({"table": numbers((2, 3), 0, "int32")}, ValueError, r"table has shape \(2, 3\)"),
    ({"table": numbers((2, 2, 3), 12, "int32")}, ValueError, r"table .* outside -1 \.\.\. 11 .*12"),
    ({"table": numbers((2, 2, 3), -2, "int32")}, ValueError, r"table .* outside -1 .*-2"),
]


@pytest.mark.parametrize("change,error,message", BAD)
def test_bad_input_is_named(change, error, message):
    arguments = {**GOOD, **change}
    with pytest.raises(error, match=message):
        decode_attention(**arguments)
    lengths = arguments.pop("lengths")
    query = arguments.pop("query")
    chunk = query[:, None] if query.ndim == 3 else query
    with pytest.raises(error, match=message):
        prefill_attention(chunk, starts=lengths, counts=GOOD["lengths"], **arguments)


def test_a_chunk_without_tokens_is_refused():
    arguments = {name: GOOD[name] for name in ("key_pages", "value_pages", "kv_heads")}
    with pytest.raises(ValueError, match=r"query has shape \(2, 0, 4, 16\)"):
        prefill_attention(
            numbers((2, 0, 4, 16)), starts=GOOD["lengths"], counts=GOOD["lengths"], **arguments
        )
