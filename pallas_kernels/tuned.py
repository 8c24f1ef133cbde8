"""Measured tiles: a JSON table a card, written by `python -m pallas_kernels.tune`.

A table stands in `pallas_kernels/tables/<card>.json`; where it has no entry for an op and shape, or
there is none, the op's heuristic answers. Tiles change the order of sums, and so last bits.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pallas_kernels.cards import Card

FOLDER = Path(__file__).with_name("tables")
_FIELDS = {"op": str, "shape": dict, "tiles": dict, "microseconds": float}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One measurement.

    Attributes:
        op: which kernel.
        shape: the sizes that its `default_tiles` takes, by name.
        tiles: fields of its tiles.
        microseconds: what it took with these.
    """

    op: str
    shape: dict[str, Any]
    tiles: dict[str, int]
    microseconds: float


def tiles_for[Tiles](
    card: Card, op: str, default: Callable[..., Tiles], folder: Path = FOLDER, **shape: Any
) -> Tiles:
    """The tiles measured for an op and shape on a card, else `default(card, **shape)`.

    Raises:
        ValueError: the card's table is damaged, or names a field that the tiles don't have.
    """
    usual: Any = default(card, **shape)
    for entry in read_table(table_path(card, folder)):
        if entry.op == op and entry.shape == shape:
            known = {field.name for field in dataclasses.fields(usual)}
            if set(entry.tiles) != known:
                raise ValueError(
                    f"{table_path(card, folder)}: tiles {entry.tiles} of {op} must have the "
                    f"fields {sorted(known)}; measure them again (python -m pallas_kernels.tune)"
                )
            return dataclasses.replace(usual, **entry.tiles)
    return usual


def table_path(card: Card, folder: Path = FOLDER) -> Path:
    return folder / f"{card.name}.json"


def write_table(card: Card, entries: list[Entry], folder: Path = FOLDER, **about: str) -> Path:
    """Writes a card's table anew; `about` (date, versions) goes with it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = table_path(card, folder)
    record = {"card": card.name, **about, "entries": [dataclasses.asdict(each) for each in entries]}
    path.write_text(json.dumps(record, indent=1) + "\n")
    read_table.cache_clear()
    return path


@functools.cache
def read_table(path: Path) -> tuple[Entry, ...]:
    """A table's entries; none if there is no such file.

    Raises:
        ValueError: it is no such table; the message names the file and what is wrong.
    """
    if not path.exists():
        return ()
    try:
        record = json.loads(path.read_text())
        entries = record["entries"]
    except (ValueError, KeyError, TypeError) as wrong:
        raise ValueError(f"{path}: not a table of tiles ({wrong}); remove or measure it") from None
    for index, entry in enumerate(entries):
        for name, kind in _FIELDS.items():
            if not isinstance(entry.get(name) if isinstance(entry, dict) else None, kind):
                raise ValueError(f"{path}: entry {index} lacks {name} ({kind.__name__}): {entry}")
        if not all(type(value) is int for value in entry["tiles"].values()):
            raise ValueError(f"{path}: entry {index}: tiles must be whole numbers: {entry}")
    return tuple(Entry(**{name: entry[name] for name in _FIELDS}) for entry in entries)
