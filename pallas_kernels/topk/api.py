"""The public selection ops: each validates once, then runs one implementation."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.mosaic_support import mosaic_card
from pallas_kernels.quant.pages import QuantizedPages
from pallas_kernels.topk import mosaic, reference, xla

Implementation = Literal["reference", "xla", "mosaic"]
_PAGE_SCORES = {
    "reference": reference.page_scores,
    "xla": xla.page_scores,
    "mosaic": mosaic.page_scores,
}
_TOKEN_SCORES = {
    "reference": reference.token_scores,
    "xla": xla.token_scores,
    "mosaic": mosaic.token_scores,
}


def page_scores(
    query: Float[Array, "B H D"],
    summaries: Float[Array, "BK C 2D"],
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    size: int,
    implementation: Implementation | None = None,
) -> Float32[Array, "B K C"]:
    """How high any key of each page can score, from the page's summary.

    `sum_d max(q_d max_d, q_d min_d) * D ** -0.5`, of the query heads of a KV head the best: no key
    of the page scores higher (up to rounding). -inf for pages that hold no position below the
    row's length, and for those that have no key. From "Quest: Query-Aware Sparsity for Efficient
    Long-Context LLM Inference", arXiv 2406.10774.

    Args:
        query: rotated queries, float32, bfloat16 or float16.
        summaries: same dtype (`pallas_kernels.topk.summaries`); those of pages at or behind a
            row's length may hold anything.
        lengths: tokens each row holds, int32 [B].
        kv_heads: K.
        size: P, tokens a page.
        implementation: force one; None picks for the platform.

    Raises:
        ValueError, TypeError: shapes, dtypes or options disagree, or the forced implementation
            cannot serve them; the message names them.
    """
    checks.check_query(query, "[B, H, D]")
    batch, heads, dim = query.shape
    checks.check_heads(heads, kv_heads)
    checks.check_floats(query=query, summaries=summaries)
    checks.check_rows(batch, lengths=lengths)
    whole = summaries.ndim == 3 and summaries.shape[1] > 0
    if not whole or summaries.shape[::2] != (batch * kv_heads, 2 * dim):
        raise ValueError(
            f"summaries have shape {summaries.shape}; expected [{batch * kv_heads}, C, {2 * dim}] "
            f"for query {query.shape} and kv_heads = {kv_heads}"
        )
    if size < 1:
        raise ValueError(f"size = {size}; give the tokens a page, at least 1")
    refusal = mosaic.unsupported_pages(query, summaries, kv_heads=kv_heads)
    run = _pick(_PAGE_SCORES, implementation, refusal)
    return run(query, summaries, lengths, kv_heads=kv_heads, size=size)


def token_scores(
    query: Float[Array, "B H D"],
    key_pages: Float[Array, "N P D"] | QuantizedPages,
    lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    table: Int32[Array, "B K C"] | None = None,
    implementation: Implementation | None = None,
) -> Float32[Array, "B K S"]:
    """The score of every cached token, of the query heads of a KV head the best.

    `q . k * D ** -0.5` for the S = C * P positions in order; -inf at or behind the row's length,
    and where the table names no page.

    Args:
        query: rotated queries, float32, bfloat16 or float16.
        key_pages: the pool, same dtype or quantised by channel. Slots at or behind a row's length
            may hold anything.
        lengths: tokens each row holds, int32 [B].
        kv_heads: K.
        table: block table, -1 for no page; None for the contiguous layout.
        implementation: force one; None picks for the platform.

    Raises:
        ValueError, TypeError: shapes, dtypes, page ids or options disagree, or the forced
            implementation cannot serve them; the message names them.
    """
    checks.check_query(query, "[B, H, D]")
    batch, heads, dim = query.shape
    checks.check_heads(heads, kv_heads)
    checks.check_pages(key_pages, key_pages, head_dim=dim)
    if isinstance(key_pages, QuantizedPages):
        checks.check_quantized(key_pages, None)
    checks.check_floats(query=query, key_pages=key_pages)
    checks.check_rows(batch, lengths=lengths)
    pool = key_pages.shape[0]
    checks.check_table(table, None, batch=batch, kv_heads=kv_heads, pages=pool)
    refusal = mosaic.unsupported_tokens(query, key_pages, kv_heads=kv_heads)
    run = _pick(_TOKEN_SCORES, implementation, refusal)
    return run(query, key_pages, lengths, kv_heads=kv_heads, table=table)


def top_k(scores: Float[Array, "*n C"], k: int) -> Int32[Array, "*n M"]:
    """Where the k best scores of each row stand, best first; ties go to the lower index.

    -inf marks what must not be chosen: M = min(k, C), and where fewer than M scores are above
    -inf, all of those are chosen and -1 stands in the rest. A NaN ranks as +inf, so that a broken
    score shows in what is computed from it.

    Args:
        scores: float32, bfloat16 or float16.
        k: how many to keep, a Python int.

    Raises:
        ValueError, TypeError: k is no int >= 0, or scores are no floats.
    """
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"k = {k!r} is a {type(k).__name__}; give a Python int")
    if k < 0:
        raise ValueError(f"k = {k}; give an int >= 0")
    checks.check_floats(scores=scores)
    if scores.ndim < 1:
        raise ValueError(f"scores have shape {scores.shape}; expected [..., C]")
    if k == 0 or 0 in scores.shape:
        return jnp.zeros((*scores.shape[:-1], min(k, scores.shape[-1])), jnp.int32)
    return xla.top_k(scores, k)


def _pick(bodies: dict, implementation: str | None, refusal: str | None):
    """The body to run: the one asked for, else Mosaic if it can run, else XLA.

    Raises:
        ValueError: the name is unknown, or Mosaic was asked for and cannot run.
    """
    checks.check_known(implementation, list(bodies))
    if implementation in ("reference", "xla"):
        return bodies[implementation]
    card = mosaic_card()
    reason = card if isinstance(card, str) else refusal
    if reason is None:
        return bodies["mosaic"]
    checks.check_served(implementation, reason)
    return bodies["xla"]
