"""Rows of measurements: printed as a table, appended to a CSV with commit, device, versions and date."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from brevact.version import __version__


def environment(device: str = "cpu") -> dict[str, Any]:
    """Commit, device, thread count, versions and date of a measurement on a device ("cpu" or "cuda")."""
    return {
        "commit": commit(),
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "brevact": __version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def processor() -> str:
    """The name of the processor; of its architecture if the system has none."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit that is checked out, with a + if code of the package has changed since; "" outside of a checkout."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    found = git("rev-parse", "--short=9", "HEAD")
    return f"{found}+" if git("status", "--porcelain", "--", "../brevact") else found


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    names = [name for name in rows[0] if any(row[name] != "" for row in rows)]
    cells = [names, *([str(row[name]) or "-" for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def append_rows(rows: Sequence[Mapping[str, Any]], path: str | Path, device: str = "cpu") -> None:
    """Append rows of equal keys to a CSV, made with a header if it is new, with the columns of `environment`.

    Raises:
        ValueError: the file is there with other columns; nothing is written to it.
    """
    extended = [{**row, **environment(device)} for row in rows]
    found, columns = read_rows(path), list(extended[0])
    if found and list(found[0]) != columns:
        raise ValueError(f"{path} has the columns {', '.join(found[0])}; these rows have {', '.join(columns)}")
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not found:
            writer.writeheader()
        writer.writerows(extended)


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV; none where there is no such file."""
    if not Path(path).exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
