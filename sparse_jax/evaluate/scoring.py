"""Teacher forcing through a cache: what every evaluation here is built on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sparse_jax.caches.base import Cache, CacheMethod, empty_cache
from sparse_jax.config import ModelConfig
from sparse_jax.inference import finish_prefill, prefill, run_token
from sparse_jax.model import Params, params_dtype


@dataclass(frozen=True)
class Scores:
    """What a cache made of the tokens it was asked for; arrays live on the host."""

    nll: Float[np.ndarray, "B A"]
    """-log p of each answer token in nats; 0 beyond a row's count."""
    predicted: Int[np.ndarray, "B A"]
    """The most likely token in each answer token's place."""
    counts: Int[np.ndarray, " B"]
    """Answer tokens of each row."""
    cache_bytes: int
    """Bytes of the cache, all rows together."""


@dataclass(frozen=True)
class Rows:
    """Right-padded rows of token ids."""

    tokens: Int[np.ndarray, "B T"]
    counts: Int[np.ndarray, " B"]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | np.ndarray], width: int | None = None) -> "Rows":
        """Pads lists of ids with 0 to `width` tokens (default: the longest row's)."""
        counts = np.array([len(row) for row in rows], np.int32)
        tokens = np.zeros((len(rows), counts.max() if width is None else width), np.int32)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
        return cls(tokens, counts)


def score(
    params: Params,
    context: Rows,
    question: Rows | None,
    answer: Rows,
    *,
    config: ModelConfig,
    method: CacheMethod,
    question_seen: bool = False,
    chunk: int | None = None,
) -> Scores:
    """Fill a cache with a context, then measure a known answer, token after token.

    The protocol, the same for every method:

    1. the context goes in by `prefill`;
    2. `finish_prefill`: here a method evicts or compresses, once;
    3. the question, if there is one, goes into the same cache by `prefill`. With `question_seen`
       steps 2 and 3 change places, so that the method knows what it will be asked for;
    4. the answer goes in by `decode_step`, one token at a time, whatever the model would have
       said (one compiled scan). Each answer token is judged by what the cache really kept.

    The cache has as many slots as the three are wide together, and is dropped at the end.

    Args:
        params: parameter tree of the model.
        context, question, answer: one row each for every sequence; at least one token in each row
            of the context and of the question.
        chunk: tokens of one prefill call; None leaves it to `prefill`.
    """
    rows = context.tokens.shape[0]
    asked = 0 if question is None else question.tokens.shape[1]
    width = context.tokens.shape[1] + asked + answer.tokens.shape[1]
    cache = empty_cache(method, config, rows, width, params_dtype(params))

    def feed(cache: Cache, part: Rows):
        tokens, counts = jnp.asarray(part.tokens), jnp.asarray(part.counts)
        return prefill(params, cache, tokens, counts, config=config, chunk=chunk)

    if question is not None and question_seen:
        # One prompt, as it would be in use: the method sees a single prefill.
        prompt = [
            [*ids[:size], *asked[:more]]
            for ids, size, asked, more in zip(
                context.tokens, context.counts, question.tokens, question.counts, strict=True
            )
        ]
        context = Rows.of(prompt, context.tokens.shape[1] + question.tokens.shape[1])
    logits, cache = feed(cache, context)
    cache = finish_prefill(cache, config=config, room=width - context.tokens.shape[1])
    if question is not None and not question_seen:
        logits, cache = feed(cache, question)
    held = cache.nbytes
    nll, predicted, _ = _force(params, cache, logits, jnp.asarray(answer.tokens), config=config)
    judged = np.arange(answer.tokens.shape[1]) < answer.counts[:, None]
    return Scores(
        nll=np.where(judged, np.asarray(nll, np.float64), 0.0),
        predicted=np.asarray(predicted),
        counts=answer.counts,
        cache_bytes=held,
    )


@partial(jax.jit, static_argnames=("config",), donate_argnames=("cache",))
def _force(
    params: Params,
    cache: Cache,
    logits: Float[Array, "B V"],
    answer: Int[Array, "B A"],
    *,
    config: ModelConfig,
) -> tuple[Float[Array, "B A"], Int[Array, "B A"], Cache]:
    """NLL and most likely token in place of each answer token, given all those before it.

    The cache is given back only so that its donated buffers are written in place.
    """

    def judge(logits, target):
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
        nll = -jnp.take_along_axis(log_p, target[:, None], axis=-1)[:, 0]
        return nll, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def step(carry, tokens):
        cache, before = carry
        given, target = tokens
        logits, cache = run_token(params, cache, given, everyone, config=config)
        return (cache, logits), judge(logits, target)

    everyone = jnp.ones(answer.shape[0], bool)
    first = judge(logits, answer[:, 0])
    following = (answer[:, :-1].T, answer[:, 1:].T)
    (cache, _), rest = jax.lax.scan(step, (cache, logits), following)
    nll, predicted = (
        jnp.concatenate([one[:, None], many.T], axis=1)
        for one, many in zip(first, rest, strict=True)
    )
    return nll, predicted, cache
