"""Attention over slots out of order, and writing to them, against float64 numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_numpy import to_pages

from pallas_kernels import (
    attention_mass,
    quantize,
    read_slots,
    slot_attention,
    write_slots,
)
from pallas_kernels.quant.api import dequantize

# float32: sums of some hundred products. bfloat16: outputs have 8 bits.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}

# H, K, D, page, slots, T: groups of 1, 3, 4, 7; pages of 1, 16, 48, 64; one and many queries. The
# last has scores enough for several chunks, the last of which is moved back.
SHAPES = [
    (4, 4, 64, 16, 48, 1),
    (6, 2, 80, 48, 96, 5),
    (4, 1, 96, 1, 7, 3),
    (7, 1, 128, 64, 64, 9),
    (8, 2, 16, 16, 1712, 160),
]


def softmax_rows(query, key, value, positions, first, last):
    """Slot by slot, by the rule: out [B, T, H, D], lse [B, T, H], weights [B, T, H, S]."""
    batch, tokens, heads, dim = query.shape
    group = heads // key.shape[2]
    out, lse = np.zeros(query.shape), np.full((batch, tokens, heads), -np.inf)
    weights = np.zeros((batch, tokens, heads, key.shape[1]))
    for b, t, h in np.ndindex(batch, tokens, heads):
        k = h // group
        place = positions[b, k if positions.shape[1] > 1 else 0]
        seen = np.flatnonzero((place >= 0) & (place >= first[b, t]) & (place <= last[b, t]))
        if seen.size == 0:
            continue
        scores = key[b, seen, k].astype(float) @ query[b, t, h].astype(float) / np.sqrt(dim)
        lse[b, t, h] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
        weights[b, t, h, seen] = np.exp(scores - lse[b, t, h])
        out[b, t, h] = weights[b, t, h, seen] @ value[b, seen, k].astype(float)
    return out, lse, weights


def draw(shape, dtype="float32", page=16) -> Any:
    """Tokens in a shuffled order, a third of the slots empty and NaN; ranges of all kinds."""
    heads, kv_heads, dim, page, slots, tokens = shape
    rng = np.random.default_rng(slots)
    query = rng.normal(size=(2, tokens, heads, dim)).astype(jnp.dtype(dtype))
    key, value = (
        rng.normal(size=(2, slots, kv_heads, dim)).astype(jnp.dtype(dtype)) for _ in range(2)
    )
    positions = np.stack(
        [[rng.permutation(2 * slots)[:slots] for _ in range(kv_heads)] for _ in range(2)]
    ).astype(np.int32)
    positions[rng.random(positions.shape) < 1 / 3] = -1
    empty = (positions < 0).swapaxes(1, 2)
    key[empty] = value[empty] = np.nan
    first = rng.integers(0, slots, (2, tokens)).astype(np.int32)
    last = first + rng.integers(-1, 2 * slots, (2, tokens)).astype(np.int32)
    first[0, 0], last[0, 0] = 3, 2  # sees nothing
    first[1, 0], last[1, 0] = -5, 4 * slots  # sees everything
    pages = [to_pages(each, page, np.nan) for each in (key, value)]
    return query, key, value, pages, positions, first, last


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(
    "shape,dtype", [(s, "float32") for s in SHAPES] + [(SHAPES[1], "bfloat16")]
)
def test_slots_equal_numpy(shape, dtype, implementation):
    query, key, value, pages, positions, first, last = draw(shape, dtype)
    out, lse, weights = softmax_rows(query, key, value, positions, first, last)
    run = jax.jit(slot_attention, static_argnames=("kv_heads", "implementation"))
    options = {"kv_heads": shape[1], "implementation": implementation}
    result = run(query, *pages, positions, first, last, **options)
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(np.asarray(result.out, float), out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(result.lse, lse, rtol=tolerance, atol=tolerance)
    mass = jax.jit(attention_mass, static_argnames=("kv_heads", "implementation"))(
        query, pages[0], lse.astype(np.float32), positions, first, last, **options
    )
    grouped = weights.reshape(*weights.shape[:2], shape[1], -1, weights.shape[3])
    np.testing.assert_allclose(mass, grouped.sum((1, 3)), rtol=1e-3 if dtype != "float32" else 1e-4,
                               atol=tolerance)  # fmt: skip
    assert np.isfinite(np.asarray(mass)).all()


def test_heads_may_share_positions():
    query, key, value, pages, positions, first, last = draw(SHAPES[1])
    shared = np.sort(positions, axis=1)[:, -1:]
    filled = [np.nan_to_num(each) for each in (*pages, key, value)]
    out, lse, _ = softmax_rows(query, filled[2], filled[3], shared, first, last)
    keys, values, *_ = filled
    result = slot_attention(query, keys, values, shared, first, last, kv_heads=2)
    np.testing.assert_allclose(result.out, out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_slots_are_their_numbers(bits):
    query, _, _, pages, positions, first, last = draw(SHAPES[1])
    pages = [np.nan_to_num(each) for each in pages]
    keys, values = (
        quantize(jnp.asarray(each), bits=bits, by=by, group=16)
        for each, by in zip(pages, ("channel", "token"), strict=True)
    )
    seen = (positions, first, last)
    result = slot_attention(query, keys, values, *seen, kv_heads=2)
    expected = slot_attention(query, dequantize(keys), dequantize(values), *seen, kv_heads=2)
    np.testing.assert_allclose(result.out, expected.out, rtol=1e-5, atol=1e-5)


def test_written_slots_are_read_back_and_others_keep_their_bits():
    rng = np.random.default_rng(0)
    pages = rng.normal(size=(2 * 3 * 2, 4, 8)).astype(np.float32)  # B 2, C 3, K 2, P 4
    new: Any = rng.normal(size=(2, 3, 2, 8)).astype(np.float32)
    slots: Any = np.array([[[0, 11, -1], [5, 3, 4]], [[-1, 12, 7], [1, -1, -1]]], np.int32)
    after = np.asarray(write_slots(jnp.asarray(pages), new, slots))
    expected = pages.copy()
    for b, k, t in np.ndindex(2, 2, 3):
        slot = slots[b, k, t]
        if 0 <= slot < 12:
            expected[(b * 3 + slot // 4) * 2 + k, slot % 4] = new[b, t, k]
    np.testing.assert_array_equal(after, expected)
    back = np.asarray(read_slots(jnp.asarray(after), slots))
    for b, k, t in np.ndindex(2, 2, 3):
        if 0 <= slots[b, k, t] < 12:
            np.testing.assert_array_equal(back[b, t, k], new[b, t, k])


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"positions": np.zeros((2, 3, 96), np.int32)}, ValueError, r"positions has shape"),
        ({"positions": np.zeros((2, 2, 96), np.int64)}, TypeError, "positions is int64"),
        ({"first": np.zeros((2, 4), np.int32)}, ValueError, "first has shape"),
        ({"kv_heads": 4}, ValueError, "multiple of K = 4"),
        ({"implementation": "mosaic"}, ValueError, "mosaic"),
    ],
)
def test_bad_input_is_named(change, error, message):
    query, _, _, pages, positions, first, last = draw(SHAPES[1])
    given = {
        "query": query, "key_pages": pages[0], "value_pages": pages[1], "positions": positions,
        "first": first, "last": last, "kv_heads": 2,
    } | change  # fmt: skip
    with pytest.raises(error, match=message):
        slot_attention(**given)
