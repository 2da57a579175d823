"""The largest batch that trains in so much memory of a GPU, plain against packed, by bisection to a sixteenth.

    python -m benchmarks.gpu.batches                      # rows are appended to benchmarks/results/gpu_batches.csv
    python -m benchmarks.gpu.batches --models resnet50 --dtypes bfloat16 --variants plain DEFAULT
    python -m benchmarks.gpu.batches --smoke              # tiny models, up to 8 samples, on the CPU or by --device cuda

A batch fits if `benchmarks.gpu.training.WARM_UP` steps run without `torch.OutOfMemoryError`; any other error is a row's
error. A case has a process of its own, which gives cached memory back after each try. Peak and reserved memory are
those of the largest batch: what lies between them is the allocator's fragmentation.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.processes import Row, measure_each, start_method
from benchmarks.gpu.steps import VARIANTS
from benchmarks.gpu.timing import limit_threads
from benchmarks.gpu.training import WARM_UP, Training
from benchmarks.gpu.workloads import SMOKE_WORKLOADS, WORKLOADS, Workload
from benchmarks.records import append_rows, check_columns, print_table
from recipes.bisection import largest

COLUMNS = (
    *("model", "size", "dtype", "variant", "limit_gib", "largest_batch", "times_plain", "peak_mib", "reserved_mib"),
    *("tries", "error"),
)
COMPARED = ("plain", "checkpoint", "DEFAULT", "RECOMPUTE")
"""Variants whose largest batches are compared, unless others are named."""
LIMIT = 16.0
"""GiB of the device that a case may take, unless told."""
MOST = 2**14
"""Largest batch that is tried, unless told."""
FILE = Path(__file__).parent.parent / "results" / "gpu_batches.csv"
_MIB = 2**20
_SMOKE_SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class BatchCase:
    """A search.

    Args:
        model: key of `WORKLOADS`.
        dtype: "float32", or "bfloat16" for autocast.
        variant: key of `VARIANTS`.
        device: "cuda" or "cpu".
        first: samples of the first try.
        most: no larger batch is tried.
        limit_gib: of the device's memory; without effect on the CPU.
        smoke: a tiny model of the same kind.
    """

    model: str
    dtype: str
    variant: str
    device: str
    first: int
    most: int
    limit_gib: float
    smoke: bool

    def __str__(self) -> str:
        return f"largest batch of {self.model}, {self.dtype}, {self.variant}"

    @property
    def is_compiled(self) -> bool:
        """Whether it takes long to get ready."""
        return VARIANTS[self.variant].compiled

    @property
    def workload(self) -> Workload:
        """Model and batches."""
        return (SMOKE_WORKLOADS if self.smoke else WORKLOADS)[self.model]

    def prepare(self) -> Callable[[], list[Row]]:
        """Build the model, run steps of one sample, so that its kernels are there, and return what searches."""
        device = torch.device(self.device)
        limit_threads(device)
        training = Training(self.workload, VARIANTS[self.variant], getattr(torch, self.dtype), device, False, 1)
        for _ in range(WARM_UP):
            training.step()
        training.release()
        return lambda: [self._search(training, device)]

    def failed(self, error: str) -> list[Row]:
        """The row of a case that could not be measured."""
        return [self._row(error=error)]

    def _search(self, training: Training, device: torch.device) -> Row:
        found: dict[str, object] = {"tries": 0}
        if device.type == "cuda":
            index = torch.cuda.current_device()
            total = torch.cuda.get_device_properties(index).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.limit_gib * 2**30 / total), index)

        def fits(samples: int) -> bool:
            found["tries"] = int(str(found["tries"])) + 1
            memory = memory_of_steps(training, samples, device)
            found.update(memory or {})
            return memory is not None

        return self._row(largest_batch=largest(fits, self.first, self.most), **found)

    def _row(self, **values: object) -> Row:
        known = {"model": self.model, "size": self.workload.size, "dtype": self.dtype, "variant": self.variant}
        limit = {"limit_gib": self.limit_gib if self.device == "cuda" else ""}
        return {**dict.fromkeys(COLUMNS, ""), **known, **limit, **values}


def memory_of_steps(training: Training, samples: int, device: torch.device) -> dict[str, str] | None:
    """Try a batch.

    Args:
        training: a model in training; it takes the batch.
        samples: of the batch.
        device: where it is.

    Returns:
        MiB at the peak, allocated and reserved, on a CUDA device; None if memory does not suffice.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        training.load(samples)
        for _ in range(WARM_UP):
            training.step()
        if on_gpu:
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        training.load(1)
        return None
    finally:
        training.release()
    if not on_gpu:
        return {}
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"peak_mib": f"{peak / _MIB:.1f}", "reserved_mib": f"{reserved / _MIB:.1f}"}


