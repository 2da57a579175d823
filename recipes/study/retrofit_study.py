"""Trained networks whose batch norms go over to few levels, seed by seed: accuracy at once, and after fine-tuning.

Each seed is a run of `recipes.retrofit`: a ResNet-20 that learns at full precision, then every format in turn from the
same weights. Differences to its accuracy at full precision are paired by seed.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes import files, retrofit
from recipes.errors import RecipeError
from recipes.study.analysis import ACCURACY, difference_text, interval
from recipes.study.run import Size

NAME = "retrofit"
QUESTION = "What does a trained network lose when its batch norms go over to few levels, at once and after fine-tuning?"
SOURCE = "B. Graham, arXiv:1702.08231, tables 5 and 6"
#: Those of the source's tables.
FORMATS = ("L4", "L5")
#: How much the network learns at full precision.
SIZE = Size(epochs=6, train_size=5_000)
FINE_TUNE_EPOCHS = 1
COLUMNS = ("dataset", "train_size", "epochs", "seed", *retrofit.COLUMNS)
HEADER = ("batch norms", "which", "seeds", "accuracy at once, %", "difference", "fine-tuned, %", "difference", "MiB")

Row = dict[str, Any]


def measure(size: Size, seed: int, data_dir: str, device: str, formats: Sequence[str] = FORMATS) -> list[Row]:
    """Trains a network and retrofits it.

    Args:
        size: how much it trains at full precision.
        seed: of weights and batches.
        data_dir: folder that holds the data set.
        device: torch device.
        formats: of the norms.

    Returns:
        Rows with the keys `COLUMNS`, full precision first.

    Raises:
        RecipeError: something that the user can put right.
    """
    given = {
        "dataset": size.dataset,
        "data-dir": data_dir,
        "epochs": size.epochs,
        "seed": seed,
        "device": device,
        "batch-size": 64,
        "fine-tune-epochs": FINE_TUNE_EPOCHS,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    words += [] if size.train_size is None else ["--train-size", str(size.train_size)]
    with tempfile.TemporaryDirectory() as folder:
        if retrofit.main([*words, "--formats", *formats, "--out-dir", folder]) != 0:
            raise RecipeError(f"{NAME}, seed {seed}: the run did not end; what it lacked is said above")
        rows = files.read_rows(Path(folder) / "retrofit.csv")
    facts = {"dataset": size.dataset, "train_size": size.train_size or "all", "epochs": size.epochs, "seed": seed}
    return [facts | row for row in rows]


def table(rows: Sequence[Row]) -> str:
    """Accuracies, and differences to full precision with their 95 % intervals, in Markdown.

    Args:
        rows: of `measure`, or as a CSV has them.
    """
    exact = {int(row["seed"]): float(row["accuracy"]) for row in rows if not row["scope"]}
    lines = [f"| {' | '.join(HEADER)} |", "| --- " * len(HEADER) + "|"]
    for norms, scope in dict.fromkeys((row["norms"], row["scope"]) for row in rows):
        mine = [row for row in rows if (row["norms"], row["scope"]) == (norms, scope)]
        cells = [norms, scope, str(len(mine))]
        for column in ("accuracy", "fine_tuned_accuracy"):
            cells += _cells(mine, column, exact) if mine[0][column] != "" else ["", ""]
        lines.append(f"| {' | '.join([*cells, format(float(mine[0]['saved_mib']), '.2f')])} |")
    return "\n".join(lines)


def _cells(rows: Sequence[Row], column: str, exact: dict[int, float]) -> list[str]:
    """The mean of a column in percent, and its difference from full precision."""
    mean = 100 * sum(float(row[column]) for row in rows) / len(rows)
    if not rows[0]["scope"]:
        return [f"{mean:.2f}", ""]
    found = interval([100 * (float(row[column]) - exact[int(row["seed"])]) for row in rows])
    return [f"{mean:.2f}", difference_text(found, ACCURACY)]
