"""Peak memory of fresh processes that train: what reaches the user of the bytes that are not stored.

    python -m benchmarks.process_memory                                        # all models, the allocators found here
    python -m benchmarks.process_memory --models mlp --allocators glibc tcmalloc --csv FILE

Each case is a process of its own (`benchmarks.training_case`), never trimmed. Peak is VmHWM; growth is peak less what
was resident before the first step, with optimizer and compiled kernels loaded. `felt` is the share of the bytes that
are not kept by which growth falls, against plain training with the same allocator; `felt_of_process` is that of peak,
in which what the package loads counts against it. Memory does not depend on other load; page_faults hardly do.

Allocators: `glibc` is Linux's, with the large pages that the package asks for in all variants, and with the sizes that
it sets for the heap where it packs (`brevact.heap`); `glibc-learning` is without those, `glibc-small-pages` without
large pages; `glibc-mapped` maps all tensors from 1 MiB on (MALLOC_MMAP_THRESHOLD_); jemalloc, tcmalloc and mimalloc
are loaded by LD_PRELOAD, from the system's folders or `--library PATH`.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import dataclasses
import gc
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import append_rows, check_columns, print_table
from benchmarks.training_case import VARIANTS, TrainingCase
from benchmarks.workloads import MODELS

_STATM = Path("/proc/self/statm")
_LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
_GLIBC = {
    "glibc": _LARGE_PAGES,
    "glibc-learning": {**_LARGE_PAGES, "MALLOC_MMAP_MAX_": "65536"},  # as by default: it says that the user decides
    "glibc-small-pages": {"THP_MEM_ALLOC_ENABLE": "0"},
    "glibc-mapped": {**_LARGE_PAGES, "MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**28)},
}
_LIBRARIES = {"jemalloc": "jemalloc", "tcmalloc": "tcmalloc_minimal", "mimalloc": "mimalloc"}
COLUMNS = (
    *("model", "batch_size", "depth", "steps", "allocator", "variant", "kept_mib", "loaded_mib", "peak_mib"),
    *("growth_mib", "felt", "felt_of_process", "cpu_s", "page_faults", "error"),
)


def return_free_memory() -> None:
    """Hand freed memory back to the system; does nothing where the C library cannot."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def resident_bytes() -> int | None:
    """Resident set of this process, after returning free memory to the system; None where it is not known."""
    if not _STATM.exists():
        return None
    gc.collect()
    return_free_memory()
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def allocators(libraries: Iterable[str] = ()) -> dict[str, dict[str, str]]:
    """Environment variables of the allocators that can be had here.

    Args:
        libraries: paths of allocators, whose names tell which they are.

    Returns:
        The variables by name.
    """
    found = {name: _library(name, libraries) for name in _LIBRARIES}
    preloaded = {name: {**_LARGE_PAGES, "LD_PRELOAD": path} for name, path in found.items() if path}
    return {**_GLIBC, **preloaded}


def _library(name: str, libraries: Iterable[str]) -> str | None:
    named = (os.path.abspath(path) for path in libraries if name in os.path.basename(path))
    return next(named, None) or ctypes.util.find_library(_LIBRARIES[name])


def measured(cases: Sequence[TrainingCase], environments: dict[str, dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Rows of cases with each allocator, compared with the plain case of the same model.

    Args:
        cases: those of a model in a run, plain first.
        environments: as of `allocators`.

    Yields:
        Rows with `COLUMNS`.
    """
    for case in cases:
        if case.variant != "plain":
            dataclasses.replace(case, steps=1).run()  # its kernels are compiled, as they are once on a machine
    for name, environment in environments.items():
        plain: dict[str, Any] = {}
        for case in cases:
            found = case.run(environment)
            if case.variant == "plain":
                plain = found
            yield compared(case, name, found, plain)


def compared(case: TrainingCase, allocator: str, found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """The row of a case.

    Args:
        case: what was trained.
        allocator: with which allocator.
        found: what `TrainingCase.run` returned.
        plain: the same of plain training.

    Returns:
        A row with `COLUMNS`.
    """
    settings = {name: value for name, value in dataclasses.asdict(case).items() if name in COLUMNS}
    row = {**dict.fromkeys(COLUMNS, ""), **settings, "allocator": allocator}
    row |= {name: value for name, value in found.items() if name in COLUMNS}
    if "error" not in found:
        row["growth_mib"] = round(found["peak_mib"] - found["loaded_mib"], 1)
        if "error" not in plain and (saved := plain["kept_mib"] - found["kept_mib"]) > 0:
            fall = plain["peak_mib"] - found["peak_mib"]
            row["felt"] = round((fall + found["loaded_mib"] - plain["loaded_mib"]) / saved, 3)
            row["felt_of_process"] = round(fall / saved, 3)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS[1:], default=list(VARIANTS[1:]))
    parser.add_argument("--allocators", nargs="+", metavar="NAME", help="default: all that are found")
    parser.add_argument("--library", action="append", default=[], metavar="PATH", help="an allocator to load")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args(arguments)
    if sys.platform != "linux":
        parser.error("needs Linux, which tells the peak of a process in /proc/self/status")
    environments = allocators(options.library)
    if missing := set(options.allocators or ()) - set(environments):
        parser.error(f"--allocators: no {', '.join(missing)} here; found: {', '.join(environments)}; see --library")
    if options.allocators:
        environments = {name: environments[name] for name in options.allocators}
    if options.csv:
        check_columns(options.csv, COLUMNS)
    rows = []
    for model in options.models:
        batch_size, depth = MODELS[model]
        sizes = {"model": model, "batch_size": batch_size, "depth": depth, "steps": options.steps}
        cases = [TrainingCase(variant=variant, **sizes) for variant in ("plain", *options.variants)]
        for row in measured(cases, environments):
            rows.append(row)
            print(row, flush=True)
            if options.csv:
                append_rows([row], options.csv)
    print_table(rows)
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
