"""Results for people (tables, a heat map) and for machines (plain dictionaries for JSON)."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sparse_jax.evaluate.perplexity import PerplexityResult
from sparse_jax.evaluate.recall import RecallResult, Trial


def as_dict(result: PerplexityResult | RecallResult) -> dict[str, Any]:
    """A result as JSON takes it: its fields and its totals, without numpy types."""
    plain = dataclasses.asdict(result)
    if isinstance(result, PerplexityResult):
        return {"nll": result.nll, "perplexity": result.perplexity, **plain}
    trials = plain.pop("trials")
    return {
        "hits": result.hits,
        "trials": len(trials),
        "nll": result.nll,
        "accuracy": result.accuracy,
        **plain,
        "cells": list(trials),
    }


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns set to the right, as wide as their widest cell; a rule under the header."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def grid(result: RecallResult) -> tuple[list[float], list[int], dict[tuple[float, int], Trial]]:
    """Depths, lengths and the trial of each pair, in the order in which they were asked for."""
    depths = list(dict.fromkeys(trial.depth for trial in result.trials))
    lengths = list(dict.fromkeys(trial.length for trial in result.trials))
    return depths, lengths, {(trial.depth, trial.length): trial for trial in result.trials}


def recall_table(result: RecallResult) -> str:
    """One row for each depth, one column for each length: hit or miss, and the answer's NLL."""
    depths, lengths, cells = grid(result)
    rows = []
    for depth in depths:
        row = [f"{depth:.0%}"]
        for length in lengths:
            trial = cells[depth, length]
            row.append(f"{'hit' if trial.hit else 'miss'} {trial.nll:.3f}")
        rows.append(row)
    totals = ["all"]
    for length in lengths:
        column = [cells[depth, length] for depth in depths]
        mean = sum(trial.nll for trial in column) / len(column)
        totals.append(f"{sum(trial.hit for trial in column)}/{len(column)} {mean:.3f}")
    return text_table(["depth", *(f"{length} tokens" for length in lengths)], [*rows, totals])


def bytes_line(cache_bytes: int, cache_bytes_bf16: int) -> str:
    share = cache_bytes / cache_bytes_bf16
    return f"cache {cache_bytes:,} bytes, {share:.1%} of dense bf16 ({cache_bytes_bf16:,})"


def describe(result: PerplexityResult | RecallResult) -> str:
    """A result as a few lines of text."""
    size = bytes_line(result.cache_bytes, result.cache_bytes_bf16)
    if isinstance(result, PerplexityResult):
        return (
            f"perplexity {result.perplexity:.3f} (nll {result.nll:.4f}) over {result.tokens} "
            f"tokens, context {result.context}, stride {result.stride}\n{size}"
        )
    seen = "seen" if result.question_seen else "not seen"
    return (
        f"{recall_table(result)}\n"
        f"{result.hits}/{len(result.trials)} hits, nll {result.nll:.4f}, "
        f"accuracy {result.accuracy:.3f}, question {seen} by the cache\n{size}"
    )


def heat_map(result: RecallResult, path: str | Path, *, title: str = "") -> None:
    """Write a PNG of the answers' NLL over depth and length; a missed cell has a cross.

    Args:
        path: ends in .png.

    Raises:
        ValueError: another ending.
    """
    path = Path(path)
    if path.suffix != ".png":
        raise ValueError(f"the heat map is a PNG; {path} does not end in .png")
    depths, lengths, cells = grid(result)
    nll = np.array([[cells[depth, length].nll for length in lengths] for depth in depths])
    # A Figure with a canvas of its own: pyplot would keep state for the whole process.
    figure = Figure(figsize=(2.5 + 0.9 * len(lengths), 1.5 + 0.4 * len(depths)), dpi=150)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(nll, aspect="auto", cmap="viridis_r", vmin=0, vmax=max(1.0, nll.max()))
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth")
    axes.set_title(title or f"{result.hits}/{len(result.trials)} hits")
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            if not cells[depth, length].hit:
                axes.text(column, row, "×", ha="center", va="center", color="red", fontsize=14)
    figure.colorbar(image, ax=axes, label="nll (nats)")
    figure.tight_layout()
    canvas.print_png(str(path))
