"""Writing into pages, against a slow model on the host; every bit of spare memory counts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiles import in_place
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import append_tokens, gather_tokens, new_pages
from pallas_kernels.pages import by_sequence

append = jax.jit(append_tokens)

# Patterns of the bits of spare memory: NaNs, quiet and signalling, with payloads that arithmetic
# (a select by multiplying, a trip through a wider type) would change.
BITS = {
    "float32": [0x7FC12345, 0xFF812345],
    "bfloat16": [0x7FC5, 0xFF85],
    "float16": [0x7E05, 0xFD05],
}


def as_bits(array):
    array = np.asarray(array)
    return array.view({4: np.uint32, 2: np.uint16}[array.dtype.itemsize])


def spare_pages(shape, dtype):
    bits = np.resize(np.array(BITS[dtype]), shape).astype(
        np.uint32 if dtype == "float32" else np.uint16
    )
    return bits.view(jnp.dtype(dtype))


def slow_append(pages, new, starts, counts):
    """Slot by slot: token t of row b and head k goes to page (b * C + c) * K + k."""
    pages = pages.copy()
    batch, _, kv_heads, _ = new.shape
    size = pages.shape[1]
    count = pages.shape[0] // (batch * kv_heads)
    for row in range(batch):
        for t in range(counts[row]):
            position = starts[row] + t
            for head in range(kv_heads):
                page = (row * count + position // size) * kv_heads + head
                pages[page, position % size] = new[row, t, head]
    return pages


def check(pages, new, starts, counts):
    starts, counts = (np.asarray(each, np.int32) for each in (starts, counts))
    expected = slow_append(pages, new, starts, counts)
    written = append(pages, new, starts, counts)
    assert written.dtype == pages.dtype
    np.testing.assert_array_equal(as_bits(written), as_bits(expected))


def some_tokens(seed, shape, counts, dtype):
    """Random tokens; those behind each row's count, which must go nowhere, are 777."""
    new = np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))
    for row, count in enumerate(counts):
        new[row, count:] = 777
    return new


# B, T, K, D, page size, pages a sequence: one token and many, chunks within a page, as long as
# one, longer than the whole cache; pages of one token; a single page; one row, one head.
SHAPES = [
    (3, 1, 2, 4, 8, 3, "float32"),
    (1, 1, 1, 4, 5, 2, "bfloat16"),
    (2, 5, 2, 4, 8, 3, "float32"),
    (2, 8, 3, 2, 8, 3, "bfloat16"),
    (3, 9, 1, 4, 1, 20, "float32"),
    (1, 24, 2, 4, 8, 2, "float32"),
    (2, 7, 2, 4, 16, 1, "float16"),
    (2, 21, 1, 4, 5, 6, "float32"),
    (11, 1, 2, 2, 4, 2, "bfloat16"),
    (11, 5, 1, 2, 4, 3, "float32"),
]


