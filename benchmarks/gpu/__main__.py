"""Bandwidth of the kernels, memory and speed of training steps, and the largest batches, on a GPU.

    python -m benchmarks.gpu --everything           # all of it, with the tests that need a GPU, in calls of 9 minutes
    python -m benchmarks.gpu                        # kernels and steps; rows are appended to CSVs in benchmarks/results
    python -m benchmarks.gpu --parts steps --models resnet50 --dtypes bfloat16 --variants plain DEFAULT
    python -m benchmarks.gpu --smoke                # every path with tiny sizes, on the CPU unless --device cuda

Kernels: quantize, dequantize and dequantize times a tensor, for tensors of at least eight times the device's cache. The
bytes read and written a second are compared with those of `copy_`, timed in turns with them. First the results of every
operation are compared with the plain-torch reference's.

Steps: ResNet-50, EfficientNetV2-S, GPT-2 small, ViT-B, a 3-D U-Net and a ResNet-18 of 4 bits by Brevitas, with AdamW on
random batches, in float32 and under bfloat16 autocast. Variants: plain, compiled by `torch.compile`, checkpoint (of
each block, non-reentrant), policies by their names, and "-graph": the whole step captured as a CUDA graph. Activations
are what is allocated before backward, less what was at the start of the step, the output and the loss; peak and
reserved memory are those of a whole step. TF32 and cuDNN's search for algorithms are as PyTorch sets them; the CSV
states TF32.

Batches: see `benchmarks.gpu.batches`. Tests: `pytest -m gpu`.

`--everything` ends when its seconds are spent. The next call leaves out what has a row of this device and this version
of PyTorch, and the tests that passed: call it until it says that nothing is left.

Every case has a process of its own. Several get ready at the same time, then each measures alone. A case that fails is
a row with its error, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu import batches, kernels, steps, tests
from benchmarks.gpu.batches import BatchCase
from benchmarks.gpu.kernels import KernelCase
from benchmarks.gpu.processes import Row, measure_each, start_method
from benchmarks.gpu.report import print_batches, print_goals, print_kernels, print_steps
from benchmarks.gpu.steps import VARIANTS, StepCase
from benchmarks.gpu.workloads import WORKLOADS
from benchmarks.records import append_rows, check_columns, environment

FILES = {"kernels": "gpu_kernels.csv", "steps": "gpu_steps.csv", "batches": "gpu_batches.csv"}
RESULTS = Path(__file__).parent.parent / "results"
Case = KernelCase | StepCase | BatchCase
_COLUMNS = {"kernels": kernels.COLUMNS, "steps": steps.COLUMNS, "batches": batches.COLUMNS}
_PARTS: dict[type, str] = {KernelCase: "kernels", StepCase: "steps", BatchCase: "batches"}
_SMOKE_NUMEL = 2**14
_FIRST_WAVE = 90.0
"""Seconds that the first wave of cases is expected to take."""
#: Of `--everything`, the most telling ones first.
_COMPARED = ("plain", "checkpoint", "DEFAULT", "RECOMPUTE", "plain-graph", "DEFAULT-graph", "RECOMPUTE-graph")
_COMPILED = ("plain-compiled", "DEFAULT-compiled")
_OF_BREVITAS = "resnet18-w4a4"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, write, print; return the exit status."""
    started = time.monotonic()
    options = _parse(arguments)
    rows: dict[str, list[Row]] = {part: [] for part in FILES}
    done = _measured(options) if options.everything else set()
    groups = [[case for case in group if str(case) not in done] for group in _groups(options)]
    total, count, longest = sum(map(len, groups)), 0, _FIRST_WAVE
    print(f"{total} cases on {torch.cuda.get_device_name() if options.device == 'cuda' else 'the CPU'}", flush=True)
    start = start_method(options.device, [kernels.__name__, steps.__name__])
    for wave in itertools.chain(*(_waves(group, options.jobs) for group in groups)):
        began = time.monotonic()
        if options.everything and began - started + longest > options.budget:
            break
        for case, result in measure_each(wave, options.jobs, options.timeout, start):
            count += 1
            failed = isinstance(result, str)
            print(f"[{count}/{total}] {case}: {result if failed else 'measured'}", flush=True)
            part = _PARTS[type(case)]
            found = case.failed(result) if isinstance(result, str) else result
            found = [{**row, **_versions(options.device)} for row in found]
            rows[part] += found
            if options.out_dir is not None:
                append_rows(found, str(options.out_dir / FILES[part]), options.device)
        longest = max(time.monotonic() - began, longest if longest != _FIRST_WAVE else 0.0)
    for part, print_rows in (("kernels", print_kernels), ("steps", print_steps), ("batches", print_batches)):
        if rows[part]:
            print_rows(rows[part])
    if not options.smoke:
        print_goals(rows["kernels"], rows["steps"])
    failed_tests = 0
    if options.everything:
        left = total - count
        if not left and "tests" in options.parts:
            passed, failed_tests, left = tests.run(options.out_dir, options.budget - (time.monotonic() - started))
            print(f"tests: {passed} passed, {failed_tests} failed")
        print(f"{left} are left; the same command goes on" if left else "nothing is left")
    return int(failed_tests > 0 or any(row["error"] for row in itertools.chain(*rows.values())))


