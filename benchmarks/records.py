"""Benchmark results as rows: printed as a table, appended to a CSV with device and versions."""

from __future__ import annotations

import csv
import datetime
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from recipes.machine import processor


def environment(device: str = "cpu") -> dict[str, Any]:
    """Device, thread count, versions and time of a measurement.

    Args:
        device: "cpu" or "cuda": what was measured.

    Returns:
        Their columns.
    """
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }


def write_rows(rows: Sequence[Mapping[str, Any]], path: str | None = None) -> None:
    """Print rows of equal keys as a table and append them to a CSV.

    Args:
        rows: what was measured on the CPU.
        path: CSV file, made with a header if it is new; None for the table alone.

    Raises:
        ValueError: the file is there with other columns; nothing is written to it.
    """
    print_table(rows)
    if path is not None:
        append_rows(rows, path)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of equal keys.

    Args:
        rows: at least one.
    """
    names = list(rows[0])
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def append_rows(rows: Sequence[Mapping[str, Any]], path: str, device: str = "cpu") -> None:
    """Append rows of equal keys to a CSV, with those columns of `environment` that they lack.

    Args:
        rows: what was measured; at least one.
        path: CSV file, made with a header if it is new.
        device: "cpu" or "cuda": what was measured.

    Raises:
        ValueError: the file is there with other columns; nothing is written to it.
    """
    extended = [{**row, **environment(device), **row} for row in rows]
    is_new = not _header(path)
    check_columns(path, rows[0])
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(extended[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(extended)


def check_columns(path: str, names: Iterable[str]) -> None:
    """Raise if rows with these keys cannot be appended to a CSV: to be called before a long measurement.

    Args:
        path: CSV file, there or not.
        names: keys of the rows, without those of `environment`.

    Raises:
        ValueError: the file is there with other columns.
    """
    found, columns = _header(path), list({**dict.fromkeys(names), **environment()})
    if found not in ([], columns):
        raise ValueError(
            f"path={path!r} has the columns {', '.join(found)}; these rows have {', '.join(columns)}; name another file"
        )


def read_rows(path: str) -> list[dict[str, str]]:
    """The rows of a CSV; none where there is no such file."""
    if not os.path.exists(path):
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _header(path: str) -> list[str]:
    if not os.path.exists(path):
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def estimate_text(value: str, error: str) -> str:
    """A noise or a bias with its standard error.

    Args:
        value: the figure; "" gives "".
        error: its standard error.

    >>> estimate_text("0.0117", "0.00034"), estimate_text("-0.00002", "6.1e-05"), estimate_text("7e-14", "3e-15")
    ('0.0117 ± 0.0003', '0.0000 ± 0.0001', '0')
    """
    if not value:
        return ""
    if abs(float(value)) + float(error) < 1e-9:  # the order of sums
        return "0"
    return f"{float(value):.4f} ± {float(error):.4f}".replace("-0.0000", "0.0000")
