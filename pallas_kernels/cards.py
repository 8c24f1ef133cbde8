"""The GPUs that the kernels are built for, and which of them the current trace is for."""

import dataclasses
import re

import jax


@dataclasses.dataclass(frozen=True)
class Card:
    """What a kernel and its tiles are chosen by. Sizes in bytes, rates in units a second.

    Attributes:
        name: short name, as in `h100`.
        kind: what JAX calls the device (`device_kind`).
        capability: compute capability, (9, 0) for Hopper.
        processors: streaming multiprocessors (SMs).
        shared_per_processor, shared_per_block: shared memory of an SM, and what one block may take.
        threads_per_processor, blocks_per_processor: resident at the most.
        l2, memory: sizes of the second-level cache and of the device memory.
        bandwidth: device memory, bytes a second.
        clock: GHz.
        lanes: float32 lanes of an SM.
    """

    name: str
    kind: str
    capability: tuple[int, int]
    processors: int
    shared_per_processor: int
    shared_per_block: int
    l2: int
    memory: int
    bandwidth: int
    clock: float
    lanes: int
    threads_per_processor: int
    blocks_per_processor: int

    @property
    def is_hopper(self) -> bool:
        return self.capability[0] == 9


# Vendors' data sheets; `kind` and sizes as the driver reports them.
CARDS = {
    card.name: card
    for card in (
        Card("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 167936, 166912, 41943040, 85100068864,
             2039040000000, 1.41, 64, 2048, 32),
        Card("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), 82, 102400, 101376, 6291456,
             25438126080, 936096000000, 1.695, 128, 1536, 16),
        Card("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 102400, 101376, 75497472,
             25393692672, 1008096000000, 2.52, 128, 1536, 24),
        Card("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 233472, 232448, 52428800, 84942979072,
             3352320000000, 1.98, 128, 2048, 32),
        Card("h200", "NVIDIA H200", (9, 0), 132, 233472, 232448, 52428800, 151397597184,
             4800000000000, 1.98, 128, 2048, 32),
        Card("b200", "NVIDIA B200", (10, 0), 148, 233472, 232448, 132644864, 191514542080,
             7672320000000, 1.965, 128, 2048, 32),
        Card("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 102400, 101376, 100663296,
             33668988928, 1792000000000, 2.407, 128, 1536, 24),
    )
}  # fmt: skip


def find_card(kind: str) -> Card | None:
    """The card that JAX calls `kind`; None for one that is not in the table."""
    return next((card for card in CARDS.values() if card.kind == kind), None)


def card_of(device) -> Card | None:
    """The card of a JAX device: of the table, or made from what the device tells of itself.

    None for what is no NVIDIA GPU, and for one older than sm_80. What a device doesn't tell has
    the least value of the cards in the table.
    """
    if device.platform not in ("gpu", "cuda"):
        return None
    known = find_card(device.device_kind)
    if known is not None:
        return known
    try:
        major, minor = (int(part) for part in device.compute_capability.split("."))
    except (AttributeError, ValueError):
        return None  # AMD's are no pair of numbers
    if major < 8:
        return None

    def least(field: str) -> int:
        return min(getattr(card, field) for card in CARDS.values())

    shared = getattr(device, "shared_memory_per_block_optin", least("shared_per_block"))
    return Card(
        name=re.sub(r"\W+", "_", device.device_kind.lower()),
        kind=device.device_kind,
        capability=(major, minor),
        processors=getattr(device, "core_count", least("processors")),
        shared_per_processor=shared + 1024,
        shared_per_block=shared,
        l2=getattr(device, "l2_cache_size", least("l2")),
        memory=least("memory"),
        bandwidth=getattr(device, "memory_bandwidth", least("bandwidth")),
        clock=1.4,
        lanes=64,
        threads_per_processor=least("threads_per_processor"),
        blocks_per_processor=least("blocks_per_processor"),
    )


def current_card() -> Card | str:
    """The card that the current trace is for, or what it is for instead.

    The abstract mesh's device where one is set (ahead-of-time compilation for a card that is not
    here), else the default back end's first device.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return card_of(device) or f"{device.platform} ({device.device_kind})"
