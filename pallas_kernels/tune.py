"""Measures tiles on the card that is here and writes its table.

    python -m pallas_kernels.tune [--match TEXT] [--repeats N] [--folder FOLDER]

Entries of other ops and shapes in the card's table are kept. Ends with status 2 where there is no
card that the kernels run on.
"""

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from pallas_kernels import tuned
from pallas_kernels.mosaic_support import mosaic_card
from pallas_kernels.tune_jobs import Job, jobs

log = logging.getLogger(__name__)


def seconds(run: Callable, arguments: tuple, repeats: int) -> float:
    """Median time of a compiled function; the first two calls are not counted."""
    compiled = jax.jit(run)
    for _ in range(2):
        jax.block_until_ready(compiled(*arguments))
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def best(job: Job, measure: Callable[[Callable, tuple], float]) -> tuned.Entry | None:
    """The fastest of a job's candidates; None, with warnings, if none of them runs."""
    found: list[tuple[float, Any]] = []
    for tiles in job.candidates:
        try:
            found.append((measure(*job.prepare(tiles)), tiles))
        except Exception as wrong:  # a candidate may be too large for this card: not an end
            log.warning("%s %s with %s: %s", job.op, job.shape, tiles, str(wrong)[:200])
    if not found:
        return None
    took, tiles = min(found, key=lambda pair: pair[0])
    return tuned.Entry(job.op, job.shape, vars(tiles), 1e6 * took)


def tune(
    card, wanted: list[Job], measure: Callable[[Callable, tuple], float], folder: Path
) -> Path:
    """Measures the jobs, replaces their entries in the card's table and keeps the others.

    Raises:
        ValueError: there is nothing to measure, or the table that is there is damaged.
    """
    if not wanted:
        raise ValueError("no job to measure: --match fits none of them")
    entries = {_key(each): each for each in tuned.read_table(tuned.table_path(card, folder))}
    for job in tqdm(wanted, unit="shape", disable=None):
        entry = best(job, measure)
        if entry is not None:
            entries[_key(entry)] = entry
    about = {"date": str(date.today()), "jax": jax.__version__}
    return tuned.write_table(card, list(entries.values()), folder, **about)


def _key(entry: tuned.Entry) -> tuple:
    return entry.op, tuple(sorted(entry.shape.items(), key=str))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.tune", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--match", default="", help="only ops whose name holds this")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=tuned.FOLDER)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: give at least 1")
    card = mosaic_card()
    if isinstance(card, str):
        parser.error(f"tuning {card}")
    wanted = [job for job in jobs(card) if options.match in job.op]
    try:
        path = tune(
            card, wanted, lambda run, given: seconds(run, given, options.repeats), options.folder
        )
    except ValueError as wrong:
        parser.error(str(wrong))
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.exit(main())
