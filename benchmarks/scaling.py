"""How bytes, peak memory and time of a training step grow with batch size and depth, and what fits in a limit.

    python -m benchmarks.scaling                          # rows and picture; about six minutes on two quiet cores
    python -m benchmarks.scaling --parts batch --sizes 8 16 32 64 128
    python -m benchmarks.scaling --draw                   # the picture alone, from the rows that are there

EfficientNetV2-S on 32x32 images over the batch size, an MLP on 1,024 rows over its depth, both in powers of two; plain,
DEFAULT and checkpoint of each block. Each case is a process of its own (`benchmarks.training_case`): kept bytes,
growth of the resident memory to its peak, and processor time of a step.

Limit: the largest batch of EfficientNetV2-S, or of `--models`, that trains within `--limit` MiB on top of what is there
when the model and the compiled kernels are loaded, found by bisection to a sixteenth, a process a try. The kernel
enforces it by a control group, as it does for a container, or else by RLIMIT_DATA
(`benchmarks.training_case.MemoryLimit`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.process_memory import allocators
from benchmarks.records import append_rows, check_columns, print_table, read_rows
from benchmarks.training_case import TrainingCase
from benchmarks.workloads import MODELS
from recipes.bisection import largest

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parent.parent / "docs" / "scaling.png"
VARIANTS = ("plain", "DEFAULT", "checkpoint")
COLUMNS = (
    *(
        "part",
        "model",
        "variant",
        "batch_size",
        "depth",
        "limit_mib",
        "allocator",
        "kept_mib",
        "growth_mib",
        "peak_mib",
    ),
    *("cpu_s", "step_s", "error", "limited_by"),
)
_SIZES = {"batch": (8, 16, 32, 64), "depth": (4, 8, 16, 32)}
_LARGEST_BATCH = 4096


def cases(part: str, sizes: Sequence[int], variants: Sequence[str] = VARIANTS) -> list[TrainingCase]:
    """What is measured over batch size or depth.

    Args:
        part: "batch" or "depth".
        sizes: the batch sizes or depths.
        variants: some of `VARIANTS`.

    Returns:
        A case for each variant and size.
    """
    if part == "batch":
        grid = [("efficientnetv2-s", size, 1) for size in sizes]
    else:
        grid = [("mlp", 1024, size) for size in sizes]
    return [
        TrainingCase(model=model, variant=variant, batch_size=batch_size, depth=depth, steps=3)
        for variant in variants
        for model, batch_size, depth in grid
    ]


def fitting_batch(model: str, variant: str, limit_mib: int, start: int, environment: dict[str, str]) -> tuple[int, str]:
    """The largest batch whose training fits.

    Args:
        model: key of `benchmarks.workloads.MODELS`.
        variant: one of `VARIANTS`.
        limit_mib: what it may take.
        start: batch size of the first trial.
        environment: variables of the processes.

    Returns:
        The batch size, 0 if none fits, and what limits the processes, see `MemoryLimit`.

    Raises:
        RuntimeError: a process took more than an hour.
    """
    kinds = set()

    def fits(batch_size: int) -> bool:
        depth = MODELS[model][1]
        case = TrainingCase(model=model, variant=variant, batch_size=batch_size, depth=depth, limit_mib=limit_mib)
        found = case.run(environment, timeout=3600.0)
        print(f"{model}, {variant}, batch of {batch_size}: {found.get('error', 'fits')}", flush=True)
        if "took longer" in found.get("error", ""):
            raise RuntimeError(f"{case}: {found['error']}")
        kinds.update({found["limited_by"]} if "limited_by" in found else ())
        return "error" not in found

    return largest(fits, start, _LARGEST_BATCH), ", ".join(sorted(kinds))


def draw(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Draw kept bytes, growth to the peak and time over batch size and depth; of each case the last row.

    Args:
        rows: of the CSV.
        path: picture to write.
    """
    from matplotlib.figure import Figure

    panels = {"kept_mib": "kept for backward, MiB", "growth_mib": "growth to the peak, MiB", "cpu_s": "CPU seconds"}
    figure = Figure(figsize=(12, 7), layout="constrained")
    for axes_row, (part, axis) in zip(
        figure.subplots(2, 3), {"batch": "batch_size", "depth": "depth"}.items(), strict=True
    ):
        found = {(row["variant"], row[axis]): row for row in rows if row["part"] == part and not row["error"]}
        for axes, (name, label) in zip(axes_row, panels.items(), strict=True):
            for variant in VARIANTS:
                points = sorted(
                    (int(size), float(row[name])) for (which, size), row in found.items() if which == variant
                )
                if points:
                    axes.plot(*zip(*points, strict=True), "o-", markersize=4, label=variant)
            axes.set(xlabel=axis.replace("_", " "), ylabel=label, ylim=(0, None), xlim=(0, None))
            axes.grid(alpha=0.3)
        if found:
            axes_row[0].legend(fontsize=8)
        axes_row[1].set_title("EfficientNetV2-S, 32x32" if part == "batch" else "MLP, 1,024 rows", fontsize=10)
    figure.savefig(path, dpi=100)


