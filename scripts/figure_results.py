"""The rows in `benchmarks/results`, and how figures of them are written."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
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


def range_text(values: Iterable[float], places: int = 1) -> str:
    """The least and the largest value.

    >>> range_text([1.46, 1.32, 2.14])
    '1.3 to 2.1'
    """
    found = [f"{value:.{places}f}" for value in sorted(values)]
    return " to ".join(dict.fromkeys((found[0], found[-1])))


def noise_text(value: str) -> str:
    """A noise as it is written: with the more decimals, the smaller it is.

    >>> [noise_text(value) for value in ("0.588", "0.0305", "0.0004512")]
    ['0.59', '0.031', '0.0005']
    """
    noise = Decimal(value)
    step = "0.0001" if noise < Decimal("0.001") else "0.001" if noise < Decimal("0.1") else "0.01"
    return str(noise.quantize(Decimal(step), ROUND_HALF_UP))
