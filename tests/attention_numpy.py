"""Attention and the page layout again, in numpy and float64: shares no line with the product."""

import math

import numpy as np


def to_pages(tokens: np.ndarray, size: int, spare: float, extra: int = 0) -> np.ndarray:
    """Tokens [B, S, K, D] laid out slot by slot in pages of `size`, `extra` pages behind each row.

    Page c of sequence b and KV head k is page (b * C + c) * K + k; what no token fills is `spare`.
    """
    batch, slots, kv_heads, dim = tokens.shape
    count = math.ceil(slots / size) + extra
    pages = np.full((batch * count * kv_heads, size, dim), spare, tokens.dtype)
    for row in range(batch):
        for slot in range(slots):
            page = (row * count + slot // size) * kv_heads
            for head in range(kv_heads):
                pages[page + head, slot % size] = tokens[row, slot, head]
    return pages


def visible(position: int, window: int | None, sinks: int = 0, stride: int | None = None):
    """The positions that a query at `position` sees, in order, one by one by the rule."""
    return [
        key
        for key in range(position + 1)
        if window is None
        or position - key < window
        or key < sinks
        or (stride is not None and key % stride == 0)
    ]


def attend(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    positions: list[int],
    window: int | None,
    sinks: int = 0,
    stride: int | None = None,
    allowed: list[list[list[int]]] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence, one query and one head at a time: float64 out [T, H, D] and lse [T, H].

    Query t [T, H, D] sees the keys [S, K, D] at the `visible` positions of positions[t]; a negative
    position sees none. `allowed[t][k]`, where given, names the only slots it may see of KV head k.
    """
    tokens, heads, dim = query.shape
    group = heads // key.shape[1]
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    out = np.zeros((tokens, heads, dim))
    lse = np.full((tokens, heads), -np.inf)
    for t, position in enumerate(positions):
        for head in range(heads):
            seen = visible(position, window, sinks, stride)
            if allowed is not None:
                seen = [each for each in seen if each in allowed[t][head // group]]
            if not seen:
                continue
            scores = key[seen, head // group] @ query[t, head] / math.sqrt(dim)
            peak = scores.max()
            weights = np.exp(scores - peak)
            out[t, head] = weights @ value[seen, head // group] / weights.sum()
            lse[t, head] = peak + np.log(weights.sum())
    return out, lse
