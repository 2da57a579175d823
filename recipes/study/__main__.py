"""The sources' questions asked of this package: training runs in pairs, a table, a picture.

    python -m recipes.study list
    python -m recipes.study main --data-dir data --jobs 2

Runs of a seed start from the same weights and see the same batches; what they store for backward is all that differs.
Each is a row of the CSV as soon as it ends: a study that is stopped goes on where it was, and studies share runs.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from recipes.data import LOADERS
from recipes.errors import RecipeError
from recipes.study.definitions import STUDIES, Study
from recipes.study.run import Run
from recipes.study.running import Place, train_all

ALL, LIST = "all", "list"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status.

    Returns:
        0; 1 where runs are missing; 2 for what the user can put right; 130 when stopped.
    """
    options = _parse(arguments)
    try:
        return run(options)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; every finished run is kept, and the same command goes on", file=sys.stderr)
        return 130


def run(options: argparse.Namespace) -> int:
    """Trains what is missing of the studies that the command line names.

    Args:
        options: of the command line.

    Returns:
        The exit status.

    Raises:
        RecipeError: something that the user can put right.
    """
    studies = list(STUDIES.values()) if options.study == ALL else [STUDIES[options.study]]
    place = Place(options.csv, options.data_dir, options.device)
    torch.set_num_threads(1)
    problems = train_all([run for study in studies for run in runs_of(study, options)], place, options.jobs)
    return 1 if problems else 0


def runs_of(study: Study, options: argparse.Namespace) -> list[Run]:
    """The runs of a study at the size and for the seeds that the command line names."""
    given = {name: getattr(options, name) for name in ("dataset", "epochs", "train_size")}
    size = replace(study.size, **{name: value for name, value in given.items() if value is not None})
    return list(study.runs(size, options.seeds or range(study.seeds)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m recipes.study", description=__doc__, formatter_class=formatter)
    parser.add_argument("study", choices=(LIST, ALL, *STUDIES), metavar="STUDY", help=", ".join((LIST, ALL, *STUDIES)))
    parser.add_argument("--dataset", choices=tuple(LOADERS), help="(default: that of the study, cifar10)")
    parser.add_argument("--data-dir", default="data", help="folder that holds the data set (default: %(default)s)")
    parser.add_argument("--epochs", type=int, help="of each run (default: those of the study)")
    parser.add_argument("--train-size", type=int, help="train on this many images only (default: as the study does)")
    parser.add_argument("--seeds", type=int, nargs="+", help="(default: 0, 1, 2 and so on, as many as the study has)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="torch device; auto takes CUDA where there is one")
    parser.add_argument(
        "--csv", type=Path, default=Path("runs/study/runs.csv"), help="rows of runs (default: %(default)s)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
