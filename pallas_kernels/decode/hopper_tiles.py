"""How the Hopper decode kernel cuts its work: sizes of a step, stages, shares of a list."""

import dataclasses

from pallas_kernels.cards import Card

ROWS = 64  # of a wgmma tile: the query heads of a KV head, padded


@dataclasses.dataclass(frozen=True)
class HopperTiles:
    """How the work is cut.

    Attributes:
        splits: warpgroups that share one KV head of one sequence.
        keys: tokens that a warpgroup multiplies at a time, 64 or 128: whole pages, or parts.
        stages: steps whose keys and values are in shared memory, or on their way there.
    """

    splits: int
    keys: int
    stages: int


def columns_of(dim: int) -> int | None:
    """Value channels that one warpgroup sums: half of more than 128, which would take more
    registers than there are. None where halves do not suit TMA."""
    if dim <= 128:
        return dim
    return None if dim % 32 else dim // 2


def default_tiles(
    card: Card, *, batch: int, kv_heads: int, group: int, listed: int, size: int, dim: int
) -> HopperTiles:
    """Tiles that always work: many warpgroups a processor, with enough bytes on their way to it,
    and as many shares as leave the least of the card idle.

    Args:
        card: the GPU.
        batch, kv_heads, group: B, K, G.
        listed: M, entries of a page list.
        size, dim: P, D.
    """
    del group
    # What a processor must have on its way to hide 1.5 us between asking and having.
    wanted = card.bandwidth / card.processors * 1.5e-6

    def worth(stages: int) -> tuple[float, int, int]:
        blocks = resident(card, 64, stages, dim)
        ahead = blocks * (stages - 1) * stage_bytes(64, dim)
        return min(ahead, wanted), blocks, ahead

    stages = max(_stage_counts(card, 64, dim), key=worth)
    splits = _splits(card, batch * kv_heads, listed * size, 64, stages, dim, rounds=4)
    return HopperTiles(splits, 64, stages)


def candidate_tiles(
    card: Card, *, batch: int, kv_heads: int, group: int, listed: int, size: int, dim: int
) -> list[HopperTiles]:
    """Tiles worth measuring, the default first, for what `default_tiles` takes."""
    shape = {"batch": batch, "kv_heads": kv_heads, "group": group, "listed": listed}
    found = [default_tiles(card, **shape, size=size, dim=dim)]
    for keys in (64, 128) if dim <= 64 and size >= 16 else (64,):
        for stages in _stage_counts(card, keys, dim):
            for rounds in (1, 2, 4):
                splits = _splits(card, batch * kv_heads, listed * size, keys, stages, dim, rounds)
                found.append(HopperTiles(splits, keys, stages))
    return list(dict.fromkeys(found))


def stage_bytes(keys: int, dim: int) -> int:
    """Keys and values of one step, as a warpgroup fetches them."""
    return 2 * keys * (dim + (columns_of(dim) or dim))


def _shared_bytes(keys: int, stages: int, dim: int) -> int:
    """Shared memory of a block, with what the compiler and the card add."""
    ring = max(stages * stage_bytes(keys, dim), 4 * ROWS * (columns_of(dim) or dim))
    return ring + 2 * ROWS * (dim + keys) + 3 * 1024


def _stage_counts(card: Card, keys: int, dim: int) -> list[int]:
    """Stages that fit in shared memory; one alone would never copy while it multiplies."""
    fitting = (n for n in range(2, 9) if _shared_bytes(keys, n, dim) <= card.shared_per_block)
    return list(fitting) or [1]


def resident(card: Card, keys: int, stages: int, dim: int) -> int:
    """Warpgroups that a processor holds at once."""
    # Registers of a thread, as compiled: 130 with 64 channels, 160 with 96, 220 with more.
    by_registers = 2 if keys > 64 or dim > 96 else 3 if dim > 64 else 4
    return max(1, min(by_registers, card.shared_per_processor // _shared_bytes(keys, stages, dim)))


def _splits(
    card: Card, heads: int, tokens: int, keys: int, stages: int, dim: int, rounds: int
) -> int:
    """Shares of a list, of at least four steps, that leave the least of the card idle.

    At the most `rounds` times as many warpgroups as the card holds; equal shares may be unequal
    work, since rows differ in length.
    """
    held = card.processors * resident(card, keys, stages, dim)
    heads *= dim // (columns_of(dim) or dim)
    most = min(max(1, tokens // (4 * keys)), max(1, rounds * held // heads))

    def time(splits: int) -> float:
        """That of the slowest processor, in lists."""
        return -(-heads * splits // held) / splits

    return min(range(1, most + 1), key=lambda splits: (time(splits), splits))
