"""Differences between paired runs, with intervals.

The interval of a mean difference d of n pairs is d ± t s / sqrt(n): s is their standard deviation, t the 97.5 %
quantile of Student's distribution with n - 1 degrees of freedom. It is that of one comparison: among twenty, one
interval is expected to miss.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import t as student

from recipes.study.cases import Case, Study
from recipes.study.run import Key, Size
from recipes.study.training import Row

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Measure:
    """What runs are compared by.

    Attributes:
        column: of the rows.
        words: its name in tables.
        factor: from the column to what is shown.
        decimals: that are shown.
        unit: behind numbers.
        more_is_better: whether a larger value is better.
    """

    column: str
    words: str
    factor: float
    decimals: int
    unit: str
    more_is_better: bool


TRAIN_LOSS = Measure("train_loss", "training loss", 1.0, 3, "", more_is_better=False)
ACCURACY = Measure("test_accuracy", "test accuracy", 100.0, 2, " points", more_is_better=True)
MEASURES = (TRAIN_LOSS, ACCURACY)


@dataclass(frozen=True)
class Interval:
    """A mean difference over pairs.

    Attributes:
        mean: of the differences.
        half_width: of its interval; nan for fewer than two pairs, and where a run did not converge.
        pairs: their number.
    """

    mean: float
    half_width: float
    pairs: int


@dataclass(frozen=True)
class Comparison:
    """A case against another one.

    Attributes:
        case: what is compared.
        against: what it is compared with; None for the case that others are compared with.
        rows: of the case, by seed.
        differences: intervals, by the column of the measure; empty without a pair.
    """

    case: Case
    against: Case | None
    rows: Mapping[int, Row]
    differences: Mapping[str, Interval]


def interval(differences: Sequence[float]) -> Interval:
    """The mean of paired differences and its interval.

    >>> interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, half_width=2.484..., pairs=3)

    Args:
        differences: at least one.
    """
    count = len(differences)
    mean = statistics.fmean(differences)
    if count < 2 or not math.isfinite(mean):
        return Interval(mean, math.nan, count)
    quantile = float(student.ppf((1 + CONFIDENCE) / 2, count - 1))
    return Interval(mean, quantile * statistics.stdev(differences) / math.sqrt(count), count)


def difference_text(found: Interval | None, measure: Measure) -> str:
    """A mean difference with the ends of its interval in brackets, or why there is none.

    >>> difference_text(Interval(-1.5, 0.5, 3), ACCURACY)
    '-1.50 [-2.00, -1.00]'
    >>> difference_text(Interval(0.25, math.nan, 1), TRAIN_LOSS)
    '+0.250 (one pair)'

    Args:
        found: None without a pair of runs.
        measure: that it is of, in the units that are shown.
    """
    if found is None:
        return ""
    if not math.isfinite(found.mean):
        return "did not converge"
    mean = f"{found.mean:+.{measure.decimals}f}"
    if found.pairs < 2:
        return f"{mean} (one pair)"
    low, high = (f"{found.mean + half:.{measure.decimals}f}" for half in (-found.half_width, found.half_width))
    return f"{mean} [{low}, {high}]"


def comparisons(study: Study, rows: Mapping[Key, Row], size: Size, seeds: Sequence[int]) -> list[Comparison]:
    """Every case against the first one, then the contrasts of the study.

    Args:
        study: whose cases are compared.
        rows: of finished runs.
        size: of the runs.
        seeds: of the runs; those without a row are left out.
    """
    first, *others = study.cases
    pairs = [(case, first) for case in others]
    pairs += [(study.case(one), study.case(other)) for one, other in study.contrasts]
    found = [Comparison(first, None, rows_of(first, rows, size, seeds), {})]
    for case, against in pairs:
        mine, theirs = (rows_of(each, rows, size, seeds) for each in (case, against))
        shared = sorted(mine.keys() & theirs.keys())
        differences = {
            each.column: interval(
                [each.factor * (float(mine[seed][each.column]) - float(theirs[seed][each.column])) for seed in shared]
            )
            for each in MEASURES
            if shared
        }
        found.append(Comparison(case, against, mine, differences))
    return found


def rows_of(case: Case, rows: Mapping[Key, Row], size: Size, seeds: Sequence[int]) -> dict[int, Row]:
    """The rows of a case, by seed."""
    runs = {seed: case.run(size, seed) for seed in seeds}
    return {seed: rows[run.key] for seed, run in runs.items() if run.key in rows}


def mean_of(rows: Mapping[int, Row], column: str) -> float:
    """The mean of a column; nan without a row."""
    return statistics.fmean(float(row[column]) for row in rows.values()) if rows else math.nan
