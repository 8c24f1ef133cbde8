"""Choosing the next token: greedy, temperature, top-k, top-p, min-p, repetition penalty.

What a user writes is one frozen `SamplingParams`. For compiling it is split in two: which samplers
are on (`SamplerSwitches`, static) and their numbers (`SamplerValues`, traced), so that a sweep over
temperatures compiles once.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

_SMALLEST = 1e-6


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to generate.

    Filters act in this order, as in transformers: repetition penalty, temperature, top-k, top-p,
    min-p.

    Attributes:
        max_new_tokens: tokens to generate at most, >= 1, the end-of-text token included.
        temperature: divides the logits; 0 takes the likeliest token (ties: the lowest id).
            Otherwise at least 1e-6: below, quotients leave the range of float32.
        top_k: keep the k likeliest tokens, and those tied with the k-th.
        top_p: keep the likeliest tokens until their probabilities reach p, in (0, 1], and those
            tied with the last of them.
        min_p: keep tokens with at least this share of the likeliest one's probability, in [0, 1].
        repetition_penalty: in [1e-6, 1e6]; divides positive logits, multiplies negative ones, of
            every token that the row holds already, prompt and earlier turns included (arXiv
            1909.05858).
        seed: row b draws from fold_in(key(seed), b), so that a draw depends on its row and step
            only.
        eos_ids: ids that end a row; None takes the model's, () lets nothing end it.
        logprobs: also return log-probabilities (of the model's own distribution, before any
            filter).

    Raises:
        ValueError: a field is out of range, or a filter is set that greedy decoding would ignore.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0
    eos_ids: int | tuple[int, ...] | None = None
    logprobs: bool = False

    def __post_init__(self):
        _whole("max_new_tokens", self.max_new_tokens, 1)
        _whole("seed", self.seed, 0)
        if self.seed >= 2**32:
            raise ValueError(f"seed = {self.seed}; give a number below 2**32")
        if not _is_number(self.temperature) or not (
            self.temperature == 0 or self.temperature >= _SMALLEST
        ):
            raise ValueError(
                f"temperature = {self.temperature!r}; give 0 (greedy) or a number >= {_SMALLEST}"
            )
        if self.top_k is not None:
            _whole("top_k", self.top_k, 1)
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p = {self.top_p!r}; give a number in (0, 1], or None")
        if self.min_p is not None and not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise ValueError(f"min_p = {self.min_p!r}; give a number in [0, 1], or None")
        penalty = self.repetition_penalty
        if penalty is not None and not (
            _is_number(penalty) and _SMALLEST <= penalty <= 1 / _SMALLEST
        ):
            raise ValueError(
                f"repetition_penalty = {penalty!r}; give a number in [1e-6, 1e6], or None"
            )
        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        given = [name for name, value in filters.items() if value is not None]
        if self.temperature == 0 and given:
            raise ValueError(
                f"{given[0]} = {filters[given[0]]} has no effect at temperature = 0 (greedy); set "
                "a temperature, or leave it out"
            )
        ids = (self.eos_ids,) if isinstance(self.eos_ids, int) else self.eos_ids
        if ids is not None:
            if not isinstance(ids, tuple):
                raise ValueError(f"eos_ids = {ids!r}; give an id, a tuple of ids, or None")
            for each in ids:
                _whole("eos_ids", each, 0)

    def switches(self, default_eos: tuple[int, ...]) -> "SamplerSwitches":
        """The static half; `default_eos` are the model's ids."""
        ids = (self.eos_ids,) if isinstance(self.eos_ids, int) else self.eos_ids
        return SamplerSwitches(
            greedy=self.temperature == 0,
            top_k=self.top_k is not None,
            top_p=self.top_p is not None,
            min_p=self.min_p is not None,
            penalty=self.repetition_penalty is not None,
            logprobs=self.logprobs,
            eos_ids=default_eos if ids is None else ids,
        )

    def values(self) -> "SamplerValues":
        """The traced half."""
        return SamplerValues(
            temperature=np.float32(self.temperature),
            # All tokens are kept from V on, and V is an int32.
            top_k=np.int32(min(self.top_k or 0, np.iinfo(np.int32).max)),
            top_p=np.float32(self.top_p or 1),
            min_p=np.float32(self.min_p or 0),
            penalty=np.float32(self.repetition_penalty or 1),
            seed=np.uint32(self.seed),
        )