@pytest.mark.parametrize("batch,tokens,kv_heads,dim,size,count,dtype", SHAPES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_append_equals_the_slow_model(batch, tokens, kv_heads, dim, size, count, dtype, data):
    """Any starts and counts that fit, full rows and empty chunks among them."""
    capacity = size * count
    starts, counts = [], []
    for _ in range(batch):
        counts.append(data.draw(st.integers(0, min(tokens, capacity))))
        starts.append(data.draw(st.integers(0, capacity - counts[-1])))
    new = some_tokens(data.draw(st.integers(0, 9)), (batch, tokens, kv_heads, dim), counts, dtype)
    check(spare_pages((batch * count * kv_heads, size, dim), dtype), new, starts, counts)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_full_row_keeps_every_bit(tokens):
    """Row 0 is at capacity and gets nothing; row 1 is filled to its last slot."""
    new = some_tokens(0, (2, tokens, 2, 4), [0, tokens], "float32")
    check(spare_pages((12, 8, 4), "float32"), new, [24, 24 - tokens], [0, tokens])


@pytest.mark.parametrize("tokens", [1, 5])
def test_nothing_given_nothing_changed(tokens):
    new = np.full((2, tokens, 2, 4), np.nan, np.float32)
    check(spare_pages((12, 8, 4), "float32"), new, [3, 0], [0, 0])


def test_appending_twice_continues():
    """Two chunks write what one does, up to the order of the work."""
    new = some_tokens(0, (2, 9, 2, 4), [9, 9], "float32")
    pages = spare_pages((12, 8, 4), "float32")
    starts, all_of_it = np.array([0, 6], np.int32), np.full(2, 9, np.int32)
    whole = append(pages, new, starts, all_of_it)
    first, second = np.array([4, 7], np.int32), np.array([5, 2], np.int32)
    half = append(pages, new, starts, first)
    rest = np.stack([new[0, [4, 5, 6, 7, 8]], new[1, [7, 8, 0, 0, 0]]])
    both = append(half, rest, starts + first, second)
    np.testing.assert_array_equal(as_bits(both), as_bits(whole))


@pytest.mark.parametrize("size", [1, 8, 16, 48, 64])
def test_gather_reads_what_append_wrote(size):
    count = math.ceil(100 / size)
    new = some_tokens(0, (2, 100, 2, 4), [100, 100], "float32")
    pages = append(
        new_pages(2, 2, count, size, 4, jnp.float32), new, np.zeros(2, np.int32),
        np.full(2, 100, np.int32),
    )  # fmt: skip
    gathered = jax.jit(gather_tokens, static_argnums=(1, 2))(pages, 2, 2)
    assert gathered.shape == (2, count * size, 2, 4)
    np.testing.assert_array_equal(gathered[:, :100], new)
    assert not np.asarray(gathered)[:, 100:].any()


def test_the_layout_is_as_documented():
    pages = np.arange(2 * 3 * 2 * 4 * 1, dtype=np.float32).reshape(12, 4, 1)
    apart = by_sequence(jnp.asarray(pages), 2, 2)
    for row in range(2):
        for c in range(3):
            for head in range(2):
                np.testing.assert_array_equal(apart[row, c, head], pages[(row * 3 + c) * 2 + head])


@pytest.mark.parametrize(
    "batch,kv_heads,dtype", [(1, 1, "float32"), (4, 3, "bfloat16"), (12, 2, "float32")]
)
@pytest.mark.parametrize("tokens", [1, 37])
def test_append_is_in_place(batch, kv_heads, dtype, tokens):
    """Donated pages are written where they lie: no temporary of their size."""
    pages = jax.ShapeDtypeStruct((batch * 64 * kv_heads, 64, 16), jnp.dtype(dtype))
    new = jax.ShapeDtypeStruct((batch, tokens, kv_heads, 16), jnp.dtype(dtype))
    rows = jax.ShapeDtypeStruct((batch,), jnp.int32)
    donated = functools.partial(jax.jit, donate_argnums=0)(append_tokens)
    aliased, temporary = in_place(donated.lower(pages, new, rows, rows).compile())
    size = math.prod(pages.shape) * pages.dtype.itemsize
    assert aliased >= size
    assert temporary < size / 4


@pytest.mark.parametrize("tokens", [1, 37])
def test_the_program_does_not_grow_with_the_batch(tokens):
    """Compiling 64 unrolled rows takes a minute for every layer."""
    sizes = []
    for batch in (2, 64):
        pages = jax.ShapeDtypeStruct((batch * 4, 64, 16), jnp.float32)
        new = jax.ShapeDtypeStruct((batch, tokens, 1, 16), jnp.float32)
        rows = jax.ShapeDtypeStruct((batch,), jnp.int32)
        sizes.append(len(append.lower(pages, new, rows, rows).as_text()))
    assert sizes[1] < 1.1 * sizes[0]
