"""Unpacking codes and applying scales: slow, obvious."""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int8

from pallas_kernels.quant.pages import QuantizedPages


def unpack(pages: QuantizedPages) -> Int8[Array, "N P D"]:
    """The signed codes, one a byte."""
    if pages.bits == 8:
        return pages.codes
    low = pages.codes & 15
    high = pages.codes >> 4
    return jnp.concatenate([low, high], -1).astype(jnp.int8) - 8


def dequantize(pages: QuantizedPages) -> Float32[Array, "N P D"]:
    """The numbers that the codes stand for, float32."""
    axis = 1 if pages.by == "channel" else 2
    scales, offsets = (
        jnp.repeat(each.astype(jnp.float32), pages.group, axis=axis)
        for each in (pages.scales, pages.offsets)
    )
    return unpack(pages).astype(jnp.float32) * scales + offsets
