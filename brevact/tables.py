"""Plain-text tables of reports, and shared parts of their plots."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

MIB = 2**20
#: Layers in a plot.
MOST_BARS = 40


def size_text(count: int) -> str:
    return f"{count / MIB:.3f} MiB" if count >= 1024 else f"{count} B"


def write_csv(path: str | os.PathLike[str], rows: Iterable[Sequence[object]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def plot_bars(
    path: str | os.PathLike[str],
    title: str,
    layers: Sequence[str],
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    errors: Sequence[float] | None = None,
) -> None:
    """Write a picture of bars by layer: values by axis and by series, with errors of the first axis.

    Raises an ImportError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot draws with matplotlib; install it: pip install matplotlib") from error
    figure = Figure(figsize=(9, 1.6 + 0.24 * len(layers)), layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, series) in zip(every, panels.items(), strict=True):
        height = 0.8 / len(series)
        for place, (label, values) in enumerate(series.items()):
            offset = height * (place - (len(series) - 1) / 2)
            axes.barh([y + offset for y in range(len(values))], values, height, label=label, xerr=errors)
        errors = None
        axes.set_xlabel(name)
        if len(series) > 1:
            axes.legend(loc="lower right")
    every[0].set_yticks(range(len(layers)), [layer or "(model)" for layer in layers], fontsize=7)
    every[0].margins(y=0.01)
    every[0].invert_yaxis()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def text_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] | None = None,
    *,
    numbers: int = 0,
    notes: Sequence[str] = (),
) -> str:
    """Return a table with rules below header and above total, `numbers` last columns to the right, a note per row."""
    cells = [header, *rows, *([total] if total else [])]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    texts = len(header) - numbers
    lines = [
        "  ".join(
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    rule = "-" * max(map(len, lines))
    for index, note in enumerate(notes, 1):
        lines[index] = f"{lines[index]}  {note}".rstrip()
    return "\n".join([lines[0], rule, *lines[1 : len(rows) + 1], *([rule, lines[-1]] if total else [])])


@contextmanager
def progress_bar(name: str, total: int | None, is_shown: bool) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each pass: it advances a tqdm bar, shown after 3 s, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=total, desc=name, unit="pass", delay=3, disable=not is_shown) as bar:
        yield bar.update