def _waves(cases: Sequence[Case], jobs: int) -> list[Sequence[Case]]:
    """Cases that get ready together."""
    return [cases[first : first + jobs] for first in range(0, len(cases), jobs)]


def _measured(options: argparse.Namespace) -> set[str]:
    """Names of the cases that have a row without an error, of this device and this version of PyTorch."""
    here = environment(options.device)
    found = set()
    for part, file in FILES.items():
        path = options.out_dir / file
        if not path.exists():
            continue
        with path.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                if not row["error"] and (row["device"], row["torch"]) == (here["device"], here["torch"]):
                    found.add(_name_of(part, row))
    return found


def _name_of(part: str, row: Row) -> str:
    """What the case of a row calls itself."""
    if part == "kernels":
        return f"kernels, {row['dtype']}, {row['bit_width']} bits"
    name = f"{row['model'].removesuffix(' (tiny)')}, {row['dtype']}, {row['variant']}"
    return name if part == "steps" else f"largest batch of {name}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--everything", action="store_true", help="all parts and the tests, in calls of --budget seconds"
    )
    parser.add_argument(
        "--budget", type=_at_least(0, float), default=540.0, help="seconds of --everything (default: %(default)s)"
    )
    parser.add_argument("--parts", choices=[*FILES, "tests"], nargs="+", help="default: kernels and steps")
    parser.add_argument("--dtypes", choices=["float32", "bfloat16"], nargs="+")
    parser.add_argument("--bit-widths", type=int, choices=range(1, 9), nargs="+", metavar="1-8")
    parser.add_argument("--models", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", help=f"default: {', '.join(_COMPARED + _COMPILED)}")
    parser.add_argument("--numel", type=_at_least(1), help="elements of the kernels' tensor (default: 8 caches, 2^28)")
    parser.add_argument("--rounds", type=_at_least(2), help="timed calls of a kernel (default: 200; of everything: 50)")
    parser.add_argument(
        "--seconds", type=_at_least(0, float), default=0.4, help="of each of 5 runs of steps (default: %(default)s)"
    )
    parser.add_argument("--channels-last", action="store_true", help="memory format of models and images")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda, with --smoke cpu")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny sizes, where not named bfloat16 and 2 bits alone; to see that it runs",
    )
    jobs = min(12, max(1, (os.cpu_count() or 1) * 3 // 4))
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
    options.bit_widths = options.bit_widths or (
        [2] if options.smoke else [2, 4, 8] if options.everything else [1, 2, 3, 4, 8]
    )
    options.parts = options.parts or ([*FILES, "tests"] if options.everything else ["kernels", "steps"])
    options.variants = options.variants or [*_COMPARED, *_COMPILED]
    options.rounds = options.rounds or (50 if options.everything else 200)
    if options.smoke:
        options.numel, options.rounds, options.seconds = options.numel or _SMOKE_NUMEL, min(options.rounds, 3), 0.0
    elif options.out_dir is None:
        options.out_dir = RESULTS
    if "tests" in options.parts and not options.everything:
        parser.error("--parts tests: the tests run as a part of --everything; or run pytest -m gpu")
    if options.everything and options.out_dir is None:
        parser.error("--everything --smoke: it goes on from files that it writes; name a folder by --out-dir")
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
    for part in set(options.parts) & set(FILES):
        check_columns(str(options.out_dir / FILES[part]), [*_COLUMNS[part], *_versions(options.device)])


def _groups(options: argparse.Namespace) -> list[list[Case]]:
    """All cases, in groups that take about as long to get ready, those that tell most first."""
    groups: list[list[Case]] = []
    if "kernels" in options.parts:
        sizes = {"numel": options.numel, "rounds": options.rounds}
        grid = itertools.product(options.dtypes, options.bit_widths)
        groups.append([KernelCase(dtype=x, bit_width=width, device=options.device, **sizes) for x, width in grid])
    if "steps" in options.parts:
        settings = {"channels_last": options.channels_last, "seconds": options.seconds, "smoke": options.smoke}
        found = [
            StepCase(model=model, dtype=dtype, variant=variant, device=options.device, **settings)
            for dtype in sorted(options.dtypes)
            for model in options.models
            for variant in _variants_of(model, options.variants)
        ]
        groups += [[case for case in found if case.is_compiled == compiled] for compiled in (False, True)]
    if "batches" in options.parts:
        variants = [variant for variant in options.variants if variant in batches.COMPARED]
        most = 8 if options.smoke else batches.MOST
        limits = {"first": min(16, most // 2), "most": most, "limit_gib": batches.LIMIT, "smoke": options.smoke}
        models = [model for model in options.models if model != _OF_BREVITAS]
        found_batches = batches.cases_of(models, ["bfloat16"], variants, device=options.device, **limits)
        groups.insert(len(groups) - 1 if "steps" in options.parts else len(groups), list(found_batches))
    return groups


def _variants_of(model: str, variants: Sequence[str]) -> list[str]:
    """Those that say something of a model: Brevitas' quantizers are neither captured nor compiled here."""
    if model != _OF_BREVITAS:
        return list(variants)
    return [name for name in ("plain", "lossless", "DEFAULT") if name in (*variants, "lossless")]


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
