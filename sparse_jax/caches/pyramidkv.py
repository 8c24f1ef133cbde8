"""More tokens for the lower layers: "PyramidKV: Dynamic KV Cache Compression based on Pyramidal
Information Funneling", arXiv 2406.02069."""

import dataclasses
from fractions import Fraction

import numpy as np

from sparse_jax.caches.budgets import Budget, check_budgets, most_tokens
from sparse_jax.caches.kept import KeptMethod
from sparse_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class PyramidKV(KeptMethod):
    """As `SnapKV`, with budgets that fall from layer to layer, in equal steps, to the same total.

    Beyond sinks and window, which every layer keeps, the last layer has 1 / beta of the mean and
    the first one 2 - 1 / beta, or what the cache's capacity leaves to choose from; the last one
    then has more, so that a budget of the whole capacity is dense. A prompt stays whole in the
    layers whose budget it fits; `budgets(config, capacity)` lists them.

    Attributes:
        budget: tokens kept of a prompt in the mean over layers, sinks and window included, or
            their share of it.
        window: queries that choose, and latest tokens kept.
        sinks: tokens at the start, kept for good.
        pool: neighbours, an odd number; 1 for none.
        beta: how steep; 1 is `SnapKV`.
    """

    budget: Budget = 1024
    window: int = 32
    sinks: int = 4
    pool: int = 7
    beta: float = 20.0

    def __post_init__(self):
        self._check_kept()
        if isinstance(self.budget, tuple):
            raise TypeError(
                f"PyramidKV: budget = {self.budget!r}; give the mean over layers (SnapKV takes one "
                "for each layer)"
            )
        check_budgets("PyramidKV", self.budget, self._least, "sinks + window")
        if isinstance(self.beta, bool) or not isinstance(self.beta, int | float):
            raise TypeError(f"PyramidKV: beta = {self.beta!r}; give a number >= 1")
        if not 1 <= self.beta < float("inf"):
            raise ValueError(f"PyramidKV: beta = {self.beta!r}; give a number >= 1")

    def budgets(self, config: ModelConfig, capacity: int) -> tuple[Budget, ...]:
        layers = config.num_layers
        mean = most_tokens(self.budget, capacity, self._least)
        tokens = _pyramid(mean, min(self._least, mean), capacity, layers, self.beta)
        if isinstance(self.budget, int):
            return tokens
        return tuple(_share(each, capacity) for each in tokens)


def _pyramid(mean: int, least: int, most: int, layers: int, beta: float) -> tuple[int, ...]:
    """Integers that fall in equal steps around the mean, from `most` at the most: their sum is
    exactly `layers * mean`."""
    if layers == 1:
        return (mean,)
    # Fractions: a float's error could move a token from one layer to another.
    first = min(least + (mean - least) * (2 - 1 / Fraction(beta)), Fraction(most))
    step = 2 * (first - mean) / (layers - 1)
    exact = [first - step * layer for layer in range(layers)]
    floors = [int(each) for each in exact]
    # What rounding down leaves goes to the largest remainders: none rises above `most` or above
    # the layer before it.
    order = sorted(range(layers), key=lambda layer: floors[layer] - exact[layer])
    for layer in order[: layers * mean - sum(floors)]:
        floors[layer] += 1
    return tuple(floors)


def _share(tokens: int, capacity: int) -> float:
    """The share of the capacity that `most_tokens` turns into so many tokens again."""
    if tokens == capacity:
        return 1.0
    # A share rounded up would round up to one token more.
    return float(np.nextafter(np.float32(tokens / capacity), np.float32(0)))
