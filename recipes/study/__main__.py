"""The sources' questions asked of this package: training runs in pairs, a table, a picture.

    python -m recipes.study list
    python -m recipes.study main --data-dir data --jobs 2

Runs of a seed start from the same weights and see the same batches; what they store for backward is all that differs.
Each is a row of the CSV as soon as it ends: a study that is stopped goes on where it was, and studies share runs.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from brevact.command_line.launcher import restart_with_mimalloc
from recipes import files
from recipes.data import LOADERS
from recipes.errors import RecipeError
from recipes.study import noise_along, page, pictures, records, retrofit_study, tables
from recipes.study.cases import Study
from recipes.study.definitions import STUDIES
from recipes.study.run import FULL_PRECISION, Key, Run, Size
from recipes.study.running import Place, train_all
from recipes.study.training import Row

ALL, LIST = "all", "list"
FOLDER = Path("runs/study")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status.

    Returns:
        0; 1 where runs are missing; 2 for what the user can put right; 130 when stopped.
    """
    options = _parse(arguments)
    if arguments is None:
        restart_with_mimalloc()
    try:
        return run(options)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; every finished run is kept, and the same command goes on", file=sys.stderr)
        return 130


def run(options: argparse.Namespace) -> int:
    """Lists studies, or trains what is missing of those that the command line names and reports on them.

    Args:
        options: of the command line.

    Returns:
        The exit status.

    Raises:
        RecipeError: something that the user can put right.
    """
    check(options)
    if options.study == LIST:
        print(tables.catalogue(STUDIES.values(), records.read(options.csv)))
        print(f"{noise_along.NAME}\n    {noise_along.QUESTION}\n    this project. Half an hour of a CPU core a seed.")
        print(f"{retrofit_study.NAME}\n    {retrofit_study.QUESTION}\n    {retrofit_study.SOURCE}.")
        return 0
    if options.study == noise_along.NAME:
        return along_training(options)
    if options.study == retrofit_study.NAME:
        return retrofitted(options)
    is_all = options.study == ALL
    studies = [study for study in STUDIES.values() if not study.is_long] if is_all else [STUDIES[options.study]]
    problems = []
    if not options.summary:
        stop_at = None if options.stop_after is None else time.time() + options.stop_after
        place = Place(options.csv, options.data_dir, options.device, stop_at)
        torch.set_num_threads(1)
        problems = train_all([run for study in studies for run in runs_of(study, options)], place, options.jobs)
    rows = records.read(options.csv)
    for study in studies:
        report(study, rows, options)
    return 1 if problems else 0


def check(options: argparse.Namespace) -> None:
    """Finds out before any training whether what the command line names can be used.

    Args:
        options: of the command line.

    Raises:
        RecipeError: something that the user can put right.
    """
    if options.jobs < 1:
        raise RecipeError(f"--jobs {options.jobs} is not possible: use at least 1")
    if options.epochs == 1 and options.study not in (LIST, retrofit_study.NAME):
        raise RecipeError("--epochs 1 is not possible: the first epoch is the warm-up; use at least 2")
    if options.page and options.study not in (ALL, LIST):
        page_of(options.study, options)
    if options.study != LIST:
        files.check_writable(options.out_dir)
        if not options.summary:
            files.check_writable(options.csv.parent, "--csv")
            Run(FULL_PRECISION, 0).settings(options.data_dir, options.device).torch_device()


def along_training(options: argparse.Namespace) -> int:
    """Measures noise along a run for each seed that has no rows yet, and reports on all; returns the exit status."""
    size, effort = size_of(STUDIES["main"].size, options), noise_along.Effort()

    def measured(seed: int) -> list[dict[str, Any]]:
        with tqdm(desc=f"seed {seed}", disable=None) as bar:
            run = Run(FULL_PRECISION, seed, size)
            return list(noise_along.measure(run, options.data_dir, options.device, effort, bar.update))

    rows = by_seed(options, "noise", noise_along.COLUMNS, size, options.seeds or [0], measured)
    if not rows:
        return 1
    text, picture = noise_along.table(rows), options.out_dir / f"{noise_along.NAME}.png"
    print(f"{noise_along.NAME}: {noise_along.QUESTION}\n\n{text}")
    options.out_dir.mkdir(parents=True, exist_ok=True)
    noise_along.draw(picture, rows)
    if options.page:
        path = page_of(noise_along.NAME, options)
        link = f"![{noise_along.QUESTION}]({os.path.relpath(picture, path.parent)})"
        page.replace_part(path, noise_along.NAME, f"{link}\n\n{text}")
    return 0


def retrofitted(options: argparse.Namespace) -> int:
    """Retrofits a trained network for each seed that has no rows yet, and reports on all; returns the exit status."""
    size = size_of(retrofit_study.SIZE, options)

    def measured(seed: int) -> list[dict[str, Any]]:
        return retrofit_study.measure(size, seed, options.data_dir, options.device)

    rows = by_seed(options, "retrofit", retrofit_study.COLUMNS, size, options.seeds or range(3), measured)
    if not rows:
        return 1
    text = retrofit_study.table(rows)
    print(f"{retrofit_study.NAME}: {retrofit_study.QUESTION}\n\n{text}")
    if options.page:
        page.replace_part(page_of(retrofit_study.NAME, options), retrofit_study.NAME, text)
    return 0


