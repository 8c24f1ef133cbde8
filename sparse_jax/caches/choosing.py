"""Which tokens of a prompt to keep: those that its last queries look at, for each KV head
("SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import attention_mass, prefill_attention
from sparse_jax.caches.base import Span
from sparse_jax.caches.layers import query_positions


def remember_queries(
    ring: Float[Array, "B W H D"], query: Float[Array, "B T H D"], span: Span
) -> Float[Array, "B W H D"]:
    """The ring of each row's latest queries after a chunk: position p stands at p % W."""
    width, tokens = ring.shape[1], query.shape[1]
    newest = (span.starts + span.counts - 1)[:, None]
    position = newest - (newest - jnp.arange(width, dtype=jnp.int32)) % width
    source = position - span.starts[:, None]  # below 0: it was there before this chunk
    taken = jnp.take_along_axis(query, jnp.clip(source, 0, tokens - 1)[:, :, None, None], axis=1)
    return jnp.where((source >= 0)[:, :, None, None], taken, ring)


def recent_mass(
    ring: Float[Array, "B W H D"],
    key_pages: Float[Array, "N P D"],
    value_pages: Float[Array, "N P D"],
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    limit: int | None,
) -> Float32[Array, "B K S"]:
    """Attention that each slot gets from the row's last W queries, a group's heads summed.

    Each query's weights are those of its softmax over the whole prompt up to itself.

    Args:
        ring: see `remember_queries`; key_pages, value_pages: the prompt, slot p holds position p.
        limit: the model's own window in this layer, in tokens.
    """
    batch, width, _, _ = ring.shape
    counts = jnp.minimum(lengths, width)
    starts = lengths - counts
    at = query_positions(starts, width)
    valid = jnp.arange(width) < counts[:, None]
    query = jnp.take_along_axis(ring, (at % width)[:, :, None, None], axis=1)
    query = jnp.where(valid[:, :, None, None], query, 0)
    _, lse = prefill_attention(
        query, key_pages, value_pages, starts, counts, kv_heads=kv_heads, window=limit
    )
    slots = key_pages.shape[0] // (batch * kv_heads) * key_pages.shape[1]
    slot = jnp.arange(slots, dtype=jnp.int32)
    first = jnp.zeros_like(at) if limit is None else at - limit + 1
    return attention_mass(
        query,
        key_pages,
        lse,
        jnp.broadcast_to(slot, (batch, 1, slots)),
        first,
        jnp.where(valid, at, -1),
        kv_heads=kv_heads,
    )


def best_positions(
    mass: Float32[Array, "B K S"],
    lengths: Int32[Array, " B"],
    counts: Int32[Array, " B"],
    *,
    most: int,
    window: int,
    sinks: int,
    pool: int,
) -> Int32[Array, "B K most"]:
    """The positions to keep, ascending, -1 behind them.

    The first `sinks` and the last `window` tokens are kept; of those before the window the ones
    with the highest mass among the `pool` neighbours around them (max-pooling). Of equals the
    earlier one.

    Args:
        mass: by position.
        counts: tokens to keep of each row, min(lengths, sinks + window) at least, `most` at most.
    """
    slot = jnp.arange(mass.shape[2], dtype=jnp.int32)
    length = lengths[:, None, None]
    early = slot < length - window
    pooled = lax.reduce_window(
        jnp.where(early, mass, -jnp.inf),
        -jnp.inf,
        lax.max,
        window_dimensions=(1, 1, pool),
        window_strides=(1, 1, 1),
        padding="SAME",
    )
    score = jnp.where(early & (slot >= sinks), pooled, jnp.inf)
    score = jnp.where(slot < length, score, -jnp.inf)
    # Of equal scores `top_k` names the lower index first.
    _, chosen = lax.top_k(score, most)
    kept = jnp.arange(most, dtype=jnp.int32) < counts[:, None, None]
    behind = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(kept, chosen.astype(jnp.int32), behind), axis=-1)
    return jnp.where(ordered == behind, -1, ordered)


def all_positions(lengths: Int32[Array, " B"], kv_heads: int, most: int) -> jax.Array:
    """0 ... length - 1 for every head, -1 behind them: int32 [B, K, most]."""
    slot = jnp.arange(most, dtype=jnp.int32)
    kept = jnp.where(slot < lengths[:, None], slot, -1)
    return jnp.broadcast_to(kept[:, None], (lengths.shape[0], kv_heads, most))