def beside_plain(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with how many times the plain variant's largest batch its own is.

    Args:
        rows: of cases, in any order.
    """
    subject = ("model", "dtype", "limit_gib")
    plain = {tuple(str(row[x]) for x in subject): row["largest_batch"] for row in rows if row["variant"] == "plain"}
    found = []
    for row in rows:
        beside = plain.get(tuple(str(row[x]) for x in subject))
        times = f"{int(row['largest_batch']) / int(beside):.2f}" if beside and row["largest_batch"] else ""
        found.append({**row, "times_plain": times})
    return found


def find_each(cases: Sequence[BatchCase], timeout: float, start: str) -> Iterator[Row]:
    """Search the largest batch of each case.

    Args:
        cases: of each model and dtype the plain one first, beside which the others are set.
        timeout: seconds that a search may take.
        start: how the processes begin, see `start_method`.

    Yields:
        Rows with `COLUMNS`.
    """
    rows: list[Row] = []
    for case, result in measure_each(cases, 1, timeout, start):
        rows += case.failed(result) if isinstance(result, str) else result
        yield beside_plain(rows)[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, search, write, print; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.batches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    parser.add_argument("--dtypes", choices=["float32", "bfloat16"], nargs="+", default=["bfloat16"])
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(COMPARED))
    parser.add_argument("--first", type=int, default=16, help="samples of the first try (default: %(default)s)")
    parser.add_argument("--most", type=int, default=MOST, help="largest batch to try (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="GiB of the device (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a search may take (default: %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda, with --smoke cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny models and batches, to see that it runs")
    parser.add_argument("--csv", type=Path, help=f"default: {FILE.name} of the results; with --smoke none")
    options = parser.parse_args(arguments)
    device = options.device or ("cpu" if options.smoke else "cuda")
    if device == "cpu" and not options.smoke:
        parser.error("--device cpu: a batch that fills this machine's memory would stop it; add --smoke")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA or ROCm device, and PyTorch finds none; --smoke runs every path on the CPU")
    csv = options.csv or (None if options.smoke else FILE)
    if csv is not None:
        check_columns(str(csv), COLUMNS)
    most = min(options.most, _SMOKE_SAMPLES) if options.smoke else options.most
    settings = {"device": device, "first": min(options.first, most // 2), "most": most, "smoke": options.smoke}
    rows = []
    cases = cases_of(options.models, options.dtypes, options.variants, limit_gib=options.limit, **settings)
    for row in find_each(cases, options.timeout, start_method(device, ["benchmarks.gpu.steps"])):
        print(f"{row['model']}, {row['dtype']}, {row['variant']}: {row['largest_batch'] or row['error']}", flush=True)
        rows.append(row)
        if csv is not None:
            append_rows([row], str(csv), device)
    print_table(rows)
    return int(any(row["error"] for row in rows))


def cases_of(models: Sequence[str], dtypes: Sequence[str], variants: Sequence[str], **settings: Any) -> list[BatchCase]:
    """A case for each model, dtype and variant, the plain ones first.

    Args:
        models: keys of `WORKLOADS`.
        dtypes: "float32", "bfloat16".
        variants: keys of `VARIANTS`.
        settings: of all cases.
    """
    ordered = sorted(variants, key=lambda name: name != "plain")
    grid = itertools.product(models, dtypes, ordered)
    return [BatchCase(model=model, dtype=dtype, variant=variant, **settings) for model, dtype, variant in grid]


if __name__ == "__main__":
    sys.exit(main())
