"""Quantised pages: round trip, outlier channels, exact constants, packing, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quant.api import dequantize, quantize
from pallas_kernels.quant.reference import unpack


@functools.partial(jax.jit, static_argnames=("bits", "by", "group"))
def there_and_back(pages, valid=None, **how):
    """Both under one jit, where XLA could take out a conversion to 16 bits and back."""
    quantized = quantize(pages, valid=valid, **how)
    return quantized, dequantize(quantized, jnp.float32)


def wide(array):
    return np.asarray(array, np.float64)


def groupwise(array, quantized):
    """Scales or offsets, one an element."""
    return np.repeat(wide(array), quantized.group, 1 if quantized.by == "channel" else 2)


def draw(shape, dtype):
    """Channels of very different spread, 1e-6 ... 100, about half of them with a bias."""
    rng = np.random.default_rng(0)
    spread = 10.0 ** rng.uniform(-6, 2, shape[2])
    bias = rng.choice([0, 0, 1, -100], shape[2])
    return (rng.normal(size=shape) * spread + bias).astype(jnp.dtype(dtype))


HOW = [
    (4, "channel", 16, "bfloat16"),
    (4, "token", 8, "float16"),
    (8, "channel", 48, "float16"),
    (8, "token", 40, "bfloat16"),
    (4, "channel", 8, "float32"),
    (8, "token", 10, "float32"),
    (4, "token", 80, "bfloat16"),
    (8, "channel", 1, "float32"),
]


@pytest.mark.parametrize("bits,by,group,dtype", HOW)
def test_error_is_at_most_half_a_scale(bits, by, group, dtype):
    pages = draw((3, 48, 80), dtype)
    valid = np.asarray([48, 13, 0], np.int32)
    spare = (np.arange(48) >= valid[:, None])[..., None]
    pages = np.where(spare, np.nan, pages).astype(pages.dtype)
    quantized, back = there_and_back(pages, valid, bits=bits, by=by, group=group)
    assert quantized.group == group and quantized.shape == pages.shape
    assert quantized.dtype == quantized.offsets.dtype == pages.dtype
    assert np.isfinite(back).all()
    scale, offset = groupwise(quantized.scales, quantized), groupwise(quantized.offsets, quantized)
    # float32 rounds x - offset, the quotient, the product and the sum: 4 * 2 ** -24 of each.
    slack = 2.4e-7 * (np.abs(wide(pages)) + np.abs(offset) + scale)
    close = np.abs(wide(back) - wide(pages)) <= scale / 2 + slack
    assert (close | spare).all()
    # Spare slots get their group's offset; a page without a filled one is all 0.
    np.testing.assert_array_equal(np.where(spare, back, 0), np.where(spare, offset, 0))
    assert not np.asarray(back[2]).any()


@pytest.mark.parametrize("bits,by,group,dtype", HOW[:6])
def test_scales_are_no_larger_than_the_span_needs(bits, by, group, dtype):
    pages = draw((1, 48, 80), dtype)
    quantized, _ = there_and_back(pages, bits=bits, by=by, group=group)
    grouped = wide(pages).reshape((-1, group, 80) if by == "channel" else (48, -1, group))
    span = np.ptp(grouped, 1 if by == "channel" else 2)
    unit = float(jnp.finfo(dtype).eps)
    # Rounding up adds a unit, float16's subnormal step at the least; storing the offset moves it
    # by half a unit of itself, which the codes on one side of it make up for.
    most = span / (2**bits - 1) * (1 + 4 * unit) + (2.0**-24 if dtype == "float16" else 0)
    most += unit * np.abs(wide(quantized.offsets[0])) / (2 ** (bits - 1) - 1)
    assert (wide(quantized.scales[0]) <= most).all()


def test_channels_with_a_huge_bias_survive_four_bits():
    # As in Qwen2.5's keys: a bias of 100 beside a spread of 1.
    rng = np.random.default_rng(1)
    pages = rng.uniform(-0.5, 0.5, (2, 32, 64)).astype(np.float32)
    pages[:, :, 5] += 100
    pages[:, :, 40] -= 100
    _, by_channel = there_and_back(pages, bits=4, by="channel", group=32)
    assert np.abs(by_channel - pages).max() <= 1 / 30 + 1e-4  # half of a span of 1 over 15 steps
    _, by_token = there_and_back(pages, bits=4, by="token", group=64)
    assert np.abs(by_token - pages).max() > 1  # what the grouping saves


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bits,by", [(4, "channel"), (8, "token")])
def test_equal_numbers_come_back_exactly(bits, by, dtype):
    values = np.asarray([0, -0.1, 3e-5, 100.3, -6e4, 7e-7], np.float32).astype(jnp.dtype(dtype))
    if by == "channel":
        pages = np.broadcast_to(np.tile(values, 4), (2, 16, 24))
    else:
        pages = np.broadcast_to(np.repeat(values, 4), (2, 16, 24))
    quantized, back = there_and_back(pages, bits=bits, by=by, group=4)
    np.testing.assert_array_equal(back, pages.astype(np.float32))
    assert not np.asarray(quantized.scales).any()


def test_packing_and_bytes():
    # Integers -8 ... 7 in every channel: scale 1, offset 0 and the codes are the numbers.
    codes = np.stack([np.roll(np.arange(-8, 8), shift) for shift in range(6)], 1)
    quantized, back = there_and_back(codes[None].astype(np.float32), bits=4, by="channel", group=16)
    np.testing.assert_array_equal(back[0], codes)
    np.testing.assert_array_equal(unpack(quantized)[0], codes)
    assert quantized.codes.dtype == np.uint8 and quantized.codes.shape == (1, 16, 3)
    byte = np.asarray(quantized.codes[0])
    np.testing.assert_array_equal(byte & 15, codes[:, :3] + 8)
    np.testing.assert_array_equal(byte >> 4, codes[:, 3:] + 8)
    assert quantized.nbytes == 16 * 3 + 2 * 6 * 4
    eight = quantize(jnp.zeros((4, 16, 32), jnp.bfloat16), bits=8, by="token", group=8)
    assert eight.codes.dtype == np.int8 and eight.nbytes == 4 * 16 * (32 + 2 * 4 * 2)
    assert dequantize(eight).dtype == jnp.bfloat16


PAGES = np.zeros((2, 16, 24), np.float32)
REFUSALS = [
    ({"bits": 2}, ValueError, "bits = 2"),
    ({"by": "head"}, ValueError, "by = 'head'"),
    ({"group": 5}, ValueError, "group = 5 by channel.*page size 16"),
    ({"group": 16, "by": "token"}, ValueError, "group = 16 by token.*head_dim 24"),
    ({"group": 0}, ValueError, "group = 0"),
    ({"group": 4.0}, ValueError, "group = 4.0"),
    ({"pages": PAGES[0]}, ValueError, r"pages have shape \(16, 24\)"),
    ({"pages": PAGES[..., :5]}, ValueError, "head_dim 5 is odd"),
    ({"pages": PAGES.astype(np.int32)}, TypeError, "pages is int32"),
    ({"valid": np.zeros(3, np.int32)}, ValueError, r"valid has shape \(3,\)"),
    ({"valid": np.zeros(2, np.float32)}, TypeError, "valid is float32"),
]


@pytest.mark.parametrize("wrong,error,message", REFUSALS)
def test_refusals(wrong, error, message):
    right = {"pages": PAGES, "bits": 4, "by": "channel", "group": 8}
    with pytest.raises(error, match=message):
        quantize(**{**right, **wrong})


def test_dequantize_refuses_integers():
    with pytest.raises(TypeError, match="dtype is int8"):
        dequantize(quantize(jnp.asarray(PAGES), bits=8, by="token", group=8), jnp.int8)
