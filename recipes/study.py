"""Whole trainings in pairs: a policy's training loss and accuracy against those of full precision.

    python -m recipes.study --policies None DEFAULT --csv docs/studies.csv --dataset cifar10 --data-dir DIR
    python -m recipes.study --csv docs/studies.csv                                           # the table alone

`fit:bytes=NAME` is the policy that `brevact.fit` finds at the bytes of the policy NAME, and is compared with that, too.

The runs of a pair start from the same weights, see the same batches and differ in their saved tensors. Runs in the CSV
are not trained again. Rows carry commit, device and versions; those without a device, the commit that added them.
Differences are means over pairs, with the ends of their 95 % intervals (Student's t).
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import t as student

from benchmarks.records import environment
from recipes import efficientnetv2, qat
from recipes.files import read_rows
from recipes.policies import variant_of
from recipes.recipe import RecipeError, torch_device
from recipes.training import Run

FULL_PRECISION = "None"
#: Before the name of a policy: `brevact.fit` at its bytes.
FITTED = "fit:bytes="
RECIPES = {"efficientnetv2": efficientnetv2.RECIPE, "qat": qat.RECIPE}
#: Columns that tell kinds of runs apart, and with policy and seed, runs.
KIND = ("dataset", "recipe", "epochs", "train_size", "settings")
COLUMNS = (
    *(*KIND, "policy", "seed", "train_loss", "test_loss", "test_accuracy", "saved_bytes", "plain_bytes"),
    *("seconds", *environment()),
)
#: From this many epochs on 10,000 images, a study counts as long.
_LONG = 10
#: The fewest pairs of an interval.
LEAST_PAIRS = 6
Row = dict[str, str]


@dataclass(frozen=True)
class Interval:
    """A mean difference over pairs, and half the width of its 95 % interval; NaN for fewer than six pairs.

    Intervals of three pairs are narrow by chance too often to be printed.
    """

    mean: float
    half_width: float
    decimals: int

    @classmethod
    def of(cls, differences: Sequence[float], decimals: int) -> Interval:
        """The interval of paired differences.

        >>> str(Interval.of([1.0, 2.0, 3.0], 2)), str(Interval.of([1.0, 2.0, 3.0] * 2, 2))
        ('+2.00', '+2.00 [1.06, 2.94]')
        """
        count = len(differences)
        if count < LEAST_PAIRS:
            return cls(statistics.fmean(differences), math.nan, decimals)
        width = float(student.ppf(0.975, count - 1)) * statistics.stdev(differences) / math.sqrt(count)
        return cls(statistics.fmean(differences), width, decimals)

    def __str__(self) -> str:
        mean = f"{self.mean:+.{self.decimals}f}"
        if math.isnan(self.half_width):
            return mean
        low, high = (f"{self.mean + half:.{self.decimals}f}" for half in (-self.half_width, self.half_width))
        return f"{mean} [{low}, {high}]"


@dataclass(frozen=True)
class Comparison:
    """A policy against full precision, or a fitted one against the policy whose bytes are its budget."""

    kind: tuple[str, ...]
    policy: str
    pairs: int
    less: float
    loss: Interval
    accuracy: Interval
    against: str = FULL_PRECISION

    @property
    def is_long(self) -> bool:
        """Whether its runs train for ten epochs or more with the settings of the recipe."""
        return int(self.kind[2]) >= _LONG and not self.kind[4]

    def names(self) -> tuple[str, str]:
        """The kind and the policy, for a table."""
        _, recipe, epochs, size, settings = self.kind
        words = {"efficientnetv2": "EfficientNetV2 nano", "qat": "the same at W4A4"}.get(recipe, recipe)
        return f"{words}, {epochs} x {size or 'all'} images" + (f", {settings}" if settings else ""), self.label

    @property
    def label(self) -> str:
        return self.policy if self.against == FULL_PRECISION else f"{self.policy} against {self.against}"


def comparisons(rows: Iterable[Mapping[str, str]]) -> list[Comparison]:
    """Every comparison, by kind of run; the longest first."""
    runs: dict[tuple[str, ...], dict[str, dict[str, Mapping[str, str]]]] = {}
    for row in rows:
        kind = tuple(row[name] for name in KIND)
        runs.setdefault(kind, {}).setdefault(row["policy"], {})[row["seed"]] = row
    found = []
    for kind, policies in sorted(runs.items(), key=lambda item: -int(item[0][2]) * int(item[0][3] or 10**6)):
        for policy, against in itertools.product(policies, policies):
            seeds, others = policies[policy], policies[against]
            pairs = [(seeds[seed], others[seed]) for seed in seeds if seed in others]
            is_compared = policy == FITTED + against or (against == FULL_PRECISION != policy)
            if not (is_compared and pairs):
                continue
            loss, accuracy = (
                [factor * (float(mine[column]) - float(other[column])) for mine, other in pairs]
                for column, factor in (("train_loss", 1), ("test_accuracy", 100))
            )
            less = int(pairs[0][0]["plain_bytes"]) / int(pairs[0][0]["saved_bytes"])
            intervals = Interval.of(loss, 3), Interval.of(accuracy, 2)
            found.append(Comparison(kind, policy, len(pairs), less, *intervals, against))
    return found


def policy_of_study(words: str) -> str:
    """Read a policy, or `fit:bytes=` and one; for argparse."""
    variant_of(words.removeprefix(FITTED))
    return words


def variant_in(rows: Iterable[Mapping[str, str]], kind: Sequence[str], policy: str, seed: int) -> str:
    """The variant of a run: for `fit:bytes=NAME` the bytes in the row of NAME; a RecipeError without that row."""
    if not policy.startswith(FITTED):
        return policy
    wanted = [*kind, policy.removeprefix(FITTED), str(seed)]
    for row in rows:
        if [row[name] for name in (*KIND, "policy", "seed")] == wanted:
            return f"{int(row['saved_bytes']) / 2**20}MiB"
    raise RecipeError(f"--policies {policy}: seed {seed} has no row of {wanted[-2]}; name that policy before it")


def train(recipe_name: str, policy: str, variant: str, seed: int, options: argparse.Namespace) -> Row:
    """Train one run and return its row; without dropout, which would draw from the quantizers' generator."""
    start, recipe, device = time.monotonic(), RECIPES[recipe_name], torch_device("auto")
    settings = recipe.settings(
        **{name: getattr(options, name) for name in ("dataset", "data_dir", "epochs", "train_size", "test_size")},
        **{"batch_size": 64, "dropout": 0.0, "label_smoothing": 0.0, "compile": options.compile},
    )
    run = Run(recipe, settings, variant, seed, device)
    for epoch in range(1, settings.epochs + 1):
        loss = run.task.train_epoch(epoch, lambda: None)
    test_loss, accuracy = run.task.scores()
    return {
        **{"dataset": options.dataset, "recipe": recipe_name, "epochs": str(options.epochs)},
        **{"train_size": str(options.train_size or ""), "settings": _settings_of(options)},
        **{"policy": policy, "seed": str(seed)},
        **{"train_loss": f"{loss:.5f}", "test_loss": f"{test_loss:.5f}", "test_accuracy": f"{accuracy:.5f}"},
        **{"saved_bytes": f"{run.kept_mib * 2**20:.0f}", "plain_bytes": f"{run.plain_mib * 2**20:.0f}"},
        **{"seconds": f"{time.monotonic() - start:.0f}"},
        **{name: str(value) for name, value in environment(device.type).items()},
    }


