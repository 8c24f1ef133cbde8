"""Budgets: how many tokens of a context a method keeps, or reads.

A budget is a number of tokens (an int), a share of the context (a float in (0, 1]), or a tuple with
one of these for each layer. It counts all that a query can attend to, sinks and window included.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from sparse_jax.config import ModelConfig

Budget = int | float
Budgets = Budget | tuple[Budget, ...]


def check_budgets(method: str, budget: Budgets, least: int, made_of: str) -> None:
    """Demands budgets that cover what is always kept.

    Args:
        least: tokens that are always kept.
        made_of: what these are, as in "sinks + window".

    Raises:
        ValueError: a number of tokens below `least` or below 1, or a share outside (0, 1].
        TypeError: neither an int nor a float.
    """
    if isinstance(budget, tuple) and not budget:
        raise ValueError(f"{method}: budget = (); give one for each layer, or a single one")
    for each in budget if isinstance(budget, tuple) else (budget,):
        if isinstance(each, bool) or not isinstance(each, int | float):
            raise TypeError(
                f"{method}: budget = {each!r}; give tokens (an int) or a share of the context "
                "(a float in (0, 1])"
            )
        if isinstance(each, float) and not 0 < each <= 1:
            raise ValueError(
                f"{method}: budget = {each!r}; a share of the context lies in (0, 1] (a number of "
                "tokens is an int)"
            )
        if isinstance(each, int) and each < max(least, 1):
            raise ValueError(
                f"{method}: budget = {each} tokens, but {made_of} already take {least}; give a "
                "larger budget"
            )


def check_layers(method: str, budget: Budgets, config: ModelConfig) -> None:
    """Demands one budget for each layer of the model, where there are several.

    Raises:
        ValueError: there are more or fewer.
    """
    if isinstance(budget, tuple) and len(budget) != config.num_layers:
        raise ValueError(
            f"{method}: {len(budget)} budgets, but the model has {config.num_layers} layers; give "
            "one for each, or a single one"
        )


def of_layer(budget: Budgets, layer: int) -> Budget:
    """The layer's own budget."""
    return budget[layer] if isinstance(budget, tuple) else budget


def most_tokens(budget: Budget, capacity: int, least: int) -> int:
    """The most tokens that a budget allows in sequences of up to `capacity` tokens.

    A share that would not cover the `least` tokens which are always kept allows these.
    """
    if isinstance(budget, int):
        return min(budget, capacity)
    return min(capacity, max(least, math.ceil(np.float32(budget) * np.float32(capacity))))


def tokens_of(
    budget: Budget, lengths: Int32[Array, " B"] | np.ndarray, least: int
) -> Int32[Array, " B"]:
    """The tokens that a budget allows in rows of `lengths` tokens; agrees with `most_tokens`."""
    lengths = jnp.asarray(lengths, jnp.int32)
    if isinstance(budget, int):
        return jnp.minimum(lengths, budget)
    share = jax.lax.ceil(jnp.float32(budget) * lengths.astype(jnp.float32)).astype(jnp.int32)
    return jnp.minimum(lengths, jnp.maximum(share, least))
