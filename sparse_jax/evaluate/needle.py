"""Needle retrieval: a word or a number hidden in a long text, asked for at its end."""

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

KINDS = ("word", "number")
DEPTHS = tuple((index + 0.5) / 10 for index in range(10))

# Names of cities: words that a model writes without quotation marks. (Asked for "the secret word",
# a small chat model opens one of its own accord, and then looks as if it had not found the word.)
WORDS = (
    "Paris", "Rome", "Tokyo", "Vienna", "Cairo", "Lisbon", "Madrid", "Oslo", "Dublin", "Athens",
    "Berlin", "Moscow", "Delhi", "Prague", "Sydney", "Toronto", "Chicago", "Boston", "Havana",
    "Warsaw",
)  # fmt: skip

NAME = {"word": "city", "number": "number"}
NEEDLE = "\n\nRemember this: the secret {name} is {answer}.\n\n"
QUESTION = "\n\nWhat is the secret {name} mentioned in the text above?"
REPLY = "The secret {name} is"


def hidden_answers(kind: str, count: int, seed: int) -> list[str]:
    """Words, or numbers of six digits, one for each trial; the same for the same seed."""
    rng = np.random.default_rng(seed)
    if kind == "number":
        return [str(number) for number in rng.integers(100_000, 1_000_000, count)]
    order = rng.permutation(len(WORDS))
    return [WORDS[order[index % len(WORDS)]] for index in range(count)]


def needle_prompts(
    ids: np.ndarray,
    tokenizer: Any,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    kind: str,
    seed: int,
) -> list[Prompt]:
    """The trials of a grid in the order (length, depth); see `needle` for the arguments."""
    name = NAME[kind]
    before, after = chat_parts(tokenizer, QUESTION.format(name=name), REPLY.format(name=name))
    total = len(lengths) * len(depths)
    hidden = hidden_answers(kind, total, seed)
    wanted = [encode(tokenizer, " " + answer) for answer in hidden]
    room = max(map(len, wanted))  # the same for all, so that all contexts of a length are as long
    prompts = []
    for length in lengths:
        for depth in depths:
            index = len(prompts)
            line = encode(tokenizer, NEEDLE.format(name=name, answer=hidden[index]))
            size = length - len(before) - len(line) - len(after) - room
            if size < 1:
                raise ValueError(f"length={length} leaves no room for text beside the question")
            text = excerpt(ids, size, index, total)
            at = nearest(sentence_starts(tokenizer, text), depth * size)
            context = [*before, *text[:at], *line, *text[at:]]
            prompts.append(Prompt(context, after, wanted[index], depth, length))
    return prompts


def needle(
    params: Params,
    tokens: Sequence[int] | np.ndarray,
    *,
    config: ModelConfig,
    tokenizer: Any,
    method: CacheMethod,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    kind: str = "word",
    question_seen: bool = False,
    seed: int = 0,
    batch: int = 1,
    chunk: int | None = None,
    progress: bool = True,
) -> RecallResult:
    """One trial for each length and depth: is the hidden thing found?

    The needle is a paragraph of its own, at the sentence boundary nearest to its depth; the
    question follows in the model's chat template, with the first words of the reply given. Each
    trial has its own stretch of the text and its own needle. The question is appended after
    `finish_prefill` (the method has compressed the text without knowing what it will be asked),
    or, with `question_seen`, is part of what the method sees.

    Args:
        params: parameter tree of the model.
        tokens: ids of the text to hide in; at least as many as the largest length.
        lengths: tokens of the whole chat, the answer included: also the slots of its cache.
        depths: 0 (start of the text) to 1 (its end).
        kind: "word" (the name of a city) or "number" (six digits).
        seed: of the words and numbers.
        batch: trials at a time.
        chunk: tokens of one prefill call; None leaves it to `prefill`.

    Raises:
        ValueError: an unknown kind, an empty grid, a depth outside 0..1, a length that is beyond
            the model's context or too short for the question, a text that is too short, or a
            tokenizer without chat template.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; there are {', '.join(KINDS)}")
    check_grid(depths, lengths, batch)
    ids = haystack(tokens, tokenizer, config)
    for length in lengths:
        check_context(length, config)
    prompts = needle_prompts(ids, tokenizer, lengths=lengths, depths=depths, kind=kind, seed=seed)
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
        name=f"needle ({kind})",
    )
