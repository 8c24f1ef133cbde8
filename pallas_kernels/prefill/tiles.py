"""How the Hopper prefill kernel cuts its work, and which cuts fit a card."""

import dataclasses

from pallas_kernels.cards import Card

ROWS = 64  # rows of one wgmma


@dataclasses.dataclass(frozen=True)
class PrefillTiles:
    """How the work is cut.

    Attributes:
        queries: rows of a warpgroup, a multiple of 64.
        keys: keys of a block, a multiple of 64.
        stages: key blocks in shared memory at a time.
        heads: query heads of a group that share a tile, a divisor of G.
        warpgroups: warpgroups that multiply, each its own queries; one more copies.
    """

    queries: int
    keys: int
    stages: int
    heads: int = 1
    warpgroups: int = 2

    @property
    def each(self) -> int:
        """Queries of a warpgroup; TMA moves multiples of 8."""
        return self.queries // self.heads // 8 * 8

    @property
    def tokens(self) -> int:
        """Queries of a tile."""
        return self.each * self.warpgroups

    def shared_memory(self, dim: int) -> int:
        """Bytes of shared memory that a block of threads takes at the most."""
        rows = self.warpgroups * self.queries * ((dim + self.keys) * 2 + 4)
        blocks = self.stages * (self.keys * (dim * 4 + 4) + 8)
        # Alignment of the arrays, barriers, and what a reduction across a warpgroup needs.
        return rows + blocks + 6144

    def check(self, group: int) -> None:
        """Demands tiles that a kernel can run for groups of `group` heads.

        Raises:
            ValueError: it cannot.
        """
        fits = self.queries % ROWS == 0 and self.keys % ROWS == 0 and self.keys <= 256
        if not fits or min(self.queries, self.keys, self.stages, self.warpgroups) < 1:
            raise ValueError(
                f"tiles = {self}: queries and keys must be multiples of 64, keys 256 at the most, "
                "stages and warpgroups at least 1"
            )
        if self.warpgroups > 3:
            raise ValueError(f"tiles = {self}: 3 warpgroups at the most can multiply")
        if self.heads < 1 or group % self.heads or self.each < 8:
            raise ValueError(
                f"tiles = {self}: heads must divide the group of {group} query heads and leave 8 "
                "queries a warpgroup"
            )


def default_tiles(
    card: Card, *, tokens: int, group: int, size: int, dim: int, query_block: int | None = None
) -> PrefillTiles:
    """Tiles that always work: the fewest tiles of queries, and 128 keys where they fit.

    Args:
        card: the GPU.
        tokens, group, size, dim: T, G, P, D.
        query_block: queries that share a list of selected pages; None where none are selected.
    """
    return candidate_tiles(
        card, tokens=tokens, group=group, size=size, dim=dim, query_block=query_block
    )[0]


def candidate_tiles(
    card: Card, *, tokens: int, group: int, size: int, dim: int, query_block: int | None = None
) -> list[PrefillTiles]:
    """Tiles worth measuring that fit the card, the likely best first; see `default_tiles`."""
    block = tokens if query_block is None else query_block
    shapes = [(128, 2), (64, 4), (64, 3), (64, 2)]
    if dim > 128:
        shapes = [(64, 2)]
    elif query_block is not None and size <= 64:
        # Lists of small pages are short: smaller blocks leave less of the last one empty.
        shapes = [(64, 4), (64, 3), (64, 2), (128, 2)]
    found = []
    for keys, stages in shapes:
        for warpgroups in (2, 1):
            tiles = PrefillTiles(ROWS, keys, stages, 1, warpgroups)
            found.append(dataclasses.replace(tiles, heads=_heads(tiles, block, group)))
    found = [tiles for tiles in found if tiles.shared_memory(dim) <= card.shared_per_block]
    # A second warpgroup only where there are queries for it.
    return sorted(found, key=lambda tiles: (tiles.warpgroups > 1) == (tiles.each >= block))


def _heads(tiles: PrefillTiles, block: int, group: int) -> int:
    """Heads a tile: the fewest tiles, then the shortest ones, which waste least at the diagonal."""

    def number(heads: int) -> tuple[int, int]:
        tokens = dataclasses.replace(tiles, heads=heads).tokens
        return -(-block // tokens) * (group // heads), tokens

    return min((heads for heads in range(1, 9) if group % heads == 0), key=number)
