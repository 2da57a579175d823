"""Plain-text tables of reports."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] | None = None,
    *,
    numbers: int = 0,
    notes: Sequence[str] = (),
) -> str:
    """Return a table with a rule below the header and above the total.

    Args:
        header: names of the columns.
        rows: cells, a row a line.
        total: a last row.
        numbers: how many columns, the last ones, are aligned to the right.
        notes: texts behind the rows, one a row; none for no notes.
    """
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
