"""The largest batch that trains on a GPU, plain against packed, by bisection to a sixteenth, a process a try.

    python -m benchmarks.gpu.batches                      # rows are appended to benchmarks/results/gpu_batches.csv
    python -m benchmarks.gpu.batches --models resnet50 --dtypes bfloat16 --variants plain 2bit
    python -m benchmarks.gpu.batches --smoke              # tiny models, up to 8 images, on the CPU unless --device cuda

A batch fits if `benchmarks.gpu.training.WARM_UP` steps run without `torch.OutOfMemoryError`; any other error is a row's
error. Peak and reserved memory are those of the largest batch: what lies between them is the allocator's fragmentation.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.processes import Row, measure_each, start_method
from benchmarks.gpu.steps import SMOKE_WORKLOADS, VARIANTS, WORKLOADS
from benchmarks.gpu.training import WARM_UP, Training
from benchmarks.records import append_rows, check_columns, print_table
from recipes.bisection import largest

COLUMNS = (
    *("model", "image_size", "dtype", "variant", "largest_batch", "times_plain", "peak_mib", "reserved_mib"),
    *("device_mib", "tries", "error"),
)
FILE = Path(__file__).parent.parent / "results" / "gpu_batches.csv"
_MIB = 2**20
_SMOKE_IMAGES = 8


@dataclass(frozen=True, kw_only=True)
class BatchCase:
    """One try.

    Args:
        model: key of `WORKLOADS`.
        dtype: "float32", or "bfloat16" for autocast.
        variant: key of `VARIANTS`.
        device: "cuda" or "cpu".
        batch_size: images.
        smoke: a tiny model of the same kind.
    """

    model: str
    dtype: str
    variant: str
    device: str
    batch_size: int
    smoke: bool

    def prepare(self) -> Callable[[], list[Row]]:
        """Nothing: what is there when another process measures would take its memory."""
        return self._measure

    def _measure(self) -> list[Row]:
        workload = (SMOKE_WORKLOADS if self.smoke else WORKLOADS)[self.model]
        workload, device = dataclasses.replace(workload, batch_size=self.batch_size), torch.device(self.device)
        try:
            training = Training(workload, VARIANTS[self.variant], getattr(torch, self.dtype), device, False)
            for _ in range(WARM_UP):
                training.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            return [{"fits": False}]
        if device.type != "cuda":
            return [{"fits": True, "peak_mib": "", "reserved_mib": "", "device_mib": ""}]
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        memory = {"peak": peak, "reserved": reserved, "device": torch.cuda.get_device_properties(device).total_memory}
        return [{"fits": True, **{f"{name}_mib": f"{count / _MIB:.1f}" for name, count in memory.items()}}]


def find(case: BatchCase, most: int, timeout: float, start: str) -> Row:
    """Search the largest batch of a case.

    Args:
        case: its batch size is that of the first try.
        most: no larger batch is tried.
        timeout: seconds that a try may take.
        start: how the processes begin, see `start_method`.

    Returns:
        The row, without `times_plain`.
    """
    workload = (SMOKE_WORKLOADS if case.smoke else WORKLOADS)[case.model]
    row = {**dict.fromkeys(COLUMNS, ""), "image_size": workload.image_size, "tries": 0}
    row |= {"model": case.model, "dtype": case.dtype, "variant": case.variant}

    def fits(batch_size: int) -> bool:
        row["tries"] += 1
        ((_, result),) = measure_each([dataclasses.replace(case, batch_size=batch_size)], 1, timeout, start)
        if isinstance(result, str):
            raise RuntimeError(f"batch {batch_size}: {result}")
        found = result[0]
        print(f"{case.model}, {case.dtype}, {case.variant}, {batch_size} images: {found['fits']}", flush=True)
        row.update({name: value for name, value in found.items() if name in COLUMNS})
        return found["fits"]

    try:
        row["largest_batch"] = largest(fits, case.batch_size, most)
    except RuntimeError as error:
        row["error"] = str(error)
    return row


def find_each(cases: Sequence[BatchCase], most: int, timeout: float, start: str) -> Iterator[Row]:
    """Search the largest batch of each case, and compare it with that of the plain one before.

    Args:
        cases: of each model and dtype the plain one first.
        most: no larger batch is tried.
        timeout: seconds that a try may take.
        start: how the processes begin.

    Yields:
        Rows with `COLUMNS`.
    """
    plain = 0
    for case in cases:
        row = find(case, most, timeout, start)
        plain = (row["largest_batch"] or 0) if case.variant == "plain" else plain
        if plain and row["largest_batch"]:
            row["times_plain"] = f"{row['largest_batch'] / plain:.2f}"
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, search, write, print; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.batches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    parser.add_argument("--dtypes", choices=["float32", "bfloat16"], nargs="+", default=["bfloat16"])
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=["plain", "checkpoint", "2bit", "4bit"])
    parser.add_argument("--first", type=int, default=64, help="batch size of the first try (default: %(default)s)")
    parser.add_argument("--most", type=int, default=2**16, help="largest batch size to try (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a try may take (default: %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda, with --smoke cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny models and batches, to see that it runs")
    parser.add_argument("--csv", type=Path, help=f"default: {FILE.name} of the results; with --smoke none")
    options = parser.parse_args(arguments)
    device = options.device or ("cpu" if options.smoke else "cuda")
    if device == "cpu" and not options.smoke:
        parser.error("--device cpu: a batch that fills this machine's memory would stop it; add --smoke")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA or ROCm device, and PyTorch finds none; --smoke runs every path on the CPU")
    most = min(options.most, _SMOKE_IMAGES) if options.smoke else options.most
    csv = options.csv or (None if options.smoke else FILE)
    if csv is not None:
        check_columns(str(csv), COLUMNS)
    variants = sorted(options.variants, key=lambda name: name != "plain")
    common = {"device": device, "batch_size": min(options.first, most // 2), "smoke": options.smoke}
    cases = [
        BatchCase(model=model, dtype=dtype, variant=variant, **common)
        for model, dtype, variant in itertools.product(options.models, options.dtypes, variants)
    ]
    rows = []
    for row in find_each(cases, most, options.timeout, start_method(device, ["benchmarks.gpu.steps"])):
        rows.append(row)
        if csv is not None:
            append_rows([row], str(csv), device)
    print_table(rows)
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
