"""Models of other fields at `DEFAULT`: bytes that a step with its loss keeps, and its time as a multiple of the plain one.

    python -m benchmarks.domain_steps --csv benchmarks/results/domain_models.csv
    python -m benchmarks.domain_steps --models "PyG GCN" "CLIP"

Bytes are those of distinct storages that autograd keeps, without weights, buffers and the batch. Plain and packed steps
take turns in one process, with one thread, whose processor time is counted; the ratio is that of medians. A model whose
libraries are missing is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import brevact
from benchmarks.domain_models import DOMAINS, Step, build, missing
from benchmarks.records import append_rows, check_columns, print_table
from brevact.policy.rules import has_policy

Row = dict[str, Any]


def region_of(step: Step) -> AbstractContextManager[Any]:
    """Return the region of the model, where it has a policy."""
    return brevact.backward_quant(step.model) if has_policy(step.model) else nullcontext()


def kept_bytes(step: Step) -> int:
    """Return the bytes of distinct storages that autograd keeps for a step, without weights, buffers and the batch.

    Args:
        step: a model, with or without a policy, its batch and its loss.
    """
    held = [*step.model.parameters(), *step.model.buffers(), *tree_leaves(step.batch)]
    known = {x.untyped_storage().data_ptr() for x in held if isinstance(x, Tensor)}
    storages: dict[int, tuple[Tensor, int]] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        storages.setdefault(storage.data_ptr(), (x.detach(), storage.nbytes()))
        return x.detach()

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), region_of(step):
        loss = step.loss(step.model, step.batch)
    del loss
    return sum(nbytes for address, (_, nbytes) in storages.items() if address not in known)


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
    full, kept = kept_bytes(plain), kept_bytes(packed)
    seconds: dict[str, list[float]] = {"plain": [], "packed": []}
    for index in range(rounds + 2):
        for kind, step in (("plain", plain), ("packed", packed)):
            found = seconds_of(step)
            if index > 1:
                seconds[kind].append(found)
    of_plain, of_packed = (statistics.median(each) for each in seconds.values())
    return {
        "model": name,
        "plain_bytes": full,
        "kept_bytes": kept,
        "times_less": f"{full / kept:.1f}",
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
    columns = ("model", "plain_bytes", "kept_bytes", "times_less", "plain_ms", "step")
    if args.csv is not None:
        check_columns([dict.fromkeys(columns)], args.csv)
    torch.set_num_threads(1)
    rows = []
    for row in rows_of(args.models, args.rounds):
        rows.append(row)
        if args.csv is not None:
            append_rows([row], args.csv)
    print_table(rows)


if __name__ == "__main__":
    main()
