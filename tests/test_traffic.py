"""Bytes moved against bytes needed, for the kernels' page lists."""

import numpy as np
import pytest

from pallas_kernels.cards import CARDS
from pallas_kernels.decode import mosaic_hopper, mosaic_portable
from pallas_kernels.patterns import Pattern
from pallas_kernels.traffic import Stored, decode_traffic, page_scores_bytes

SHAPES = {"SmolLM2": (9, 3, 64), "Llama-8B": (32, 8, 128)}
TOKENS = 32768


def traffic(model, batch, pattern, *, size=64, length=TOKENS, selected=None, bits=16, group=None):
    heads, kv_heads, dim = SHAPES[model]
    lengths = np.full(batch, length)
    return decode_traffic(
        lengths, Stored(dim, size, bits, group), pattern,
        heads=heads, kv_heads=kv_heads, count=TOKENS // size, selected=selected,
    )  # fmt: skip


def chosen(model, batch, size=64):
    rng = np.random.default_rng(0)
    kv_heads = SHAPES[model][1]
    lists = [
        [rng.permutation(TOKENS // size)[: 1024 // size] for _ in range(kv_heads)]
        for _ in range(batch)
    ]
    return np.asarray(lists)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("length", [TOKENS, TOKENS - 1, TOKENS - 62])
def test_kernels_move_little_more_than_they_must(model, batch, length):
    """Wherever the newest token stands in its page; the largest waste of a window is 63 tokens."""
    ways = {
        "dense": traffic(model, batch, Pattern(), length=length),
        "window": traffic(model, batch, Pattern(1024), length=length),
        "top-k": traffic(model, batch, Pattern(), length=length, selected=chosen(model, batch)),
        "window and sinks": traffic(model, batch, Pattern(1024, 4), size=16, length=length),
        "int8": traffic(model, batch, Pattern(), length=length, bits=8, group=64),
        "int4": traffic(model, batch, Pattern(), length=length, bits=4, group=64),
    }
    for way, each in ways.items():
        assert 1 <= each.ratio <= 1.10, (way, each.ratio)


def test_bytes_by_hand():
    """Two rows, one KV head, pages of 4 tokens of 2 numbers: lengths 5 and 3, window 2."""
    lengths = np.array([5, 3])
    result = decode_traffic(
        lengths, Stored(2, 4), Pattern(2), heads=3, kv_heads=1, count=2, splits=2, rows=8
    )
    ends = 2 * (3 * 2) * 2 * 2  # two rows, three heads of two numbers, 16 bits, in and out
    assert result.needed == (2 + 2) * 8 + ends
    # Row 0 reads both pages, row 1 one; lists of two entries a row, two ints each; lengths, ends.
    assert result.moved == 3 * 4 * 8 + ends + 2 * 2 * 8 + 2 * (4 + 4)
    assert result.partials == 2 * (2 * 2 * 8 * 3 * 4)
    codes = Stored(64, 64, bits=4, group=32)
    assert codes.token_bytes == 2 * 64 * (0.5 + 4 / 32)


def test_a_stride_below_the_page_reads_everything():
    """Said openly: only strides of whole pages save bytes on a GPU."""
    assert traffic("SmolLM2", 1, Pattern(1024, 0, 32)).ratio > 10
    assert traffic("SmolLM2", 1, Pattern(1024, 0, 512), size=16).ratio < 2


def test_choosing_pages_moves_a_64th_of_the_keys():
    moved = page_scores_bytes(1, 8, TOKENS // 64, 128)
    keys = 8 * TOKENS * 128 * 2
    assert moved / keys == pytest.approx(2 / 64, rel=0.02)


@pytest.mark.parametrize("card", ["h100", "rtx3090"])
@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("batch,tokens", [(1, 1024), (1, TOKENS), (1, 131072), (8, TOKENS)])
def test_partial_results_stay_in_cache_or_are_few(card, model, batch, tokens):
    """With the default splits; else they would be traffic of their own."""
    heads, kv_heads, dim = SHAPES[model]
    shape = {
        "batch": batch, "kv_heads": kv_heads, "group": heads // kv_heads,
        "listed": tokens // 64, "size": 64, "dim": dim,
    }  # fmt: skip
    splits = [mosaic_portable.default_tiles(CARDS[card], **shape, bits=16).splits]
    if CARDS[card].is_hopper:
        splits.append(mosaic_hopper.default_tiles(CARDS[card], **shape).splits)
    for number in splits:
        result = decode_traffic(
            np.full(batch, min(tokens, TOKENS)), Stored(dim, 64), Pattern(),
            heads=heads, kv_heads=kv_heads, count=TOKENS // 64, splits=number,
        )  # fmt: skip
        assert result.partials / 2 < CARDS[card].l2 / 2 or result.partials < 0.05 * result.needed
