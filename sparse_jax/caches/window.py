"""Sinks and the latest tokens: "Efficient Streaming Language Models with Attention Sinks"
(StreamingLLM), arXiv 2309.17453. Positions stay the true ones."""

import dataclasses

from sparse_jax.caches.layers import check_int
from sparse_jax.caches.ring import RingMethod


@dataclasses.dataclass(frozen=True)
class Window(RingMethod):
    """Every query sees the first `sinks` tokens and the last `window`, its own included.

    Holds sinks + window tokens, whatever the length.

    Attributes:
        window: tokens, the current one included.
        sinks: tokens at the start, kept for good.
    """

    window: int = 1024
    sinks: int = 4
    stride = None

    def __post_init__(self):
        check_int("Window", 1, window=self.window)
        check_int("Window", 0, sinks=self.sinks)
