"""Studies as text: what there is to run, and what was found."""

import math
from collections.abc import Iterable, Mapping, Sequence

from recipes.runs import MIB
from recipes.study.analysis import MEASURES, Comparison, comparisons, difference_text, mean_of
from recipes.study.cases import Study
from recipes.study.run import FULL_PRECISION, Key, Run, Size
from recipes.study.training import Row

#: Seconds that an image of an epoch takes a CPU core in the nano size: is it at full precision?
SECONDS_AN_IMAGE = {True: 1.1e-3, False: 1.5e-3}
#: How many times more forward quantizers, and larger models, take.
FACTORS = {"qat": 1.3, "model=s": 10.0, "resnet50": 28.0}
HEADER = (
    *("", "compared with", "runs", "training loss", "difference", "test accuracy, %", "difference", "spikes"),
    "stored, MiB",
)
_COMPARED, _SPIKES = HEADER.index("compared with"), HEADER.index("spikes")
_NAMED = 3
"""Missing runs that a sentence names."""


def catalogue(studies: Iterable[Study], rows: Mapping[Key, Row]) -> str:
    """What each study asks, its source, and what is left to run.

    Args:
        studies: to be listed, in the order in which they run: what studies share counts for the first one.
        rows: of finished runs.
    """
    lines = []
    counted: set[Run] = set()
    for study in studies:
        runs = set(study.runs(study.size, range(study.seeds)))
        missing = {run for run in runs if run.key not in rows}
        seconds = sum(expected_seconds(run) for run in missing - counted)
        left = f"{len(missing - counted)} to run, {readable(seconds)} of a CPU core" if missing else "complete"
        shared = f", {len(missing & counted)} of studies above" if missing & counted else ""
        counted |= runs
        lines += [study.name, f"    {study.question}", f"    {study.source}. {len(runs)} runs: {left}{shared}."]
    return "\n".join(lines)


def expected_seconds(run: Run) -> float:
    """The time that a run takes one CPU core, roughly."""
    images = run.size.epochs * (50_000 if run.size.train_size is None else run.size.train_size)
    factor = math.prod(factor for words, factor in FACTORS.items() if words in run.key[1] + run.key[4])
    return images * factor * SECONDS_AN_IMAGE[run.policy == FULL_PRECISION]


def readable(seconds: float) -> str:
    """A time in hours or minutes."""
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{max(1, round(seconds / 60))} min"


def summary(study: Study, rows: Mapping[Key, Row], size: Size, seeds: Sequence[int]) -> str:
    """What the runs of a study say, as a table in Markdown, and what is missing.

    Args:
        study: to be told of.
        rows: of finished runs.
        size: of the runs.
        seeds: of the runs.
    """
    found = comparisons(study, rows, size, seeds)
    cells, words = _without_what_all_share([HEADER, *map(_cells, found)])
    lines = [f"| {' | '.join(row)} |" for row in (cells[0], ["---"] * len(cells[0]), *cells[1:])]
    if words:
        lines += ["", words]
    if study.note:
        lines += ["", study.note]
    if missing := missing_words(study, rows, size, seeds):
        lines += ["", missing]
    return "\n".join(lines)


def _without_what_all_share(cells: Sequence[Sequence[str]]) -> tuple[list[list[str]], str]:
    """Drops the columns in which all rows say the same of what they are compared with, and of spikes.

    Args:
        cells: the header, and rows.

    Returns:
        The rest, and the sentence that stands for what was dropped.
    """
    dropped, words = [], []
    others = {row[_COMPARED] for row in cells[1:]} - {""}
    if len(others) == 1:
        dropped.append(_COMPARED)
        words.append(f"Differences are from {others.pop()}.")
    if {row[_SPIKES] for row in cells[1:]} == {"0"}:
        dropped.append(_SPIKES)
        words.append("No run has a spike.")
    kept = [index for index in range(len(cells[0])) if index not in dropped]
    return [[row[index] for index in kept] for row in cells], " ".join(words)


def missing_words(study: Study, rows: Mapping[Key, Row], size: Size, seeds: Sequence[int]) -> str:
    """Which runs of a study have no row, in a sentence; empty where all have one."""
    runs = list(study.runs(size, seeds))
    missing = [run.words for run in runs if run.key not in rows]
    if not missing:
        return ""
    names = "; ".join(missing[:_NAMED]) + ("; ..." if len(missing) > _NAMED else "")
    return f"{len(missing)} of {len(runs)} runs are missing: {names}."


def left_to_run(study: Study, rows: Mapping[Key, Row], size: Size, seeds: Sequence[int]) -> str:
    """How to run what is missing of a study, and what that takes; empty where nothing is missing."""
    runs = list(study.runs(size, seeds))
    missing = [run for run in runs if run.key not in rows]
    if not missing:
        return ""
    has = f"{len(runs) - len(missing)} of {len(runs)} runs are there" if len(missing) < len(runs) else "Not run yet"
    cost = f"about {readable(sum(map(expected_seconds, missing)))} of a CPU core"
    return f"{has}: `python -m recipes.study {study.name} --data-dir data` runs the rest ({cost})."


def _cells(found: Comparison) -> tuple[str, ...]:
    against = found.against.label if found.against else ""
    if not found.rows:
        return (found.case.label, against, "0", "not run", *[""] * 5)
    figures: list[str] = []
    for each in MEASURES:
        figures.append(f"{each.factor * mean_of(found.rows, each.column):.{each.decimals}f}")
        figures.append(difference_text(found.differences.get(each.column), each))
    spikes = str(sum(int(row["spikes"]) for row in found.rows.values()))
    row = next(iter(found.rows.values()))
    less = f"{float(row['saved_bytes']) / MIB:.2f} ({float(row['plain_bytes']) / float(row['saved_bytes']):.1f}x less)"
    return (found.case.label, against, str(len(found.rows)), *figures, spikes, less)
