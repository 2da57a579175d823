"""Benchmark results as rows: printed as a table, appended to a CSV with device and versions."""

from __future__ import annotations

import csv
import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Device, thread count, versions and time of a measurement."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_rows(rows: Sequence[Mapping[str, Any]], path: str | None = None) -> None:
    """Print rows of equal keys as a table and append them to a CSV.

    Args:
        rows: what was measured.
        path: CSV file, made with a header if it is new; None for the table alone.

    Raises:
        ValueError: the file is there with other columns; nothing is written to it.
    """
    names = list(rows[0])
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if path is None:
        return
    extended = [{**row, **environment()} for row in rows]
    columns = list(extended[0])
    found = _header(path)
    if found not in ([], columns):
        raise ValueError(
            f"path={path!r} has the columns {', '.join(found)}; these rows have {', '.join(columns)}; name another file"
        )
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if not found:
            writer.writeheader()
        writer.writerows(extended)


def _header(path: str) -> list[str]:
    if not os.path.exists(path):
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])
