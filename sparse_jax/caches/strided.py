"""Sinks, the latest tokens, and every n-th token before them: the fixed strides of "Generating Long
Sequences with Sparse Transformers", arXiv 1904.10509, for a causal cache."""

import dataclasses

from sparse_jax.caches.layers import check_int
from sparse_jax.caches.ring import RingMethod


@dataclasses.dataclass(frozen=True)
class Strided(RingMethod):
    """Every query sees the first `sinks` tokens, the last `window`, its own included, and the
    earlier positions that are a multiple of `stride`.

    Holds sinks + window + length / stride tokens.

    Attributes:
        window: tokens, the current one included.
        stride: in tokens; 1 keeps everything.
        sinks: tokens at the start, kept for good.
    """

    window: int = 512
    stride: int = 16
    sinks: int = 4

    def __post_init__(self):
        check_int("Strided", 1, window=self.window, stride=self.stride)
        check_int("Strided", 0, sinks=self.sinks)
