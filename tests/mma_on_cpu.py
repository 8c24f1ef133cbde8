"""A meaning on the CPU for `plgpu.mma`, which GPU interpret mode (jax 0.12.0.1) has no rule for.

Importing this module registers it; the product is an ordinary one, summed in float32 or int32.
"""

import jax.numpy as jnp
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic_gpu.primitives import mma_p


def _product(total, left, right):
    summed = jnp.int32 if jnp.issubdtype(left.dtype, jnp.integer) else jnp.float32
    product = jnp.dot(left, right, preferred_element_type=summed)
    return total + product.astype(total.dtype)


mlir.register_lowering(mma_p, mlir.lower_fun(_product, multiple_results=False), platform="cpu")
