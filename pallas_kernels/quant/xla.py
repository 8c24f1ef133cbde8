"""Pages to codes, scales and offsets, in plain XLA."""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int8, UInt8

from pallas_kernels.quant.pages import QuantizedPages


def quantize(
    pages: Float[Array, "N P D"],
    held: Bool[Array, "N P"],
    *,
    bits: Literal[4, 8],
    by: Literal["channel", "token"],
    group: int,
) -> QuantizedPages:
    """See `pallas_kernels.quant.api.quantize`; `held` says which slots count."""
    count, size, dim = pages.shape
    if by == "channel":
        apart, axis = (count, size // group, group, dim), 2
    else:
        apart, axis = (count, size, dim // group, group), 3
    exact = pages.astype(jnp.float32).reshape(apart)
    mask = jnp.broadcast_to(held[..., None], pages.shape).reshape(apart)
    some = mask.any(axis, keepdims=True)
    low = jnp.where(some, jnp.where(mask, exact, jnp.inf).min(axis, keepdims=True), 0)
    high = jnp.where(some, jnp.where(mask, exact, -jnp.inf).max(axis, keepdims=True), 0)
    scales, offsets = _scales(low, high, bits, pages.dtype)
    codes = jnp.round((exact - offsets) / jnp.where(scales == 0, 1, scales))
    # What a slot that does not count holds may be no number at all.
    codes = jnp.where(mask & (scales > 0), codes, 0).astype(jnp.int8).reshape(pages.shape)
    return QuantizedPages(
        codes=_pack(codes) if bits == 4 else codes,
        scales=scales.squeeze(axis).astype(pages.dtype),
        offsets=offsets.squeeze(axis).astype(pages.dtype),
        bits=bits,
        by=by,
    )


def _scales(low, high, bits: int, dtype) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
    """Scales and offsets as they will be stored, such that all of `low ... high` has a code.

    Codes reach from -half to half - 1. The offset is the middle of what they can stand for; what
    storing it rounds away is made up for by the scale, and that is rounded up.
    """
    half = 2 ** (bits - 1)
    offsets = _stored(low + half * ((high - low) / (2 * half - 1)), dtype)
    scales = jnp.maximum((high - offsets) / (half - 1), (offsets - low) / half)
    limits = jnp.finfo(dtype)
    step = jnp.maximum(scales * 2.0 ** -(limits.nmant + 1), _subnormal_step(dtype) / 2)
    return jnp.where(scales > 0, _stored(scales + step, dtype), 0), offsets


def _stored(values: Float32[Array, "*n"], dtype) -> Float32[Array, "*n"]:
    """The values rounded as `dtype` holds them.

    Not by a conversion there and back, which XLA may take out.
    """
    if dtype == jnp.float32:
        return values
    limits = jnp.finfo(dtype)
    rounded = lax.reduce_precision(values, limits.nexp, limits.nmant)
    step = _subnormal_step(dtype)
    if step == 0:
        return rounded
    # reduce_precision makes subnormal numbers 0; float16's are within reach of real scales.
    return jnp.where(jnp.abs(values) < limits.tiny, jnp.round(values / step) * step, rounded)


def _subnormal_step(dtype) -> float:
    """The distance of float16's least numbers; those of the wider exponents are left at 0."""
    return 2.0**-24 if dtype == jnp.float16 else 0.0


def _pack(codes: Int8[Array, "N P D"]) -> UInt8[Array, "N P halfD"]:
    """Two codes of 4 bits a byte: channel j in the low half, j + D / 2 in the high one."""
    low, high = jnp.split((codes + 8).astype(jnp.uint8), 2, axis=-1)
    return low | (high << 4)
