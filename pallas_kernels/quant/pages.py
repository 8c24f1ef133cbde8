"""Pages of 8-bit or 4-bit codes with scales, as the decode kernels read them."""

import dataclasses
from typing import Literal

import jax
from jaxtyping import Array, Float, Int8, UInt8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedPages:
    """`x = codes * scales + offsets`, codes signed, one scale and offset a group of elements.

    Grouped by channel (for keys), `group` tokens of a page share those of each channel; grouped by
    token (for values), `group` channels of each token do (KIVI, arXiv 2402.02750). So a kernel can
    fold them into the query and into the weights, and multiplies bare codes.

    Attributes:
        codes: int8 [N, P, D]; with 4 bits uint8 [N, P, D / 2], byte j of a token holding channel j
            in its low half and channel j + D / 2 in its high half, each as code + 8.
        scales, offsets: [N, P / group, D] by channel, [N, P, D / group] by token; one floating
            dtype, that of the numbers they stand for.
        bits: 8 or 4.
        by: "channel" or "token".
    """

    codes: Int8[Array, "N P D"] | UInt8[Array, "N P halfD"]
    scales: Float[Array, "N a b"]
    offsets: Float[Array, "N a b"]
    bits: Literal[8, 4] = dataclasses.field(metadata={"static": True})
    by: Literal["channel", "token"] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int]:
        """[N, P, D] of the numbers that the codes stand for."""
        pages, size, width = self.codes.shape
        return pages, size, width * 8 // self.bits

    @property
    def dtype(self):
        """Dtype of the numbers that the codes stand for."""
        return self.scales.dtype

    @property
    def group(self) -> int:
        """Tokens (by channel) or channels (by token) that share a scale."""
        axis = 1 if self.by == "channel" else 2
        return self.shape[axis] // self.scales.shape[axis]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.offsets.nbytes