def _settings_of(options: argparse.Namespace) -> str:
    return "compiled" if options.compile else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, train, print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="efficientnetv2")
    parser.add_argument(
        "--policies", nargs="+", type=policy_of_study, default=[], metavar="POLICY", help="None is full precision"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--train-size", type=int)
    parser.add_argument("--test-size", type=int)
    parser.add_argument("--compile", action="store_true", help="compile the model by torch.compile")
    parser.add_argument("--csv", type=Path, required=True, help="rows of finished runs; new ones are appended")
    options = parser.parse_args(arguments)
    try:
        rows = read(options.csv)
        done = {tuple(row[name] for name in (*KIND, "policy", "seed")) for row in rows}
        for seed in options.seeds if options.policies else ():
            for policy in options.policies:
                size, settings = str(options.train_size or ""), _settings_of(options)
                kind = (options.dataset, options.recipe, str(options.epochs), size, settings)
                if (*kind, policy, str(seed)) not in done:
                    variant = variant_in(rows, kind, policy, seed)
                    rows.append(train(options.recipe, policy, variant, seed, options))
                    _append(options.csv, rows[-1])
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for each in comparisons(rows):
        print(*each.names(), f"{each.pairs} pairs", f"{each.less:.1f}x less", each.loss, each.accuracy, sep="  ")
    return 0


def read(path: Path) -> list[Row]:
    """The rows of finished runs; none where there is no such file, a RecipeError where it has other columns."""
    rows = read_rows(path)
    if rows and tuple(rows[0]) != COLUMNS:
        raise RecipeError(f"--csv {path} has the columns {', '.join(rows[0])}; studies have {', '.join(COLUMNS)}")
    return rows


def _append(path: Path, row: Row) -> None:
    """Appends a row, beside those of other processes."""
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    sys.exit(main())
