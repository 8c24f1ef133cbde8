"""What ptxas, XLA and Mosaic wrote down about the kernels they compiled."""

import dataclasses
import re
from pathlib import Path

from pallas_kernels.cards import Card

_REGISTERS = 65536  # of a streaming multiprocessor
_RESERVED = 1024  # bytes of shared memory that a resident block takes besides its own


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """One kernel for one card.

    Attributes:
        entry: its name in the machine code.
        registers: of a thread.
        spill_bytes: stored and loaded by a thread because registers ran out.
        smem_bytes: shared memory of a block.
        threads: of a block.
        blocks: resident on a multiprocessor at once.
        occupancy: resident threads as a share of what the multiprocessor holds.
    """

    entry: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    threads: int
    blocks: int
    occupancy: float

    @property
    def is_mosaic(self) -> bool:
        return self.entry.endswith("_mosaic_gpu_kernel")


_ENTRY = re.compile(
    r"Compiling entry function '(\S+)' for '\S+'.*?(\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers",
    re.S,
)
_LAUNCH = re.compile(
    r"\] (\S+) grid: \[[\d, ]+\] threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+)"
)


def read_reports(card: Card, folder: Path, seen: set[str]) -> tuple[list[KernelReport], set[str]]:
    """Reports of the logs in `folder` that are not in `seen`, and all the logs there are."""
    written = [
        *folder.glob("ptxas.*.log"),
        *(folder / "mosaic").iterdir(),
        *(folder / "hlo").glob("*thunk_sequence.txt"),
    ]
    fresh = [path for path in written if path.name not in seen]
    launches = _launches(fresh)
    reports = {}
    for log in fresh:
        if log.suffix not in (".log", ".ptxas"):
            continue
        for entry, stores, loads, registers in _ENTRY.findall(log.read_text()):
            threads, shared = launches.get(entry, (128, 0))
            blocks, occupancy = resident(card, int(registers), shared, threads)
            reports[entry] = KernelReport(
                entry, int(registers), int(stores) + int(loads), shared, threads, blocks, occupancy
            )
    return [reports[entry] for entry in sorted(reports)], seen | {path.name for path in written}


def resident(card: Card, registers: int, shared: int, threads: int) -> tuple[int, float]:
    """(blocks resident on a multiprocessor, share of its threads that they are)."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256
    limits = [card.blocks_per_processor, card.threads_per_processor // threads]
    if per_warp:
        limits.append(_REGISTERS // per_warp // warps)
    if shared:
        limits.append(card.shared_per_processor // (shared + _RESERVED))
    blocks = min(limits)
    return blocks, round(blocks * threads / card.threads_per_processor, 3)


def _launches(written: list[Path]) -> dict[str, tuple[int, int]]:
    """(threads, bytes of shared memory) of a block, by kernel."""
    found = {}
    for path in written:
        if path.name.endswith("thunk_sequence.txt"):
            for name, x, y, z, shared in _LAUNCH.findall(path.read_text()):
                found.setdefault(name, (int(x) * int(y) * int(z), int(shared)))
    for path in written:
        if not path.name.endswith(".resources.txt"):
            continue
        name = re.sub(r"_\d+\.resources\.txt$", "", path.name)
        ptx = path.with_name(path.name.replace(".resources.txt", ".ptx")).read_text()
        limit = re.search(r"\.(?:max|req)ntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", ptx)
        threads = 1
        for each in limit.groups() if limit else ("128",):
            threads *= int(each or 1)
        shared = re.search(r"smem_scratch_bytes=(\d+)", path.read_text())
        found[f"{name}_mosaic_gpu_kernel"] = (threads, int(shared[1]) if shared else 0)
    return found
