"""The tokens that the end of a prompt looks at: "SnapKV: LLM Knows What You are Looking for Before
Generation", arXiv 2404.14469."""

import dataclasses

from sparse_jax.caches.budgets import Budget, Budgets, check_budgets, check_layers, of_layer
from sparse_jax.caches.kept import KeptMethod
from sparse_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class SnapKV(KeptMethod):
    """Cuts the first prompt to `budget` tokens when it is complete, each KV head its own.

    Kept are the first `sinks` tokens, the last `window`, and of the others those that get most
    attention from the last `window` queries, a group's heads summed, after max-pooling over `pool`
    neighbours. A prompt within the budget stays whole. All later tokens, of answers and of further
    turns, are kept.

    A question at the end of the prompt steers the choice; one that comes later finds what the
    choice has left.

    Attributes:
        budget: tokens kept of a prompt, sinks and window included, or their share of it; a tuple
            has one for each layer.
        window: queries that choose, and latest tokens kept.
        sinks: tokens at the start, kept for good.
        pool: neighbours, an odd number; 1 for none.
    """

    budget: Budgets = 1024
    window: int = 32
    sinks: int = 4
    pool: int = 7

    def __post_init__(self):
        self._check_kept()
        check_budgets("SnapKV", self.budget, self._least, "sinks + window")

    def budgets(self, config: ModelConfig, capacity: int) -> tuple[Budget, ...]:
        check_layers("SnapKV", self.budget, config)
        return tuple(of_layer(self.budget, layer) for layer in range(config.num_layers))
