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
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, TiledLayout, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.patterns import Pattern
from pallas_kernels.quant.pages import QuantizedPages

_WARPS = 4
STEP = 8 * _WARPS  # columns that the warps cover side by side in a product


def copy_layout(rows: int, width: int, itemsize: int) -> Any:
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


def _vector_layout(count: int, most: int):
    """Numbers of a vector spread over each warp's lanes, `most` side by side at the most."""
    lanes = math.gcd(count, 32)
    vector = math.gcd(count // lanes, most)
    return plgpu.Layout.TILED(
        Tiling(((lanes * vector,), (vector,))),
        (Replicated(_WARPS),),
        (-2,) if lanes == 32 else (Replicated(32 // lanes), -2),
        -1,
    )


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
        hides: whether what is not seen is made 0: for values.
    """

    pages: jax.Array
    part: int
    hides: bool
    folded = False
    groups = 1

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

    def constants(self, dtype):
        """Shared memory for constants of the numbers; None for none."""
        del dtype

    def share(self, raw: tuple, j: int, sight: Sight, constants) -> None:
        """Puts the constants of the j-th part of a step there."""

    def numbers(self, raw: tuple, j: int, sight: Sight, constants, dtype) -> list:
        """First channel and 16-bit numbers of each run of channels; of values, those that are
        not seen are 0, since weights of 0 do not silence a NaN."""
        del j, constants, dtype
        (tile,) = raw
        if not self.hides:
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


def _finished(half, constants, layout, axis: int):
    """Numbers that codes stand for, in float32, from refs of their rows' or columns' constants."""
    scale, offset = (
        lax.broadcast_in_dim(
            plgpu.load(each, layout=layout, optimized=False).astype(jnp.float32), half.shape, [axis]
        )
        for each in constants
    )
    return (half.astype(jnp.float32) * scale + offset).astype(half.dtype)


@dataclasses.dataclass(frozen=True)
class KeysByChannel:
    """Quantised keys; all the tokens of a part share their constants.

    Attributes:
        pages: by channel.
        part: tokens read at a time.
        parts: of a step.
    """

    pages: QuantizedPages
    part: int
    parts: int

    @property
    def folded(self) -> bool:
        """Whether constants are folded into the query, of which each part then has its own."""
        return self.part % STEP == 0

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.pages.codes, self.pages.scales, self.pages.offsets

    @property
    def run(self) -> tuple[int, int]:
        return self.pages.codes.shape[2], 1

    @property
    def layout(self):
        return copy_layout(self.part, *self.run)

    @property
    def _vector(self):
        return _vector_layout(self.pages.shape[2], 4)

    def read(self, refs, page, slot) -> tuple:
        codes, *constants = refs
        rows = codes.at[page, pl.ds(slot, self.part)]
        found = [plgpu.load(rows, layout=self.layout, optimized=False)]
        for ref in constants:
            row = ref.at[page, slot // self.pages.group]
            found.append(plgpu.load(row, layout=self._vector, optimized=False))
        return tuple(found)

    def nothing(self) -> tuple:
        stored = zeros((self.part, self.run[0]), self.pages.codes.dtype, self.layout)
        vector = zeros((self.pages.shape[2],), self.pages.dtype, self._vector)
        return stored, vector, vector

    def constants(self, dtype):
        """Scales, then offsets, of each part."""
        return plgpu.SMEM((2 * self.parts, self.pages.shape[2]), dtype)

    def share(self, raw: tuple, j: int, sight: Sight, constants) -> None:
        del sight
        for index, vector in zip((j, self.parts + j), raw[1:], strict=True):
            plgpu.store(constants.at[index], vector, optimized=False)

    def numbers(self, raw: tuple, j: int, sight: Sight, constants, dtype) -> list:
        del sight  # scores of what is not seen are replaced
        made = []
        for which, half in enumerate(_codes(raw[0], self.pages.bits, dtype)):
            first, width = which * self.run[0], self.run[0]
            if not self.folded:
                columns = pl.ds(first, width)
                refs = constants.at[j, columns], constants.at[self.parts + j, columns]
                half = _finished(half, refs, self.layout.reduce(0), 1)
            made.append((first, half))
        return made


@dataclasses.dataclass(frozen=True)
class ValuesByToken:
    """Quantised values.

    Attributes:
        pages: by token.
        part, parts: tokens read at a time, and how often for a step.
        folded: whether constants are folded into the weights.
    """

    pages: QuantizedPages
    part: int
    parts: int
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
        stored, dim = self.pages.codes.shape[2], self.pages.shape[2]
        if not self.folded:
            return math.gcd(self.pages.group, stored), 1
        # Two runs a row do not fit into padded rows, as the compiler lays them out.
        return 8 if self.pages.bits == 4 and dim % STEP else stored, 1

    @property
    def layout(self):
        return copy_layout(self.part, *self.run)

    @property
    def _vector(self):
        return _vector_layout(self.part, 4 if self.groups == 1 else 1)

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
                found.append(plgpu.load(column, layout=self._vector, optimized=False))
        return tuple(found)

    def nothing(self) -> tuple:
        width = self.run[0]
        tile = zeros((self.part, width), self.pages.codes.dtype, self.layout)
        vector = zeros((self.part,), self.pages.dtype, self._vector)
        tiles = [tile] * (self.pages.codes.shape[2] // width)
        return *tiles, *[vector] * (2 * self.groups)

    def constants(self, dtype):
        """Scales, then offsets, of each group."""
        return plgpu.SMEM((2 * self.groups, self.part * self.parts), dtype)

    def share(self, raw: tuple, j: int, sight: Sight, constants) -> None:
        """Those of what is not seen may be NaN, which codes never are: 0 in their place."""
        seen = sight.mask((self.part,), self._vector)
        nothing = zeros((self.part,), self.pages.dtype, self._vector)
        for index, vector in enumerate(raw[-2 * self.groups :]):
            ref = constants.at[index, pl.ds(j * self.part, self.part)]
            plgpu.store(ref, jnp.where(seen, vector, nothing), optimized=False)

    def numbers(self, raw: tuple, j: int, sight: Sight, constants, dtype) -> list:
        del sight
        stored, width = self.pages.codes.shape[2], self.run[0]
        rows = pl.ds(j * self.part, self.part)
        made = []
        for index in range(stored // width):
            for which, half in enumerate(_codes(raw[index], self.pages.bits, dtype)):
                first = index * width + which * stored
                if not self.folded:
                    group = first // self.pages.group
                    refs = constants.at[group, rows], constants.at[group + self.groups, rows]
                    half = _finished(half, refs, self.layout.reduce(1), 0)
                made.append((first, half))
        return made
