"""The public ops over slots: each validates once, then runs one implementation."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.slots import reference, xla
from pallas_kernels.types import AttentionOutput

Implementation = Literal["reference", "xla"]
_ATTENTION = {"reference": reference.slot_attention, "xla": xla.slot_attention}
_MASS = {"reference": reference.attention_mass, "xla": xla.attention_mass}


def slot_attention(
    query: Float[Array, "B T H D"],
    key_pages: Float[Array, "N P D"] | QuantizedPages,
    value_pages: Float[Array, "N P D"] | QuantizedPages,
    positions: Int32[Array, "B K S"],
    first: Int32[Array, "B T"],
    last: Int32[Array, "B T"],
    *,
    kv_heads: int,
    implementation: Implementation | None = None,
) -> AttentionOutput:
    """Attention over tokens in any order, each with its own position.

    Query t of row b sees the slots whose token stands at a position from `first[b, t]` to
    `last[b, t]`; one whose `last` is below its `first` sees nothing (out 0, lse -inf). Query head
    h reads KV head h // (H / K). Scores are scaled by D ** -0.5; softmax is in float32. All slots
    are read.

    Args:
        query: rotated queries, float32, bfloat16 or float16.
        key_pages, value_pages: the pool in the contiguous layout (`pallas_kernels.pages`), same
            dtype as the query, or quantised. Slots without a token may hold anything.
        positions: of the token in each slot of each KV head, S = C * P; -1 for an empty slot. With
            K = 1 all heads share them.
        first, last: int32 [B, T].
        kv_heads: K.
        implementation: force one; None is XLA.

    Raises:
        ValueError, TypeError: shapes, dtypes or options disagree; the message names them.
    """
    _check(query, key_pages, value_pages, positions, first, last, kv_heads)
    checks.check_known(implementation, list(_ATTENTION))
    run = _ATTENTION[implementation or "xla"]
    return run(query, key_pages, value_pages, positions, first, last, kv_heads=kv_heads)


def attention_mass(
    query: Float[Array, "B T H D"],
    key_pages: Float[Array, "N P D"] | QuantizedPages,
    lse: Float32[Array, "B T H"],
    positions: Int32[Array, "B K S"],
    first: Int32[Array, "B T"],
    last: Int32[Array, "B T"],
    *,
    kv_heads: int,
    implementation: Implementation | None = None,
) -> Float32[Array, "B K S"]:
    """What each slot receives of the attention of all queries, those of a KV head's group summed.

    `sum over t, g of exp(q . k * D ** -0.5 - lse)` over the queries that see the slot: exact
    attention weights where `lse` is that of all they see, slots here or elsewhere. Queries with
    lse -inf give nothing.

    Args:
        query, key_pages, positions, first, last, kv_heads, implementation: see `slot_attention`.
        lse: from an attention op over everything the query sees, float32.

    Raises:
        ValueError, TypeError: shapes, dtypes or options disagree; the message names them.
    """
    _check(query, key_pages, key_pages, positions, first, last, kv_heads)
    if lse.shape != query.shape[:3] or lse.dtype != jnp.float32:
        raise ValueError(f"lse is {lse.dtype}{lse.shape}; expected float32 {query.shape[:3]}")
    checks.check_known(implementation, list(_MASS))
    run = _MASS[implementation or "xla"]
    return run(query, key_pages, lse, positions, first, last, kv_heads=kv_heads)


def _check(query, key_pages, value_pages, positions, first, last, kv_heads) -> None:
    checks.check_query(query, "[B, T, H, D]")
    batch, tokens, heads, dim = query.shape
    checks.check_heads(heads, kv_heads)
    checks.check_pages(key_pages, value_pages, head_dim=dim)
    checks.check_floats(query=query, key_pages=key_pages, value_pages=value_pages)
    pages, size, _ = key_pages.shape
    checks.check_table(None, None, batch=batch, kv_heads=kv_heads, pages=pages)
    slots = pages // (batch * kv_heads) * size
    for name, array, shapes in (
        ("positions", positions, [(batch, kv_heads, slots), (batch, 1, slots)]),
        ("first", first, [(batch, tokens)]),
        ("last", last, [(batch, tokens)]),
    ):
        if array.dtype != jnp.int32:
            raise TypeError(f"{name} is {array.dtype}; positions are int32")
        if array.shape not in shapes:
            expected = " or ".join(str(shape) for shape in shapes)
            raise ValueError(f"{name} has shape {array.shape}; expected {expected}")
