"""Bytes that a step of each model of other fields keeps for backward, plain and by default.

    python -m benchmarks.domain_bytes --csv benchmarks/results/domain_bytes.csv

The models are those of `benchmarks/domain_models.py`, which says how to install their libraries; a model whose library
is not installed is left out. A step has the library's own loss. Kept are the bytes of tensors that the forward pass and
the loss leave, those of packed ones included; weights and the batch are there before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

import brevact
from benchmarks.domain_models import DOMAINS, Step, build, missing
from benchmarks.records import append_rows, check_columns, print_table
from benchmarks.training_case import kept_bytes

COLUMNS = ("model", "plain_bytes", "saved_bytes")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=DOMAINS, default=list(DOMAINS), metavar="MODEL")
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args(arguments)
    if options.csv:
        check_columns(options.csv, COLUMNS)
    rows = list(measure(options.models))
    if not rows:
        parser.error("no library of these models is installed: see benchmarks/domain_models.py")
    print_table(rows)
    if options.csv:
        append_rows(rows, options.csv)


def measure(names: Sequence[str]) -> Iterator[dict[str, str | int]]:
    """One row a model whose libraries are installed.

    Args:
        names: keys of `DOMAINS`.

    Yields:
        Rows with the keys `COLUMNS`.
    """
    for name in names:
        if missing(DOMAINS[name]):
            continue
        plain, packed = (build(DOMAINS[name]) for _ in range(2))
        brevact.quantize_backward(packed.model)
        plain_bytes = _bytes_of(lambda step=plain: step.loss(step.model, step.batch))
        saved_bytes = _bytes_of(lambda step=packed: _in_region(step))
        yield {"model": name, "plain_bytes": plain_bytes, "saved_bytes": saved_bytes}


def _in_region(step: Step) -> Tensor:
    with brevact.backward_quant(step.model):
        return step.loss(step.model, step.batch)


def _bytes_of(loss: Callable[[], Tensor]) -> int:
    """Bytes that a forward pass leaves, after one that makes what is made once."""
    loss()
    return kept_bytes(loss)


if __name__ == "__main__":
    main()
