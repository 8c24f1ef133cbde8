"""Bytes of a cache, as its buffers hold them, and of the dense cache it replaces."""

from typing import Any

import jax

from sparse_jax.config import ModelConfig


def cache_bytes(cache: Any) -> int:
    """Bytes of every array of a cache pytree, bookkeeping (lengths, positions) included.

    Works on real arrays and on `jax.ShapeDtypeStruct` leaves alike.
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def dense_bytes_bf16(config: ModelConfig, tokens: int, rows: int = 1) -> int:
    """Bytes of the keys and values of `tokens` tokens in `rows` rows, dense, in bfloat16.

    2 (K and V) * layers * KV heads * head dim * 2 bytes for each token; no bookkeeping. The
    yardstick that every method is put beside, whatever dtype it was itself run in.
    """
    if tokens < 0 or rows < 0:
        raise ValueError(f"tokens={tokens} and rows={rows} must not be negative")
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2 * tokens * rows
