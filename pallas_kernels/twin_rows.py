"""A way around the one shape of product that XLA's CPU back end runs badly."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def with_twin(rows: Float[Array, "*n"], axis: int) -> Float[Array, "*n"]:
    """The rows along an axis; a single 16-bit row comes twice.

    XLA's CPU back end multiplies a single 16-bit row by widening all that it meets in a copy; a
    twin row avoids that and costs next to nothing where memory is the bound. The caller cuts the
    product back to the rows it had.
    """
    lonely = rows.shape[axis] == 1 and rows.dtype.itemsize == 2
    return jnp.repeat(rows, 2, axis=axis) if lonely else rows