def _measured(options: argparse.Namespace, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Measure all parts; rows are written as they come."""
    rows: list[dict[str, Any]] = []

    def add(**values: Any) -> None:
        row = {**dict.fromkeys(COLUMNS, ""), "allocator": options.allocator, **values}
        print({name: value for name, value in row.items() if value != ""}, flush=True)
        rows.append(row)
        append_rows([row], str(options.csv))

    for case in (cases("batch", (32,), ("DEFAULT",)) + cases("depth", (4,), ("DEFAULT",))) if options.warm_up else ():
        case.run(environment)  # its kernels are compiled, as they are once on a machine
    for part in options.parts:
        for case in cases(part, options.sizes or _SIZES[part], options.variants) if part != "limit" else ():
            found = case.run(environment)
            if "error" not in found:
                found["growth_mib"] = round(found["peak_mib"] - found["loaded_mib"], 1)
            sizes = {"model": case.model, "variant": case.variant, "batch_size": case.batch_size, "depth": case.depth}
            add(part=part, **sizes, **{name: value for name, value in found.items() if name in COLUMNS})
        for model in options.models if part == "limit" else ():
            start = 16 if MODELS[model][0] >= 16 else 2
            for variant in options.variants:
                found, kind = fitting_batch(model, variant, options.limit, start, environment)
                start = 4 * found if variant == "plain" else start
                sizes = {"model": model, "variant": variant, "batch_size": found, "depth": MODELS[model][1]}
                add(part=part, **sizes, limit_mib=options.limit, limited_by=kind)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print, draw; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("batch", "depth", "limit"), default=["batch", "depth", "limit"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--sizes", nargs="+", type=int, help="batch sizes or depths; default: powers of two")
    parser.add_argument(
        "--limit", type=int, default=400, metavar="MIB", help="of the part limit (default: %(default)s)"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["efficientnetv2-s"], help="of the part limit")
    parser.add_argument("--allocator", default="glibc", help="see benchmarks.process_memory (default: %(default)s)")
    parser.add_argument("--library", action="append", default=[], metavar="PATH", help="an allocator to load")
    parser.add_argument("--csv", type=Path, default=RESULTS / "scaling.csv", help="default: %(default)s")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="default: %(default)s")
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false", help="kernels are compiled already")
    parser.add_argument("--draw", action="store_true", help="measure nothing, draw what is in the CSV")
    options = parser.parse_args(arguments)
    environments = allocators(options.library)
    if options.allocator not in environments:
        parser.error(f"--allocator: no {options.allocator} here; found: {', '.join(environments)}; see --library")
    rows: list[dict[str, Any]] = []
    if not options.draw:
        check_columns(str(options.csv), COLUMNS)
        rows = _measured(options, environments[options.allocator])
        print_table(rows)
    draw(read_rows(str(options.csv)), options.picture)
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
