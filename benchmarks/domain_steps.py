"""Models of other fields at `DEFAULT`: the time of a step with its loss over that of a plain step.

    python -m benchmarks.domain_steps --csv benchmarks/results/domain_steps.csv
    python -m benchmarks.domain_steps --models "PyG GCN" "CLIP"

Plain and packed steps take turns in one process, with one thread, whose processor time is counted; the ratio is that of
medians. A model whose libraries are missing is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import brevact
from benchmarks.domain_models import DOMAINS, Step, build, missing
from benchmarks.records import append_rows, check_columns, print_table
from brevact.policy.rules import has_policy

Row = dict[str, Any]


def region_of(step: Step) -> AbstractContextManager[Any]:
    """Return the region of the model, where it has a policy."""
    return brevact.backward_quant(step.model) if has_policy(step.model) else nullcontext()


def seconds_of(step: Step) -> float:
    """Return the processor time of a step, forward and backward."""
    step.model.zero_grad(set_to_none=True)
    start = time.process_time()
    with region_of(step):
        loss = step.loss(step.model, step.batch)
    loss.backward()
    return time.process_time() - start


def measure(name: str, rounds: int) -> Row:
    """Return the row of a model.

    Args:
        name: key of `DOMAINS`.
        rounds: that are timed, after two that are not.
    """
    plain, packed = build(DOMAINS[name]), build(DOMAINS[name])
    brevact.quantize_backward(packed.model)
    seconds: dict[str, list[float]] = {"plain": [], "packed": []}
    for index in range(rounds + 2):
        for kind, step in (("plain", plain), ("packed", packed)):
            found = seconds_of(step)
            if index > 1:
                seconds[kind].append(found)
    of_plain, of_packed = (statistics.median(each) for each in seconds.values())
    return {
        "model": name,
        "plain_ms": f"{1e3 * of_plain:.1f}",
        "step": f"{of_packed / of_plain:.2f}",
    }


def rows_of(names: Sequence[str], rounds: int) -> Iterator[Row]:
    """Yield the rows of models whose libraries are there."""
    for name in names:
        if missing(DOMAINS[name]):
            print(f"{name}: left out, needs {', '.join(missing(DOMAINS[name]))}")
        else:
            yield measure(name, rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=DOMAINS, default=list(DOMAINS), metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args(arguments)
    columns = ("model", "plain_ms", "step")
    if args.csv is not None:
        check_columns(args.csv, columns)
    torch.set_num_threads(1)
    rows = []
    for row in rows_of(args.models, args.rounds):
        rows.append(row)
        if args.csv is not None:
            append_rows([row], args.csv)
    print_table(rows)


if __name__ == "__main__":
    main()
