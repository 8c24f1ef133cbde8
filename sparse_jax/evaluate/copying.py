"""Copy recall: a passage of a long text, to be repeated word for word."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparse_jax.caches.base import CacheMethod
from sparse_jax.config import ModelConfig
from sparse_jax.evaluate.checks import check_context
from sparse_jax.evaluate.recall import (
    Prompt,
    RecallResult,
    chat_parts,
    check_grid,
    encode,
    excerpt,
    haystack,
    measure,
    nearest,
    sentence_starts,
)
from sparse_jax.model import Params

DEPTHS = tuple((index + 0.5) / 8 for index in range(8))
CUE = 16
PASSAGE = 112
QUESTION = "\n\nRepeat the passage of the text above that begins with these words:"


def copy_prompts(
    ids: np.ndarray,
    tokenizer: Any,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    passage: int,
    cue: int,
) -> list[Prompt]:
    """The trials of a grid in the order (length, depth); see `copy_recall` for the arguments."""
    before, after = chat_parts(tokenizer, QUESTION, "")
    ask = encode(tokenizer, QUESTION)
    if after[: len(ask)] != ask:
        raise ValueError("the chat template changes the end of the user's message")
    end_of_turn = after[len(ask) :]
    total = len(lengths) * len(depths)
    prompts = []
    for length in lengths:
        for depth in depths:
            size = length - len(before) - len(after) - 2 * cue - passage
            if size < cue + passage:
                raise ValueError(
                    f"length={length} is too short to hold a passage of {cue} + {passage} tokens "
                    "and the question for it"
                )
            text = excerpt(ids, size, len(prompts), total)
            last = size - cue - passage
            places = [place for place in sentence_starts(tokenizer, text) if place <= last]
            at = nearest(places, depth * last)
            given, asked = text[at : at + cue], text[at + cue : at + cue + passage]
            question = [*ask, *given, *end_of_turn, *given]
            prompts.append(Prompt([*before, *text], question, asked, depth, length))
    return prompts


def copy_recall(
    params: Params,
    tokens: Sequence[int] | np.ndarray,
    *,
    config: ModelConfig,
    tokenizer: Any,
    method: CacheMethod,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    passage: int = PASSAGE,
    cue: int = CUE,
    question_seen: bool = False,
    batch: int = 1,
    chunk: int | None = None,
    progress: bool = True,
) -> RecallResult:
    """NLL of a passage that stands in the text, when the model is asked to repeat it.

    The most sensitive of the evaluations: it needs every token of the passage, and gives a
    smooth number where a needle gives a hit or a miss. The passage begins at the sentence boundary
    nearest to its depth; the question, in the model's chat template, quotes its first `cue`
    tokens, the reply starts with them, and the `passage` tokens after them are scored. Each trial
    has its own stretch of the text. For the two protocols see `question_seen` in `needle`.

    Args:
        params: parameter tree of the model.
        tokens: ids of the text; at least as many as the largest length.
        lengths: tokens of the whole chat, the passage included: also the slots of its cache.
        depths: 0 (start of the text) to 1 (the passage ends the text).
        passage: tokens that are scored.
        cue: tokens of the passage's beginning that are given.
        batch: trials at a time.
        chunk: tokens of one prefill call; None leaves it to `prefill`.

    Raises:
        ValueError: an empty grid, a depth outside 0..1, `passage` or `cue` below 1, a length that
            is beyond the model's context or too short for the passage, a text that is too short,
            or a tokenizer without chat template.
    """
    check_grid(depths, lengths, batch)
    for name, value in (("passage", passage), ("cue", cue)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    ids = haystack(tokens, tokenizer, config)
    for length in lengths:
        check_context(length, config)
    prompts = copy_prompts(ids, tokenizer, lengths=lengths, depths=depths, passage=passage, cue=cue)
    return measure(
        params,
        prompts,
        config=config,
        tokenizer=tokenizer,
        method=method,
        question_seen=question_seen,
        batch=batch,
        chunk=chunk,
        progress=progress,
        name="copy",
    )
