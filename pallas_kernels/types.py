"""What every attention op returns, and how parts of one attention are joined."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


class AttentionOutput(NamedTuple):
    """Attention over some set of keys.

    out: weighted values [..., H, D] in the query's dtype; 0 where a query sees no key.
    lse: natural log of the sum of exponentiated scores, float32 [..., H]; -inf where a query
        sees no key.
    """

    out: Float[Array, "*batch H D"]
    lse: Float32[Array, "*batch H"]


def merge_attention(*parts: AttentionOutput) -> AttentionOutput:
    """Joins attention over disjoint key sets into attention over their union.

    `out = sum_i exp(lse_i - lse) out_i`, `lse = log sum_i exp(lse_i)`; parts that saw no key
    (lse = -inf) weigh exactly 0, and if no part saw one the result is again 0 with lse = -inf.

    Raises:
        ValueError: no part is given, or shapes or dtypes of the parts differ.
    """
    if not parts:
        raise ValueError("merge_attention: no parts; pass at least one AttentionOutput")
    first = parts[0]
    for index, part in enumerate(parts):
        same = part.out.shape == first.out.shape and part.lse.shape == first.lse.shape
        if not same or part.out.dtype != first.out.dtype:
            raise ValueError(
                f"merge_attention: part {index} has out {part.out.dtype}{part.out.shape}, "
                f"lse {part.lse.shape}; part 0 has {first.out.dtype}{first.out.shape}, "
                f"{first.lse.shape}; all parts must agree"
            )
    peak = jnp.stack([part.lse for part in parts]).max(0)
    # A finite stand-in keeps exp(-inf - peak) at 0 where no part saw a key.
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = [jnp.exp(part.lse - peak) for part in parts]
    total = sum(weights)
    safe = jnp.where(total == 0, 1.0, total)
    out = sum(
        part.out.astype(jnp.float32) * (weight / safe)[..., None]
        for part, weight in zip(parts, weights, strict=True)
    )
    lse = jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe))
    return AttentionOutput(out.astype(first.out.dtype), lse)  # type: ignore[union-attr]
