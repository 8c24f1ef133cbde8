"""Tiny models with weights from numpy, and `forward` as the oracle of all that has a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_jax.config import ModelConfig
from sparse_jax.generation import GenerateOutput
from sparse_jax.inference import forward
from sparse_jax.model import Params, abstract_params

# Between two orders of the same float32 sums, for logits of a few units.
TOLERANCE = 1e-5


@functools.cache
def random_params(config: ModelConfig, dtype: str = "float32", seed: int = 0) -> Params:
    """Weights under which nothing can hide: attention is far from uniform, norms aren't 1, biases
    are as large as what they are added to. The same numbers in every dtype, up to rounding."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        names = [entry.key for entry in path]
        values = rng.normal(size=leaf.shape)
        if names[-1] == "scale":
            values = 1 + 0.3 * values
        elif names[-1] == "kernel":
            gain = 2.0 if names[-2] in ("query", "key") else 1.0
            values = gain * values / np.sqrt(leaf.shape[0])
        return jnp.asarray(values.astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config, jnp.dtype(dtype)))


def chain_params(config: ModelConfig, following: dict[int, int]) -> Params:
    """A model whose likeliest next token is `following[current]`, whatever came before.

    Blocks add nothing, embeddings are one-hot and the output layer is the table: a logit of 4 (at
    E = 16) for the token that follows, 0 for all others.
    """
    assert config.hidden_size >= config.vocab_size and not config.tie_embeddings
    params = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, np.float32), abstract_params(config, jnp.float32)
    )
    params["embedding"]["embedding"] = np.eye(
        config.vocab_size, config.hidden_size, dtype=np.float32
    )
    params["final_norm"]["scale"] = np.ones(config.hidden_size, np.float32)
    for token, after in following.items():
        params["lm_head"]["kernel"][token, after] = 1
    return jax.tree.map(jnp.asarray, params)


def random_prompts(*lengths: int, vocab: int = 64, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def batch(
    prompts: list[list[int]], *, width: int | None = None, pad: int = 0, left: bool = False
) -> tuple[Any, Any]:
    """int32 (tokens [B, width], counts [B]), in numpy: making jax arrays may compile."""
    counts = np.array([len(prompt) for prompt in prompts], np.int32)
    width = int(counts.max()) if width is None else width
    tokens = np.full((len(prompts), width), pad, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        first = width - len(prompt) if left else 0
        row[first : first + len(prompt)] = prompt
    return tokens, counts


def ints(values) -> Any:
    return np.array(values, np.int32)


def forward_logits(
    config: ModelConfig, params: Params, rows: list[list[int]], width: int = 96
) -> np.ndarray:
    """float32 [B, width, V]; one width, so that a config compiles once for a number of rows."""
    return np.asarray(forward(params, *batch(rows, width=width), config=config))


def rows_of(out: GenerateOutput) -> list[list[int]]:
    """The new tokens of each row."""
    lengths = np.asarray(out.lengths)
    return [row[:n].tolist() for row, n in zip(np.asarray(out.tokens), lengths, strict=True)]


def assert_follows_forward(
    config: ModelConfig, params: Params, prompts: list[list[int]], out: GenerateOutput
) -> None:
    """Each new token is the likeliest by `forward` over the whole text, and so likely."""
    new = rows_of(out)
    logits = forward_logits(config, params, [p + n for p, n in zip(prompts, new, strict=True)])
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    assert out.logprobs is not None
    for row, (prompt, tokens) in enumerate(zip(prompts, new, strict=True)):
        before = logprobs[row, len(prompt) - 1 : len(prompt) + len(tokens) - 1]
        np.testing.assert_array_equal(before.argmax(-1), tokens)
        np.testing.assert_allclose(
            np.asarray(out.logprobs)[row, : len(tokens)], before.max(-1), rtol=0, atol=TOLERANCE
        )
