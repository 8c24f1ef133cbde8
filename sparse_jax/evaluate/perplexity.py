"""Perplexity of a text, teacher-forced through the cache."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from sparse_jax.caches.base import CacheMethod
from sparse_jax.config import ModelConfig
from sparse_jax.evaluate.checks import check_context, check_text
from sparse_jax.evaluate.memory import dense_bytes_bf16
from sparse_jax.evaluate.scoring import Rows, score
from sparse_jax.model import Params


@dataclass(frozen=True)
class PerplexityResult:
    nll: float
    """Mean of -log p over the predicted tokens, in nats."""
    tokens: int
    """Tokens predicted."""
    context: int
    stride: int
    cache_bytes: int
    """Bytes of the cache of one window."""
    cache_bytes_bf16: int
    """Bytes of a dense bfloat16 cache of `context` tokens."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


@dataclass(frozen=True)
class Window:
    """Tokens [start, scored) fill the cache; tokens [scored, end) are predicted, one by one."""

    start: int
    scored: int
    end: int


def windows(tokens: int, context: int, stride: int, max_tokens: int | None = None) -> list[Window]:
    """Windows of at most `context` tokens, `stride` apart, that predict no token twice.

    The last `stride` tokens of a window are predicted, so each has at least `context - stride`
    tokens before it; the tokens in front of the first window's are never predicted. With
    `stride == context` a window's first token has nothing before it and is left out. The last
    window may be shorter.
    """
    prefix = max(context - stride, 1)
    left = tokens if max_tokens is None else max_tokens
    found = []
    for start in range(0, tokens - prefix, stride):
        end = min(start + context, tokens, start + prefix + left)
        if end <= start + prefix:
            break
        found.append(Window(start, start + prefix, end))
        left -= end - start - prefix
    return found


def perplexity(
    params: Params,
    tokens: Sequence[int] | np.ndarray,
    *,
    config: ModelConfig,
    method: CacheMethod,
    context: int,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch: int = 4,
    chunk: int | None = None,
    progress: bool = True,
) -> PerplexityResult:
    """Mean negative log-likelihood of a text as the model sees it through a cache.

    Protocol: the text is cut into windows of `context` tokens, `stride` apart. In each, the first
    `context - stride` tokens go in by `prefill`, `finish_prefill` lets the method evict or
    compress, and the last `stride` tokens are predicted one after the other by `decode_step` with
    the true token fed back, so that each is judged by what the cache really kept. Each token is
    predicted at most once, always with at least `context - stride` tokens of the text before it;
    no BOS is put in front of a window.

    Args:
        params: parameter tree of the model.
        tokens: ids of the whole text, as the tokenizer gives them.
        context: tokens of one window, and slots of its cache.
        stride: tokens predicted in each window, 1..context. A small one gives each token a longer
            context and costs more prefill; the default, a quarter of the context, keeps at least
            three quarters of it in front of each token.
        max_tokens: stop after this many predicted tokens.
        batch: windows at a time. Decoding is bound by reading the parameters, so a few cost
            hardly more than one.
        chunk: tokens of one prefill call; None leaves it to `prefill`.

    Raises:
        ValueError: context longer than the model's, text shorter than the context, a stride
            outside 1..context, `max_tokens` or `batch` below 1, an id outside the vocabulary.
    """
    ids = check_text(tokens, config)
    check_context(context, config)
    stride = max(context // 4, 1) if stride is None else stride
    if not 1 <= stride <= context:
        raise ValueError(f"stride={stride} must lie between 1 and the context, {context}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1")
    if len(ids) < context:
        raise ValueError(
            f"the text has {len(ids)} tokens, fewer than context={context}; take a longer text or "
            "a shorter context"
        )
    parts = windows(len(ids), context, stride, max_tokens)
    width = max(part.end - part.scored for part in parts)
    batch = min(batch, len(parts))
    total, count, held = 0.0, 0, 0
    for at in tqdm(range(0, len(parts), batch), desc="perplexity", disable=not progress):
        group = parts[at : at + batch]
        # The last group is filled up with rows that count for nothing: one compile serves all.
        filled = group + group[-1:] * (batch - len(group))
        scores = score(
            params,
            Rows.of([ids[part.start : part.scored] for part in filled]),
            None,
            Rows.of([ids[part.scored : part.end] for part in filled], width),
            config=config,
            method=method,
            chunk=chunk,
        )
        total += float(scores.nll[: len(group)].sum())
        count += int(scores.counts[: len(group)].sum())
        held = scores.cache_bytes // batch
    return PerplexityResult(
        nll=total / count,
        tokens=count,
        context=context,
        stride=stride,
        cache_bytes=held,
        cache_bytes_bf16=dense_bytes_bf16(config, context),
    )
