"""The rows in `benchmarks/results`, and how figures of them are written."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Row = Mapping[str, str]


@dataclass(frozen=True)
class Results:
    """The rows of a folder of CSV files."""

    folder: Path

    def rows(self, name: str) -> list[Row]:
        """All rows of a file."""
        with open(self.folder / f"{name}.csv", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def last(self, name: str, *columns: str) -> dict[tuple[str, ...], Row]:
        """The last row for each value of these columns."""
        return {tuple(row[column] for column in columns): row for row in self.rows(name)}


def table(cells: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, with the empty lines that it needs between marks."""
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n\n" + "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]]) + "\n\n"


def mib(value: str) -> str:
    return f"{float(value):,.1f}"
