"""Plain-text tables of reports, and shared parts of their plots."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from brevact.quantizers.checks import check_int

MIB = 2**20


def size_text(count: int) -> str:
    return f"{count / MIB:.3f} MiB" if count >= 1024 else f"{count} B"


def write_csv(path: str | os.PathLike[str], rows: Iterable[Sequence[object]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def figure_kind(report: str, max_layers: int) -> Any:
    """Return matplotlib's figure class (else an ImportError); ``max_layers`` must be an int of at least 1."""
    check_int("max_layers", max_layers, 1)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{report}.plot draws with matplotlib; install it: pip install matplotlib") from error
    return Figure


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
