"""Registers, spills, shared memory and occupancy of every kernel, for cards that are not here.

    python -m pallas_kernels.report [--cards h100 rtx3090 ...] [--json] [--match TEXT]

Ends with status 1 if a kernel does not compile, spills registers, or asks for more shared memory
than the card has. Decode kernels show the bytes that they move by the bytes that they must.
"""

import argparse
import dataclasses
import json
import sys

from pallas_kernels import aot, report_cases
from pallas_kernels.cards import CARDS

CASES = "pallas_kernels.report_cases:cases"


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel on one card; `fault` says what is wrong with it, None if nothing is."""

    gpu: str
    kernel: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    threads: int
    blocks_per_sm: int
    occupancy: float
    bytes_ratio: float | None
    fault: str | None


def rows_for(card: str, match: str = "") -> list[Row]:
    """Compiles the card's cases whose name holds `match`, and judges them.

    Raises:
        ValueError: the card is unknown, or no case matches. aot.WheelsMissing.
    """
    if card not in CARDS:
        raise ValueError(f"card = {card!r}; known: {', '.join(CARDS)}")
    known = report_cases.cases(CARDS[card])
    names = [name for name in known if match in name]
    if not names:
        raise ValueError(f"match = {match!r} is in no case of {card}: {', '.join(known)}")
    rows = []
    for result in aot.compile_all(card, CASES, names):
        ours = [each for each in result.kernels if each.is_mosaic]
        fault = result.error or (None if ours else "no Mosaic kernel was compiled")
        ratio = known[result.name].bytes_ratio if result.name in known else None
        if fault:
            rows.append(Row(card, result.name, 0, 0, 0, 0, 0, 0.0, ratio, fault))
            continue
        rows += [_judged(card, result.name, each, ratio) for each in ours]
    missing = set(names) - {row.kernel for row in rows}
    rows += [
        Row(card, name, 0, 0, 0, 0, 0, 0.0, None, "the compiler ended before it")
        for name in missing
    ]
    return rows


def _judged(card: str, name: str, kernel, ratio: float | None) -> Row:
    fault = None
    most = CARDS[card].shared_per_block
    if kernel.spill_bytes:
        fault = f"spills {kernel.spill_bytes} bytes"
    elif kernel.smem_bytes > most or not kernel.blocks:
        fault = f"takes {kernel.smem_bytes} bytes of shared memory; a block may have {most}"
    return Row(
        card, name, kernel.registers, kernel.spill_bytes, kernel.smem_bytes, kernel.threads,
        kernel.blocks, kernel.occupancy, ratio, fault,
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    """Aligned columns, one line a kernel."""
    head = ["gpu", "kernel", "registers", "spills", "shared", "threads", "CTAs/SM", "occupancy",
            "bytes"]  # fmt: skip
    lines = [head]
    for row in rows:
        if row.fault and not row.registers:
            lines.append([row.gpu, row.kernel, row.fault] + [""] * 6)
            continue
        lines.append(
            [
                row.gpu, row.kernel, str(row.registers), str(row.spill_bytes),
                str(row.smem_bytes), str(row.threads), str(row.blocks_per_sm),
                f"{row.occupancy:.0%}", f"{row.bytes_ratio:.3f}" if row.bytes_ratio else "",
            ]
        )  # fmt: skip
    short = [line for line in lines if line[3] or line is head]
    widths = [max(len(line[column]) for line in short) for column in range(len(head))]

    def aligned(line):
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(aligned(line) for line in lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.report", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--cards", nargs="+", default=list(CARDS), choices=list(CARDS))
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    parser.add_argument("--json", action="store_true", help="a list of objects, for programs")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    try:
        for card in options.cards:
            found = rows_for(card, options.match)
            rows += found
            if not options.json:
                print(table(found) + "\n", flush=True)
    except (aot.WheelsMissing, ValueError) as wrong:
        parser.error(str(wrong))
    faults = [row for row in rows if row.fault]
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        for row in faults:
            print(f"FAULT {row.gpu}: {row.kernel}: {row.fault}")
        print(f"{len(rows)} kernels on {len(options.cards)} cards, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
