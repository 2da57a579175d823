"""Tables of the rows, and how they stand beside the goals."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.batches import beside_plain
from benchmarks.gpu.processes import Row
from benchmarks.records import print_table

STEP_GOAL = 0.9
"""Samples a second of the eager step at `DEFAULT`, relative to the plain eager step."""
_OF_KERNELS = ("operation", "dtype", "bit_width", "median_us", "gb_s", "copy_gb_s", "fraction_of_copy", "goal", "error")
_OF_STEPS = ("model", "dtype", "variant", "activations_mib", "peak_mib", "reserved_mib", "samples_s")
_UNKNOWN = {"activations_mib": "", "samples_s": ""}


def print_kernels(rows: Sequence[Row]) -> None:
    """Print a row an operation.

    Args:
        rows: of `KernelCase`; at least one.
    """
    print_table([{name: row[name] for name in _OF_KERNELS} for row in rows])


def print_steps(rows: Sequence[Row]) -> None:
    """Print a row a case, beside the plain eager step.

    Args:
        rows: of `StepCase`; at least one.
    """
    table = []
    for row in rows:
        beside = _plain_beside(row, rows)
        table.append(
            {
                **{name: row[name] for name in _OF_STEPS},
                "less_than_plain": _ratio(beside["activations_mib"], row["activations_mib"]),
                "speed_of_plain": _ratio(row["samples_s"], beside["samples_s"]),
                "error": row["error"],
            }
        )
    print_table(table)


def print_batches(rows: Sequence[Row]) -> None:
    """Print a row a case, beside the plain variant's largest batch.

    Args:
        rows: of `BatchCase`; at least one.
    """
    names = ("model", "dtype", "variant", "limit_gib", "largest_batch", "times_plain", "peak_mib", "reserved_mib")
    print_table([{name: row[name] for name in (*names, "error")} for row in beside_plain(rows)])


def print_goals(kernels: Sequence[Row], steps: Sequence[Row]) -> None:
    """Print how many kernels reach their goal, and whether each eager step at `DEFAULT` does.

    Args:
        kernels: rows of `KernelCase`.
        steps: rows of `StepCase`.
    """
    if kernels:
        measured = [row for row in kernels if not row["error"]]
        reached = sum(float(row["fraction_of_copy"]) >= row["goal"] for row in measured)
        print(f"kernels: {reached} of {len(kernels)} reach their goal, {len(kernels) - len(measured)} failed")
    for row in steps:
        speed = _ratio(row["samples_s"], _plain_beside(row, steps)["samples_s"])
        if row["variant"] == "DEFAULT" and speed:
            state = "reached" if float(speed) >= STEP_GOAL else "missed"
            print(f"{row['model']}, {row['dtype']}, DEFAULT: {speed} of the speed of plain, goal {STEP_GOAL} {state}")


def _plain_beside(row: Row, rows: Sequence[Row]) -> Row:
    """The plain eager step of the same model and dtype, or a row without figures."""
    subject = row["model"], row["dtype"], "plain"
    return next((other for other in rows if (other["model"], other["dtype"], other["variant"]) == subject), _UNKNOWN)


def _ratio(value: str, other: str) -> str:
    """One over the other; empty where either is not known."""
    return f"{float(value) / float(other):.2f}" if value and other and float(other) else ""
