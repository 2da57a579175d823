"""Bandwidth of the kernels, and memory and speed of training steps, on a GPU.

    python -m benchmarks.gpu                        # everything; rows are appended to CSVs in benchmarks/results
    python -m benchmarks.gpu --parts steps --models resnet50 --dtypes bfloat16 --variants plain 2bit
    python -m benchmarks.gpu --smoke                # every path with tiny sizes, on the CPU unless --device cuda

Kernels: quantize, dequantize and dequantize times a tensor, for tensors of at least eight times the device's cache. The
bytes read and written a second are compared with those of `copy_`, timed in turns with them. First the results of every
operation are compared with the plain-torch reference's.

Steps: EfficientNetV2-S and ResNet-50 with AdamW on random images, in float32 and under bfloat16 autocast. Variants:
plain, plain-compiled (`torch.compile`), checkpoint (of each block, non-reentrant), 2bit and 4bit (`StochBackward2bit`,
`StochBackward4bit`), 2bit-compiled (`torch.compile(fullgraph=True)`). Activations are what is allocated before
backward, less what was at the start of the step, the output and the loss; peak and reserved memory are those of a whole
step. TF32 and cuDNN's search for algorithms are as PyTorch sets them; the CSV states TF32.

Every case has a process of its own. Several get ready at the same time, then each measures alone. A case that fails is
a row with its error, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu import kernels, steps
from benchmarks.gpu.kernels import KernelCase
from benchmarks.gpu.processes import Row, measure_each, start_method
from benchmarks.gpu.report import print_goals, print_kernels, print_steps
from benchmarks.gpu.steps import VARIANTS, WORKLOADS, StepCase
from benchmarks.records import append_rows, check_columns

FILES = {"kernels": "gpu_kernels.csv", "steps": "gpu_steps.csv"}
RESULTS = Path(__file__).parent.parent / "results"
_SMOKE_NUMEL = 2**14


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, write, print; return the exit status."""
    options = _parse(arguments)
    rows: dict[str, list[Row]] = {"kernels": [], "steps": []}
    groups = _groups(options)
    total = sum(map(len, groups))
    print(f"{total} cases on {torch.cuda.get_device_name() if options.device == 'cuda' else 'the CPU'}", flush=True)
    start = start_method(options.device, [kernels.__name__, steps.__name__])
    results = itertools.chain(*(measure_each(group, options.jobs, options.timeout, start) for group in groups))
    for count, (case, result) in enumerate(results, start=1):
        failed = isinstance(result, str)
        print(f"[{count}/{total}] {case}: {result if failed else 'measured'}", flush=True)
        part = "kernels" if isinstance(case, KernelCase) else "steps"
        found = [{**row, **_versions(options.device)} for row in (case.failed(result) if failed else result)]
        rows[part] += found
        if options.out_dir is not None:
            append_rows(found, str(options.out_dir / FILES[part]), options.device)
    for part, print_rows in (("kernels", print_kernels), ("steps", print_steps)):
        if rows[part]:
            print_rows(rows[part])
    if not options.smoke:
        print_goals(rows["kernels"], rows["steps"])
    return int(any(row["error"] for row in (*rows["kernels"], *rows["steps"])))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", choices=FILES, nargs="+", default=list(FILES))
    parser.add_argument("--dtypes", choices=["float32", "bfloat16"], nargs="+")
    parser.add_argument("--bit-widths", type=int, choices=range(1, 9), nargs="+", metavar="1-8")
    parser.add_argument("--models", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument("--numel", type=_at_least(1), help="elements of the kernels' tensor (default: 8 caches, 2^28)")
    parser.add_argument(
        "--rounds", type=_at_least(2), default=200, help="timed calls of a kernel (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=_at_least(0, float), default=0.6, help="of each of 5 runs of steps (default: %(default)s)"
    )
    parser.add_argument("--channels-last", action="store_true", help="memory format of models and images")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda, with --smoke cpu")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny sizes, where not named bfloat16 and 2 bits alone; to see that it runs",
    )
    jobs = min(8, max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument(
        "--jobs", type=_at_least(1), default=jobs, help="cases that get ready at once (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=_at_least(0, float), default=300.0, help="seconds a case may take (default: %(default)s)"
    )
    parser.add_argument("--out-dir", type=Path, help=f"of the CSVs (default: {RESULTS.name}; with --smoke: none)")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cpu" if options.smoke else "cuda")
    options.dtypes = options.dtypes or (["bfloat16"] if options.smoke else ["float32", "bfloat16"])
    options.bit_widths = options.bit_widths or ([2] if options.smoke else [1, 2, 3, 4, 8])
    if options.smoke:
        options.numel, options.rounds, options.seconds = options.numel or _SMOKE_NUMEL, min(options.rounds, 3), 0.0
    elif options.out_dir is None:
        options.out_dir = RESULTS
    if options.device == "cpu" and not options.smoke:
        parser.error("--device cpu: full sizes are for GPUs; add --smoke")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA or ROCm device, and PyTorch finds none; --smoke runs every path on the CPU")
    try:
        _check_out_dir(options)
    except (OSError, ValueError) as error:
        parser.error(f"--out-dir: {error}")
    return options


def _at_least(least: int, kind: type[int] | type[float] = int) -> Callable[[str], int | float]:
    """A type for argparse: numbers from `least` on."""

    def number(text: str) -> int | float:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"got {value}; accepted is at least {least}")
        return value

    return number


def _check_out_dir(options: argparse.Namespace) -> None:
    """Raise if the rows could not be written after all the measurements."""
    if options.out_dir is None:
        return
    options.out_dir.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        columns = kernels.COLUMNS if part == "kernels" else steps.COLUMNS
        check_columns(str(options.out_dir / FILES[part]), [*columns, *_versions(options.device)])


def _groups(options: argparse.Namespace) -> list[list[KernelCase] | list[StepCase]]:
    """All cases, in groups that take about as long to get ready: kernels, eager steps, compiled steps."""
    groups: list[list[KernelCase] | list[StepCase]] = []
    if "kernels" in options.parts:
        sizes = {"numel": options.numel, "rounds": options.rounds}
        grid = itertools.product(options.dtypes, options.bit_widths)
        groups.append([KernelCase(dtype=x, bit_width=width, device=options.device, **sizes) for x, width in grid])
    if "steps" in options.parts:
        settings = {"channels_last": options.channels_last, "seconds": options.seconds, "smoke": options.smoke}
        steps = [
            StepCase(model=model, dtype=dtype, variant=variant, device=options.device, **settings)
            for model, dtype, variant in itertools.product(options.models, options.dtypes, options.variants)
        ]
        groups += [[case for case in steps if case.is_compiled == compiled] for compiled in (False, True)]
    return groups


def _versions(device: str) -> dict[str, str]:
    """Versions that the environment's columns lack."""
    try:
        import triton
    except ImportError:
        triton = None
    cuda = torch.version.cuda or (torch.version.hip and f"ROCm {torch.version.hip}") or ""
    cudnn = torch.backends.cudnn.version() if device == "cuda" else ""
    return {"triton": getattr(triton, "__version__", ""), "cuda": cuda, "cudnn": str(cudnn or "")}


if __name__ == "__main__":
    sys.exit(main())
