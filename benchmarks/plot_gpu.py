"""Draw what `python -m benchmarks.gpu` measured: bandwidth by bit width, and speed against memory of training steps.

    python -m benchmarks.plot_gpu                   # benchmarks/results/gpu_*.csv to benchmarks/results/gpu.png
    python -m benchmarks.plot_gpu --results DIR --out picture.png

Of each case the last row is drawn, if it is of the device of the last row of its file.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
_CASES = {
    "gpu_kernels.csv": ("operation", "dtype", "bit_width"),
    "gpu_steps.csv": ("model", "dtype", "memory_format", "variant"),
}

Row = dict[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and draw; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSVs (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="picture to write (default: gpu.png in that folder)")
    options = parser.parse_args(arguments)
    try:
        kernels, steps = (latest(options.results / name, case) for name, case in _CASES.items())
    except (OSError, ValueError) as error:
        parser.error(f"--results: {error}")
    if not kernels and not steps:
        parser.error(f"--results: no rows in {options.results}; make some with python -m benchmarks.gpu")
    out = options.out or options.results / "gpu.png"
    try:
        draw(kernels, steps).savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        parser.error(f"--out: {error}")
    print(out)
    return 0


def latest(path: Path, case: Sequence[str]) -> list[Row]:
    """The last row of each case that was measured on the device of the file's last row.

    Args:
        path: CSV file; one that is not there has no rows.
        case: columns that tell cases apart.

    Returns:
        The rows, without those of failed cases.

    Raises:
        ValueError: the file lacks a column.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    for name in (*case, "device", "error"):
        if name not in (reader.fieldnames or ()):
            raise ValueError(f"{path} has no column {name!r}; make it with python -m benchmarks.gpu")
    found = {tuple(row[name] for name in case): row for row in rows if row["device"] == rows[-1]["device"]}
    return [row for row in found.values() if not row["error"]]


def draw(kernels: Sequence[Row], steps: Sequence[Row]) -> Figure:
    """Draw a panel for each dtype of the kernels, and one for each model, dtype and memory format of the steps.

    Args:
        kernels: rows of `gpu_kernels.csv`.
        steps: rows of `gpu_steps.csv`.

    Returns:
        The figure.
    """
    above = _grouped(kernels, ("dtype",))
    below = _grouped(steps, ("model", "dtype", "memory_format"))
    bands = [band for band in (above, below) if band]
    figure = Figure(figsize=(4.2 * max(map(len, bands)), 4 * len(bands)), layout="constrained")
    panels = [panel for panel in figure.subfigures(len(bands), 1, squeeze=False)[:, 0]]
    for panel, groups in zip(panels, bands, strict=True):
        axes = panel.subplots(1, len(groups), squeeze=False)[0]
        for one, (name, rows) in zip(axes, groups.items(), strict=True):
            (_draw_bandwidth if groups is above else _draw_steps)(one, rows)
            one.set_title(name, fontsize=10)
            one.grid(alpha=0.3)
    figure.suptitle((kernels or steps)[-1]["device"])
    return figure


def _grouped(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(", ".join(row[name] for name in names), []).append(row)
    return groups


def _draw_bandwidth(axes: Axes, rows: Sequence[Row]) -> None:
    """Fraction of the copy's bandwidth over the bit width, a line an operation, its goal dotted."""
    for operation, of_one in _grouped(rows, ("operation",)).items():
        points = sorted((int(row["bit_width"]), float(row["fraction_of_copy"])) for row in of_one)
        (line,) = axes.plot(*zip(*points, strict=True), "o-", markersize=4, label=operation)
        axes.axhline(float(of_one[0]["goal"]), color=line.get_color(), linestyle=":", linewidth=1)
    axes.set(xlabel="bit width", ylabel="bandwidth, fraction of a copy's", ylim=(0, None))
    axes.set_xticks(sorted({int(row["bit_width"]) for row in rows}))
    axes.legend(fontsize=8)


def _draw_steps(axes: Axes, rows: Sequence[Row]) -> None:
    """Samples a second over activations and over peak memory, a colour a variant; without memory, bars of speed."""
    if not all(row["activations_mib"] for row in rows):  # a smoke run on the CPU
        axes.barh([row["variant"] for row in rows], [float(row["samples_s"]) for row in rows])
        axes.set_xlabel("samples a second (no memory was measured)")
        return
    style: dict[str, Any] = {"markersize": 7, "linestyle": "none"}
    for row in rows:
        activations, peak, rate = (float(row[name]) for name in ("activations_mib", "peak_mib", "samples_s"))
        (point,) = axes.plot(activations, rate, marker="o", label=row["variant"], **style)
        axes.plot(peak, rate, marker="s", markerfacecolor="none", color=point.get_color(), **style)
    axes.plot([], [], "ko", label="activations before backward")
    axes.plot([], [], "ks", markerfacecolor="none", label="peak of a step")
    axes.set(xlabel="MiB", ylabel="samples a second", ylim=(0, None), xlim=(0, None))
    axes.legend(fontsize=7)


if __name__ == "__main__":
    sys.exit(main())
