"""What needle and copy recall share: a chat about a long text, and how its answer is judged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from sparse_jax.caches.base import CacheMethod
from sparse_jax.chat import encode_chat
from sparse_jax.config import ModelConfig
from sparse_jax.evaluate.checks import check_text
from sparse_jax.evaluate.memory import dense_bytes_bf16
from sparse_jax.evaluate.scoring import Rows, score
from sparse_jax.model import Params

MARK = "\ue000"  # a private-use character, which no text and no chat template contains


@dataclass(frozen=True)
class Prompt:
    """One trial as token ids, cut where the method may be told to compress."""

    context: list[int]
    """From the start of the chat to the end of the text."""
    question: list[int]
    """The question, the end of the user's turn, and the first words of the reply."""
    answer: list[int]
    """What the model should go on with."""
    depth: float
    """Where in the text the answer stands: 0 its start, 1 its end."""
    length: int
    """Tokens in all: the context that was asked for."""


@dataclass(frozen=True)
class Trial:
    length: int
    depth: float
    hit: bool
    """Whether greedy decoding writes the whole answer: each of its tokens is the most likely one
    after those before it."""
    accuracy: float
    """Share of the answer's tokens that were the most likely one."""
    nll: float
    """Mean of -log p over the answer's tokens, in nats."""
    answer: str
    written: str
    """What greedy decoding writes, up to its first token that differs from the answer."""


@dataclass(frozen=True)
class RecallResult:
    """All trials of a grid, in the order (length, depth)."""

    trials: tuple[Trial, ...]
    question_seen: bool
    cache_bytes: int
    """Bytes of one row's cache at the largest length."""
    cache_bytes_bf16: int
    """Bytes of a dense bfloat16 cache of that many tokens."""

    @property
    def hits(self) -> int:
        return sum(trial.hit for trial in self.trials)

    @property
    def nll(self) -> float:
        """Mean over the trials."""
        return sum(trial.nll for trial in self.trials) / len(self.trials)

    @property
    def accuracy(self) -> float:
        """Mean over the trials."""
        return sum(trial.accuracy for trial in self.trials) / len(self.trials)


def chat_parts(tokenizer: Any, question: str, reply: str) -> tuple[list[int], list[int]]:
    """A chat with one turn, as ids before and after the text that it is about.

    It starts as `encode_chat` has it, with one BOS at most. Both parts are encoded on their own, so
    that the text's ids between them do not depend on the question.

    Args:
        question: stands after the text, in the same turn of the user's.
        reply: first words of the assistant's turn.

    Raises:
        ValueError: the tokenizer has no chat template, or one that does not keep the text.
    """
    turn = [{"role": "user", "content": MARK + question}]
    first = encode_chat(tokenizer, turn)[:1]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    if text.count(MARK) != 1:
        raise ValueError("the chat template does not write the user's message exactly once")
    before, after = text.split(MARK)
    head = encode(tokenizer, before)
    if first == [tokenizer.bos_token_id] != head[:1]:
        head = [*first, *head]  # the template leaves the BOS to the tokenizer
    return head, encode(tokenizer, after + reply)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a piece of text, without special tokens of the tokenizer's own."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def haystack(tokens: Sequence[int] | np.ndarray, tokenizer: Any, config: ModelConfig) -> np.ndarray:
    """A text's ids, checked, without the BOS that its tokenizer may have put in front: the text
    comes to stand within a chat, which has its own."""
    ids = check_text(tokens, config)
    return ids[1:] if ids[0] == tokenizer.bos_token_id else ids


def sentence_starts(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Indices at which a sentence or a line begins, 0 and len(ids) among them."""
    ends = {}
    for token in set(ids):
        piece = tokenizer.decode([token]).rstrip(" \"'")
        ends[token] = piece.endswith((".", "!", "?", "\n"))
    inner = [at + 1 for at, token in enumerate(ids) if ends[token]]
    return sorted({0, len(ids), *inner})


def nearest(places: Sequence[int], wanted: float) -> int:
    return min(places, key=lambda place: abs(place - wanted))


def excerpt(ids: np.ndarray, size: int, index: int, total: int) -> list[int]:
    """`size` tokens of a text for trial `index` of `total`, spread evenly over it.

    Raises:
        ValueError: the text is shorter than that.
    """
    if len(ids) < size:
        raise ValueError(f"the text has {len(ids)} tokens; this context takes {size} of them")
    start = (len(ids) - size) * index // max(total - 1, 1)
    return [int(token) for token in ids[start : start + size]]


def check_grid(depths: Sequence[float], lengths: Sequence[int], batch: int) -> None:
    """Refuses an empty grid, a depth outside 0..1 and a batch below 1."""
    if not depths or not lengths:
        raise ValueError(f"an empty grid: depths={list(depths)}, lengths={list(lengths)}")
    wrong = [depth for depth in depths if not 0 <= depth <= 1]
    if wrong:
        raise ValueError(f"depth {wrong[0]} is outside 0..1 (0 the start of the text, 1 its end)")
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1")


def measure(
    params: Params,
    prompts: Sequence[Prompt],
    *,
    config: ModelConfig,
    tokenizer: Any,
    method: CacheMethod,
    question_seen: bool,
    batch: int,
    chunk: int | None,
    progress: bool,
    name: str,
) -> RecallResult:
    """Run trials, `batch` of one length at a time, and judge their answers.

    All prompts of one length compile once: questions and answers are padded to the longest.
    """
    question_width = max(len(prompt.question) for prompt in prompts)
    answer_width = max(len(prompt.answer) for prompt in prompts)
    trials: list[Trial] = []
    held = 0
    lengths = list(dict.fromkeys(prompt.length for prompt in prompts))
    with tqdm(total=len(prompts), desc=name, disable=not progress) as bar:
        for length in lengths:
            same = [prompt for prompt in prompts if prompt.length == length]
            context_width = max(len(prompt.context) for prompt in same)
            rows = min(batch, len(same))
            for at in range(0, len(same), rows):
                group = same[at : at + rows]
                # Filled up with rows that count for nothing, so that one compile serves all.
                filled = group + group[-1:] * (rows - len(group))
                scores = score(
                    params,
                    Rows.of([prompt.context for prompt in filled], context_width),
                    Rows.of([prompt.question for prompt in filled], question_width),
                    Rows.of([prompt.answer for prompt in filled], answer_width),
                    config=config,
                    method=method,
                    question_seen=question_seen,
                    chunk=chunk,
                )
                for row, prompt in enumerate(group):
                    size = len(prompt.answer)
                    nll, predicted = scores.nll[row, :size], scores.predicted[row, :size]
                    trials.append(judge(prompt, nll, predicted, tokenizer))
                if length == max(lengths):
                    held = scores.cache_bytes // rows
                bar.update(len(group))
    return RecallResult(
        trials=tuple(trials),
        question_seen=question_seen,
        cache_bytes=held,
        cache_bytes_bf16=dense_bytes_bf16(config, max(lengths)),
    )


def judge(prompt: Prompt, nll: np.ndarray, predicted: np.ndarray, tokenizer: Any) -> Trial:
    right = predicted == np.asarray(prompt.answer)
    hit = bool(right.all())
    # Up to the first wrong token, forced and free decoding are the same thing.
    upto = len(right) if hit else int(right.argmin()) + 1
    return Trial(
        length=prompt.length,
        depth=prompt.depth,
        hit=hit,
        accuracy=float(right.mean()),
        nll=float(nll.mean()),
        answer=tokenizer.decode(prompt.answer),
        written=tokenizer.decode(predicted[:upto].tolist()),
    )
