"""Joining the shares of a split page list."""

import jax.numpy as jnp
from jaxtyping import Array, Float32


def merge_splits(
    out: Float32[Array, "B K S G D"], lse: Float32[Array, "B K S G"]
) -> tuple[Float32[Array, "B K G D"], Float32[Array, "B K G"]]:
    """Joins S shares as `merge_attention` joins parts: one that saw nothing weighs exactly 0."""
    if out.shape[2] == 1:
        return out[:, :, 0], lse[:, :, 0]
    peak = lse.max(axis=2)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(lse - peak[:, :, None])
    total = weights.sum(axis=2)
    safe = jnp.where(total == 0, 1.0, total)
    merged = (out * weights[..., None]).sum(axis=2) / safe[..., None]
    return merged, jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe))
