"""How long a fresh process takes until its first training step has ended: imports, kernels, the step.

    python -m benchmarks.first_step                        # EfficientNetV2-S, batch 64, 32x32
    python -m benchmarks.first_step --models mlp --rounds 5 --csv FILE

Each case is a process of its own (`benchmarks.training_case`). `compiled` is the first one on a machine: no kernel is
there. `loaded` is every later one. Cases take turns; seconds are medians of the rounds, and `more` is what they exceed
the plain process by, which does not import brevact.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.records import append_rows, check_columns, print_table
from benchmarks.training_case import TrainingCase
from benchmarks.workloads import MODELS

CASES = "plain", "compiled", "loaded"
COLUMNS = "model", "batch_size", "case", "rounds", "seconds", "more"


def measured(model: str, rounds: int) -> list[dict[str, Any]]:
    """Rows with `COLUMNS` of the three cases of a model.

    Args:
        model: key of `MODELS`.
        rounds: how often each case runs.

    Raises:
        RuntimeError: a process failed.
    """
    batch_size, depth = MODELS[model]
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for case in CASES:
                variant = "plain" if case == "plain" else "DEFAULT"
                process = TrainingCase(model=model, variant=variant, batch_size=batch_size, depth=depth, steps=1)
                found = process.run({"NUMBA_CACHE_DIR": folder})
                if "error" in found:
                    raise RuntimeError(f"{model}, {case}: {found['error']}")
                seconds[case].append(found["first_step_s"])
    plain = statistics.median(seconds["plain"])
    rows = []
    for case in CASES:
        median = statistics.median(seconds[case])
        values = model, batch_size, case, rounds, round(median, 2), round(median - plain, 2)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["efficientnetv2-s"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args(arguments)
    if options.csv:
        check_columns(options.csv, COLUMNS)
    rows = [row for model in options.models for row in measured(model, options.rounds)]
    print_table(rows)
    if options.csv:
        append_rows(rows, options.csv)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
