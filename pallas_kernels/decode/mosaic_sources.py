"""Pages as the portable decode kernel reads them: plain, or codes with scales and offsets.

A part of a page (tokens side by side) is read into registers well before its use and turned into
16-bit numbers there. Where the layout allows it, those numbers are the bare codes, and the scales
and offsets go where fewer numbers meet them (KIVI, arXiv 2402.02750, has the grouping):

    q . (scale * code + offset) = (q * scale) . code + q . offset            keys, by channel
    sum_t p_t (scale_t * code_t + offset_t) = sum_t (p_t scale_t) code_t + sum_t p_t offset_t

Otherwise each number is made in full, in float32, before it is rounded.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.patterns import Pattern
from pallas_kernels.quant.pages import QuantizedPages

_WARPS = 4


def copy_layout(rows: int, width: int, itemsize: int):
    """Rows spread over the threads in long loads, each to become 16 bytes of 16-bit numbers.

    None where the rows are too few for it.
    """
    for vector in (8, 4, 2, 1):
        lanes = math.gcd(width // vector, 32)
        across = 32 // lanes
        if width % vector or rows % (_WARPS * across) or vector * itemsize > 16:
            continue
        made = TiledLayout(
            Tiling(((_WARPS * across, lanes * vector), (across, lanes * vector), (vector,))),
            warp_dims=(-5,),
            lane_dims=(-3, -2),
            vector_dim=-1,
            _check_canonical=False,
        ).canonicalize()
        return plgpu.Layout.TILED(made.tiling, made.warp_dims, made.lane_dims, made.vector_dim)
    return None


def zeros(shape: tuple[int, ...], dtype, layout):
    """Zeros in registers."""
    return plgpu.layout_cast(jnp.zeros(shape, dtype), layout)


@dataclasses.dataclass(frozen=True)
class Sight:
    """Which of the tokens at position `start` and on the newest token sees."""

    pattern: Pattern
    start: Any
    newest: Any

    def mask(self, shape: tuple[int, ...], layout):
        """True where the token of a row is seen."""
        rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        return self.pattern.visible(rows + self.start, self.newest)

    def whole(self, count: int):
        """Whether it surely sees all of `count` tokens; a scalar."""
        seen = self.start + count - 1 <= self.newest
        if self.pattern.is_dense:
            return seen
        near = self.start > self.newest - self.pattern.window
        return seen & (near | (self.start + count <= self.pattern.sinks))


@dataclasses.dataclass(frozen=True)
class PlainPages:
    """Pages of 16-bit numbers.

    Attributes:
        pages: [N, P, D].
        part: tokens read at a time.
    """

    pages: jax.Array
    part: int
    folded = False

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """What the kernel is given, as refs."""
        return (self.pages,)

    @property
    def run(self) -> tuple[int, int]:
        """Stored numbers of a row that are read together, and the bytes of one."""
        return self.pages.shape[2], 2

    @property
    def layout(self):
        return copy_layout(self.part, *self.run)

    def read(self, refs, page, slot) -> tuple:
        """Everything that belongs to the tokens at `slot` and on of a page, as it is stored."""
        rows = refs[0].at[page, pl.ds(slot, self.part)]
        return (plgpu.load(rows, layout=self.layout, optimized=False),)

    def nothing(self) -> tuple:
        """Zeros in the form of `read`."""
        return (zeros((self.part, self.run[0]), self.pages.dtype, self.layout),)

    def numbers(self, raw: tuple, dtype, sight: Sight | None) -> list:
        """First channel and 16-bit numbers of each run of channels; 0 for what is not seen.

        Weights of 0 do not silence a NaN. Without `sight`, all is seen.
        """
        del dtype
        (tile,) = raw
        if sight is None:
            return [(0, tile)]

        def hide():
            nothing = zeros(tile.shape, tile.dtype, self.layout)
            return jnp.where(sight.mask(tile.shape, self.layout), tile, nothing)

        return [(0, lax.cond(sight.whole(self.part), lambda: tile, hide))]


def _codes(stored, bits: int, dtype) -> list:
    """Signed codes as 16-bit numbers, exactly: those of whole bytes, or of their two halves.

    A conversion by bits: they become the last ones of a number whose unit they are.
    """
    base, one = (128, 0x4300) if dtype == jnp.bfloat16 else (1024, 0x6400)
    wide = stored.astype(jnp.uint16)

    def number(code):
        return lax.bitcast_convert_type(code | jnp.uint16(one), dtype)

    if bits == 4:
        halves = (wide & jnp.uint16(15), (wide >> jnp.uint16(4)) & jnp.uint16(15))
        return [number(half) - jnp.asarray(base + 8, dtype) for half in halves]
    low, sign = wide & jnp.uint16(127), wide & jnp.uint16(128)
    # In bfloat16 the sign's bit is the exponent's last one: 256 in place of 128.
    return [number(low) - number(sign)]


def _finished(half, scale, offset, axis: int):
    """Numbers that codes stand for, in float32, from constants of their rows or columns."""
    scale, offset = (
        lax.broadcast_in_dim(each.astype(jnp.float32), half.shape, [axis])
        for each in (scale, offset)
    )
    return (half.astype(jnp.float32) * scale + offset).astype(half.dtype)


@dataclasses.dataclass(frozen=True)
class KeysByChannel:
    """Quantised keys; all the tokens of a part share their constants.

    Attributes:
        pages: by channel.
        part: tokens read at a time.
        folded: whether a part is a whole step, so that `constants` fit into the query.
        query_side, key_side: layouts of a [D] vector that goes with the query, and with the keys.
    """

    pages: QuantizedPages
    part: int
    folded: bool
    query_side: Any
    key_side: Any

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.pages.codes, self.pages.scales, self.pages.offsets

    @property
    def run(self) -> tuple[int, int]:
        return self.pages.codes.shape[2], 1

    @property
    def layout(self):
        return copy_layout(self.part, *self.run)

    def _vectors(self) -> list:
        """First channel, channels and layout of each vector of constants; scales come first."""
        dim, width = self.pages.shape[2], self.run[0]
        if self.folded:
            return [(0, dim, self.query_side)], [(0, dim, self.key_side)]
        return ([(first, width, self.layout.reduce(0)) for first in range(0, dim, width)],) * 2

    def read(self, refs, page, slot) -> tuple:
        codes, *constants = refs
        found = [
            plgpu.load(codes.at[page, pl.ds(slot, self.part)], layout=self.layout, optimized=False)
        ]
        for ref, vectors in zip(constants, self._vectors(), strict=True):
            for first, width, layout in vectors:
                row = ref.at[page, slot // self.pages.group, pl.ds(first, width)]
                found.append(plgpu.load(row, layout=layout, optimized=False))
        return tuple(found)

    def nothing(self) -> tuple:
        stored = zeros((self.part, self.run[0]), self.pages.codes.dtype, self.layout)
        scales, offsets = self._vectors()
        vectors = [
            zeros((width,), self.pages.dtype, layout) for _, width, layout in [*scales, *offsets]
        ]
        return stored, *vectors

    def constants(self, raw: tuple):
        """Scales and offsets [D], where they are folded."""
        return raw[1], raw[2]

    def numbers(self, raw: tuple, dtype, sight: Sight | None) -> list:
        del sight  # scores of what is not seen are replaced
        stored, *constants = raw
        halves = _codes(stored, self.pages.bits, dtype)
        made = []
        for index, half in enumerate(halves):
            if not self.folded:
                scale, offset = constants[index], constants[index + len(halves)]
                half = _finished(half, scale, offset, 1)
            made.append((index * self.run[0], half))
        return made


@dataclasses.dataclass(frozen=True)
class ValuesByToken:
    """Quantised values.

    Attributes:
        pages: by token.
        part: tokens read at a time.
        folded: whether `constants` go into the weights.
    """

    pages: QuantizedPages
    part: int
    folded: bool

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.pages.codes, self.pages.scales, self.pages.offsets

    @property
    def groups(self) -> int:
        """Groups of channels of a token."""
        return self.pages.scales.shape[2]

    @property
    def run(self) -> tuple[int, int]:
        stored = self.pages.codes.shape[2]
        return stored if self.folded else math.gcd(self.pages.group, stored), 1

    @property
    def layout(self):
        return copy_layout(self.part, *self.run)

    def read(self, refs, page, slot) -> tuple:
        codes, *constants = refs
        rows, width = pl.ds(slot, self.part), self.run[0]
        found = []
        for first in range(0, self.pages.codes.shape[2], width):
            tile = codes.at[page, rows, pl.ds(first, width)]
            found.append(plgpu.load(tile, layout=self.layout, optimized=False))
        for ref in constants:
            for group in range(self.groups):
                column = ref.at[page, rows, group]
                found.append(plgpu.load(column, layout=self.layout.reduce(1), optimized=False))
        return tuple(found)

    def nothing(self) -> tuple:
        width = self.run[0]
        tile = zeros((self.part, width), self.pages.codes.dtype, self.layout)
        vector = zeros((self.part,), self.pages.dtype, self.layout.reduce(1))
        tiles = [tile] * (self.pages.codes.shape[2] // width)
        return *tiles, *[vector] * (2 * self.groups)

    def constants(self, raw: tuple, sight: Sight) -> list:
        """Scales, then offsets [part] of each group; 0 for what is not seen, for which they may
        be NaN (codes never are)."""
        layout = self.layout.reduce(1)
        seen = sight.mask((self.part,), layout)
        nothing = zeros((self.part,), self.pages.dtype, layout)
        return [jnp.where(seen, each, nothing) for each in raw[-2 * self.groups :]]

    def numbers(self, raw: tuple, dtype, sight: Sight) -> list:
        stored, width = self.pages.codes.shape[2], self.run[0]
        constants = [] if self.folded else self.constants(raw, sight)
        made = []
        for index in range(stored // width):
            for which, half in enumerate(_codes(raw[index], self.pages.bits, dtype)):
                first = index * width + which * stored
                if not self.folded:
                    group = first // self.pages.group
                    half = _finished(half, constants[group], constants[group + self.groups], 0)
                made.append((first, half))
        return made
