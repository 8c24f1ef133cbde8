"""A cache method fed without a model: projections of two rows, in chunks and token by token."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_jax.caches import Projections, Span
from sparse_jax.config import ModelConfig


def feeder(method: Any, model: ModelConfig):
    """Its `prefill` and `decode`, by name, compiled."""

    @functools.partial(jax.jit, static_argnames=("name", "layer"))
    def feed(state, projected, span, name, layer=0):
        return getattr(method, name)(model, state, layer, projected, span)

    return feed


def feed_rows(
    method: Any,
    model: ModelConfig,
    state: Any,
    projections: Sequence[np.ndarray],
    lengths: Sequence[int],
    *,
    chunk: int,
    steps: int = 0,
) -> tuple[np.ndarray, Any]:
    """Outputs of the last layer [B, T, H, D] and the state after rows of `lengths` tokens.

    The last `steps` of all T tokens are decoded. Padding is NaN.

    Args:
        projections: query, key and value, [B, T, heads, D]; every layer is given the same.
    """
    total = projections[0].shape[1]
    feed = feeder(method, model)
    outs, at = [], 0
    while at < total:
        decode = at >= total - steps
        size = 1 if decode else chunk
        stop = min(at + size, total if decode else total - steps)
        counts = np.clip(np.array(lengths) - at, 0, stop - at).astype(np.int32)
        padded: list[Any] = []
        for tokens in projections:
            part = np.full((len(lengths), size, *tokens.shape[2:]), np.nan, np.float32)
            for row, count in enumerate(counts):
                part[row, :count] = tokens[row, at : at + count]
            padded.append(part)
        query, key, value = padded
        span = Span(state.lengths, jnp.asarray(counts))
        name = "decode" if decode else "prefill"
        for layer in range(model.num_layers):
            out, state = feed(state, Projections(query, key, key, value), span, name, layer)
        state = method.advance(model, state, span.counts)
        outs.append(np.asarray(out)[:, : stop - at])
        at = stop
    return np.concatenate(outs, 1), state