def by_seed(
    options: argparse.Namespace,
    name: str,
    columns: Sequence[str],
    size: Size,
    seeds: Iterable[int],
    measured: Callable[[int], list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """The rows of a study that has a file of its own, which is written anew after each seed.

    Args:
        options: of the command line.
        name: at the end of the file's name.
        columns: of the rows.
        size: of the runs; rows of other sizes stay in the file.
        seeds: that are to be there.
        measured: the rows of a seed.

    Returns:
        All rows of that size.

    Raises:
        RecipeError: the file has other columns.
    """
    path = options.csv.with_name(f"{options.csv.stem}-{name}.csv")
    facts = {"dataset": size.dataset, "train_size": str(size.train_size or "all"), "epochs": str(size.epochs)}

    def is_mine(row: Mapping[str, Any]) -> bool:
        return all(str(row[column]) == value for column, value in facts.items())

    def seeds_in(rows: Iterable[Mapping[str, Any]]) -> set[int]:
        return {int(row["seed"]) for row in rows if is_mine(row)}

    rows: list[dict[str, Any]] = [*records.read_of(path, columns)]
    if not options.summary:
        torch.set_num_threads(1)
        path.parent.mkdir(parents=True, exist_ok=True)
        for seed in sorted(set(seeds) - seeds_in(rows)):
            found = measured(seed)
            with records.locked(path, "rows"):  # another command may have added seeds
                rows = [*records.read_of(path, columns)]
                if seed not in seeds_in(rows):
                    rows += found
                    files.write_rows(path, columns, rows)
    rows = [row for row in rows if is_mine(row)]
    if not rows:
        print(f"{path} has no rows: run without --summary")
    return rows


def report(study: Study, rows: Mapping[Key, Row], options: argparse.Namespace) -> None:
    """Prints the table of a study and draws its picture; a page that is named gets both, or what is left to run."""
    size, seeds = size_of(study.size, options), seeds_of(study, options)
    text = tables.summary(study, rows, size, seeds)
    print(f"\n{study.name}: {study.question} ({study.source})\n\n{text}")
    options.out_dir.mkdir(parents=True, exist_ok=True)
    picture = options.out_dir / f"{study.name}.png"
    if options.page and (left := tables.left_to_run(study, rows, size, seeds)):
        page.replace_part(page_of(study.name, options), study.name, left)
    elif pictures.draw(picture, study, rows, size, seeds):
        print(f"\n{picture}")
        if options.page:
            path = page_of(study.name, options)
            link = f"![{study.question}]({os.path.relpath(picture, path.parent)})"
            page.replace_part(path, study.name, f"{link}\n\n{text}")


def page_of(name: str, options: argparse.Namespace) -> Path:
    """The page that has the part of a study: the one that the command line names, or that of the study in a folder.

    Raises:
        RecipeError: it is not there.
    """
    path = Path(options.page / f"{name}.md" if options.page.is_dir() else options.page)
    if not path.is_file():
        raise RecipeError(
            f"--page {path} is not there; name a Markdown page that has the part of the study, "
            "or a folder with a page for each study"
        )
    return path


def runs_of(study: Study, options: argparse.Namespace) -> list[Run]:
    """The runs of a study at the size and for the seeds that the command line names."""
    return list(study.runs(size_of(study.size, options), seeds_of(study, options)))


def size_of(size: Size, options: argparse.Namespace) -> Size:
    """How much the runs of a study of this size train, unless the command line says otherwise."""
    given = {name: getattr(options, name) for name in ("dataset", "epochs", "train_size")}
    return replace(size, **{name: value for name, value in given.items() if value is not None})


def seeds_of(study: Study, options: argparse.Namespace) -> Sequence[int]:
    """The seeds of a study."""
    return options.seeds or range(study.seeds)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m recipes.study", description=__doc__, formatter_class=formatter)
    names = (LIST, ALL, *STUDIES, noise_along.NAME, retrofit_study.NAME)
    parser.add_argument("study", choices=names, metavar="STUDY", help=", ".join(names))
    parser.add_argument("--dataset", choices=tuple(LOADERS), help="(default: that of the study, cifar10)")
    parser.add_argument("--data-dir", default="data", help="folder that holds the data set (default: %(default)s)")
    parser.add_argument("--epochs", type=int, help="of each run (default: those of the study)")
    parser.add_argument("--train-size", type=int, help="train on this many images only (default: as the study does)")
    parser.add_argument("--seeds", type=int, nargs="+", help="(default: 0, 1, 2 and so on, as many as the study has)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="torch device; auto takes CUDA where there is one")
    parser.add_argument(
        "--stop-after",
        type=float,
        metavar="SECONDS",
        help="end by then; the same command goes on from a checkpoint",
    )
    parser.add_argument("--csv", type=Path, default=FOLDER / "runs.csv", help="rows of runs (default: %(default)s)")
    parser.add_argument("--out-dir", type=Path, default=FOLDER, help="folder of pictures (default: %(default)s)")
    parser.add_argument(
        "--page",
        type=Path,
        help="Markdown page whose parts between marks are written anew; or a folder with a page for each study",
    )
    parser.add_argument(
        "--summary", action="store_true", help="train nothing: table and picture of the rows that are there"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