@dataclasses.dataclass(frozen=True)
class SamplerSwitches:
    """Which samplers are on, and what ends a row: static, part of the compile key."""

    greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool
    penalty: bool
    logprobs: bool
    eos_ids: tuple[int, ...]


class SamplerValues(NamedTuple):
    """The samplers' numbers: traced scalars (made with numpy, which compiles nothing)."""

    temperature: Any  # float32
    top_k: Any  # int32
    top_p: Any  # float32
    min_p: Any  # float32
    penalty: Any  # float32
    seed: Any  # uint32


def sample(
    logits: Float32[Array, "B V"],
    history: Int32[Array, "B capacity"],
    step: Int32[Array, ""],
    switches: SamplerSwitches,
    values: SamplerValues,
) -> tuple[Int32[Array, " B"], Float32[Array, " B"] | None]:
    """The next token of each row, and its log-probability if asked for. Pure.

    Args:
        logits: float32.
        history: the ids each row holds, -1 where none.
        step: tokens generated before this one; with row and seed it fixes the draw.
    """
    raw = logits
    if switches.penalty:
        logits = _penalise(logits, history, values.penalty)
    if switches.greedy:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        kept = filter_logits(logits / values.temperature, switches, values)
        keys = _row_keys(values.seed, step, logits.shape[0])
        tokens = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
    if not switches.logprobs:
        return tokens, None
    chosen = jnp.take_along_axis(raw, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(raw, axis=-1)


def is_eos(tokens: Int32[Array, " B"], switches: SamplerSwitches) -> Bool[Array, " B"]:
    """Which tokens end their row."""
    if not switches.eos_ids:
        return jnp.zeros(tokens.shape, bool)
    return (tokens[:, None] == jnp.array(switches.eos_ids, jnp.int32)).any(-1)


def filter_logits(
    logits: Float32[Array, "B V"], switches: SamplerSwitches, values: SamplerValues
) -> Float32[Array, "B V"]:
    """-inf on every token that top-k, top-p or min-p drops. The likeliest token always stays."""
    if switches.top_k or switches.top_p:
        ordered = -jnp.sort(-logits, axis=-1)
        bound = jnp.full(logits.shape[:1], -jnp.inf)
        if switches.top_k:
            last = jnp.minimum(values.top_k, logits.shape[-1]) - 1
            bound = jnp.take_along_axis(ordered, jnp.full((logits.shape[0], 1), last), -1)[:, 0]
            ordered = jnp.where(ordered >= bound[:, None], ordered, -jnp.inf)
        if switches.top_p:
            share = jax.nn.softmax(ordered, axis=-1)
            before = jnp.cumsum(share, axis=-1) - share
            # Kept as long as those before it haven't reached p: the first one always is, and all
            # are at p = 1, which a rounded sum may pass early.
            keep = ((before < values.top_p) | (values.top_p >= 1)).at[:, 0].set(True)
            lowest = jnp.where(keep, ordered, jnp.inf).min(-1)
            bound = jnp.maximum(bound, lowest)
        logits = jnp.where(logits >= bound[:, None], logits, -jnp.inf)
    if switches.min_p:
        bound = logits.max(-1, keepdims=True) + jnp.log(values.min_p)
        logits = jnp.where(logits >= bound, logits, -jnp.inf)
    return logits


def _penalise(logits, history, penalty):
    batch, vocab = logits.shape
    rows = jnp.arange(batch)[:, None]
    # Empty places (-1) aim past the end, where the write is dropped: -1 itself would wrap.
    at = jnp.where(history >= 0, history, vocab)
    seen = jnp.zeros((batch, vocab), bool).at[rows, at].set(True, mode="drop")
    punished = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, punished, logits)


def _row_keys(seed, step, batch: int):
    key = jax.random.key(seed)
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), step))(
        jnp.arange(batch)
    )


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(name: str, value, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} = {value!r}; give an int >= {minimum}")
