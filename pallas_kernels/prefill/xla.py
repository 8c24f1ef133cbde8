"""Blockwise causal attention in plain XLA: O(block) memory, masked blocks skipped, any back end.

Online softmax over blocks of keys ("Self-attention Does Not Need O(n^2) Memory", arXiv
2112.05682; the rescaling of FlashAttention, arXiv 2205.14135).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.pages import by_sequence
from pallas_kernels.patterns import Pattern
from pallas_kernels.types import AttentionOutput

# Chosen on a 2-core CPU: rows (queries times the heads that share a KV head) and keys of one
# matrix product, large enough for its rate and small enough for its scores to stay in cache.
_ROWS = 768
_KEYS = 512


def prefill_attention(
    query: Float[Array, "B T H D"],
    key_pages: Float[Array, "N P D"],
    value_pages: Float[Array, "N P D"],
    starts: Int32[Array, " B"],
    counts: Int32[Array, " B"],
    *,
    kv_heads: int,
    pattern: Pattern,
    table: Int32[Array, "B K C"] | None,
    selected: Int32[Array, "B K Q M"] | None,
    query_block: int,
) -> AttentionOutput:
    """See `pallas_kernels.prefill.api.prefill_attention`."""
    if table is not None or selected is not None or pattern.sinks or pattern.stride is not None:
        raise NotImplementedError
    window = pattern.window
    batch, tokens, heads, dim = query.shape
    group = heads // kv_heads
    block = min(max(1, _ROWS // group), tokens)
    blocks = -(-tokens // block)
    padded = jnp.pad(query, ((0, 0), (0, blocks * block - tokens), (0, 0), (0, 0)))
    # [blocks, B, K, block * G, D]: the queries that share a KV head form one matrix.
    split = padded.reshape(batch, blocks, block, kv_heads, group, dim)
    split = split.transpose(1, 0, 3, 2, 4, 5).reshape(blocks, batch, kv_heads, block * group, dim)
    keys = by_sequence(key_pages, batch, kv_heads)
    values = by_sequence(value_pages, batch, kv_heads)

    def one_block(carry, inputs):
        index, queries = inputs
        offset = index * block + jnp.arange(block)
        result = _attend_block(
            queries, keys, values, starts, counts, offset, group=group, window=window
        )
        return carry, result

    _, (out, lse) = lax.scan(one_block, None, (jnp.arange(blocks), split))
    out = out.reshape(blocks, batch, kv_heads, block, group, dim)
    out = out.transpose(1, 0, 3, 2, 4, 5).reshape(batch, blocks * block, heads, dim)
    lse = lse.reshape(blocks, batch, kv_heads, block, group)
    lse = lse.transpose(1, 0, 3, 2, 4).reshape(batch, blocks * block, heads)
    return AttentionOutput(out[:, :tokens], lse[:, :tokens])


def _attend_block(queries, keys, values, starts, counts, offset, *, group, window):
    """One block of queries [B, K, M, D] against the key blocks that any of its rows can see.

    Key blocks that every query sees whole (most of a long context) go without a mask, which saves
    about a quarter of the time; those on the diagonal, or partly beyond a window, take one.
    """
    batch, kv_heads, rows, dim = queries.shape
    pages, size = keys.shape[1], keys.shape[3]
    step = max(1, min(pages, _KEYS // size))  # pages a key block
    width = step * size
    position = starts[:, None] + offset  # [B, block]
    valid = offset < counts[:, None]
    last = jnp.where(valid, position, -1)
    stop = (last.max() + width) // width
    everyone = valid.all()
    whole = jnp.where(everyone, (position.min() + 1) // width, 0)
    start = jnp.int32(0)
    if window is not None:
        first = jnp.where(valid, position - (window - 1), pages * size).min()
        start = jnp.clip(first, 0) // width
        whole = start
    last = jnp.repeat(last, group, axis=1)[:, None, :, None]  # [B, 1, M, 1]
    ends = (starts + counts)[:, None, None, None]

    def read(index):
        # The last block is moved back to fit; slots it repeats are masked by `fresh`.
        page = jnp.minimum(index * step, pages - step)
        return page, _take(keys, page, step), _take(values, page, step)

    def attend_whole(index, carry):
        _, key, value = read(index)
        return _accumulate(carry, _scores(queries, key), value)

    def attend_masked(index, carry):
        page, key, value = read(index)
        slot = page * size + jnp.arange(width)
        visible = (slot <= last) & (slot >= index * width)
        if window is not None:
            visible &= slot > last - window
        scores = jnp.where(visible, _scores(queries, key), -jnp.inf)
        # Slots not written yet may hold NaN, which a weight of 0 would not silence.
        return _accumulate(carry, scores, jnp.where(slot[:, None] < ends, value, 0))

    carry = (
        jnp.full((batch, kv_heads, rows), -jnp.inf, jnp.float32),
        jnp.zeros((batch, kv_heads, rows), jnp.float32),
        jnp.zeros((batch, kv_heads, rows, dim), jnp.float32),
    )
    if window is None:
        carry = lax.fori_loop(0, whole, attend_whole, carry)
    peak, total, out = lax.fori_loop(whole, stop, attend_masked, carry)
    safe = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, -jnp.inf, peak * dim**-0.5 + jnp.log(safe))
    return (out / safe[..., None]).astype(queries.dtype), lse


def _scores(queries, key):
    """Unscaled: the scale is folded into the exponential, where it costs nothing."""
    return jnp.einsum("bkmd,bksd->bkms", queries, key, preferred_element_type=jnp.float32)


def _accumulate(carry, scores, value):
    """One step of the online softmax: (peak of the unscaled scores, sum of weights, output)."""
    peak, total, out = carry
    scale = value.shape[-1] ** -0.5
    new_peak = jnp.maximum(peak, scores.max(-1))
    # A finite stand-in keeps exp(-inf - peak) at 0 where no key was seen yet.
    base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
    weights = jnp.exp((scores - base[..., None]) * scale)
    shrink = jnp.exp((peak - base) * scale)
    added = jnp.einsum(
        "bkms,bksd->bkmd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    return new_peak, total * shrink + weights.sum(-1), out * shrink[..., None] + added


def _take(pages: Float[Array, "B C K P D"], first, step: int) -> Float[Array, "B K S D"]:
    """`step` pages of every sequence, their slots joined."""
    batch, _, kv_heads, size, dim = pages.shape
    run = lax.dynamic_slice_in_dim(pages, first, step, axis=1)
    return run.swapaxes(1, 2).reshape(batch, kv_heads, step * size, dim)
