"""The public quantisation ops: each validates once."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import checks
from pallas_kernels.quant import reference, xla
from pallas_kernels.quant.pages import QuantizedPages


def quantize(
    pages: Float[Array, "N P D"],
    *,
    bits: Literal[4, 8],
    by: Literal["channel", "token"],
    group: int,
    valid: Int32[Array, " N"] | None = None,
) -> QuantizedPages:
    """Pages as 8-bit or 4-bit codes, each group of them with its own scale and offset.

    Asymmetric: a group's codes span its least to its greatest number, computed in float32 against
    scale and offset as stored, so that no code is clipped and every number comes back within half
    a scale; groups of equal numbers come back exactly. Keys go by channel, since a few of their
    channels are far larger than the others, and values by token: "KIVI: A Tuning-Free Asymmetric
    2bit Quantization for KV Cache", arXiv 2402.02750.

    Args:
        pages: finite numbers, float32, bfloat16 or float16; the dtype of scales and offsets too.
        bits: of a code.
        by: "channel": `group` tokens of a page share the scale of each channel; "token": `group`
            channels of each token share one.
        group: divides P (by channel) or D (by token).
        valid: filled slots of each page, from its first on, int32 [N]; None for all. The others
            may hold anything, do not change a group, and get its offset.

    Raises:
        ValueError, TypeError: an argument is another, or group or bits do not divide the pages.
    """
    if bits not in (4, 8) or not isinstance(bits, int):
        raise ValueError(f"bits = {bits!r}; use 4 or 8")
    if by not in ("channel", "token"):
        raise ValueError(f'by = {by!r}; use "channel" (for keys) or "token" (for values)')
    if pages.ndim != 3 or 0 in pages.shape:
        raise ValueError(f"pages have shape {pages.shape}; expected [N, P, D], each at least 1")
    checks.check_floats(pages=pages)
    count, size, dim = pages.shape
    if bits == 4 and dim % 2:
        raise ValueError(f"bits = 4 packs two channels a byte; head_dim {dim} is odd")
    axis, grouped = ("page size", size) if by == "channel" else ("head_dim", dim)
    if not isinstance(group, int) or isinstance(group, bool) or group < 1 or grouped % group:
        raise ValueError(
            f"group = {group!r} by {by}; give an int >= 1 that divides the {axis} {grouped}"
        )
    held = jnp.ones((count, size), bool)
    if valid is not None:
        checks.check_rows(count, valid=valid)
        held = jnp.arange(size) < valid[:, None]
    return xla.quantize(pages, held, bits=bits, by=by, group=group)


def dequantize(pages: QuantizedPages, dtype=None) -> jax.Array:
    """The numbers [N, P, D] that the codes stand for, computed in float32.

    Args:
        pages: from `quantize`.
        dtype: of the result; None for that of the pages that were quantised.

    Raises:
        TypeError: the dtype is not float32, bfloat16 or float16.
    """
    exact = reference.dequantize(pages)
    result = jax.ShapeDtypeStruct((), pages.dtype if dtype is None else dtype)
    checks.check_floats(dtype=result)
    return exact.astype(result.dtype)
