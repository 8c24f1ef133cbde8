"""Which cached positions a query may see: ranges of keys, never a dense mask.

Kernels skip what lies outside the ranges; only the references turn them into masks.
"""

import dataclasses

from jaxtyping import Array, Bool, Int32


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A query at position p sees itself and, of the positions before it, those that qualify.

    A position qualifies that is among the last `window` (p included), or among the first `sinks`,
    or a multiple of `stride`; without a window all do. Sinks and window: StreamingLLM, arXiv
    2309.17453; stride: Sparse Transformer, arXiv 1904.10509.

    Attributes:
        window: tokens, p included; None for all.
        sinks: tokens at the start of the sequence.
        stride: in tokens; None for no strided positions.
    """

    window: int | None = None
    sinks: int = 0
    stride: int | None = None

    def __post_init__(self):
        for name, least in (("window", 1), ("sinks", 0), ("stride", 1)):
            value = getattr(self, name)
            if value is None and name != "sinks":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                hint = "; a window counts the current token" if name == "window" else ""
                raise ValueError(f"{name} = {value!r}; give an int >= {least}{hint}")
        if self.window is None and (self.sinks or self.stride is not None):
            raise ValueError(
                f"sinks = {self.sinks}, stride = {self.stride} without a window: every position "
                "is visible anyway; give a window, or neither of them"
            )

    @property
    def is_dense(self) -> bool:
        """Whether every position up to the query's is visible."""
        return self.window is None or self.stride == 1

    def visible(self, key: Int32[Array, "*k"], query: Int32[Array, "*q"]) -> Bool[Array, "*r"]:
        """Whether a query at position `query` sees a key at position `key`; shapes broadcast."""
        seen = key <= query
        if self.window is None or self.is_dense:
            return seen
        near = key > query - self.window
        if self.sinks:
            near |= key < self.sinks
        if self.stride is not None:
            near |= key % self.stride == 0
        return seen & near


DENSE = Pattern()
