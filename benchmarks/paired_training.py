"""Whole training runs under backward policies against full precision, in pairs with the same weights and batches.

    python -m benchmarks.paired_training --data data --policies StochBackward2bit --csv paired.csv

The models of `benchmarks.trained_models` learn for a few epochs, once at full precision and once with each policy. Runs
of a seed start from the same weights and see the same batches; nothing is random but quantizers. The difference in
the mean training loss of the last epoch is a sharper measure than accuracy, which is known to a standard error of 1.6
points on 1,000 images. Each run has a process of its own, and is a row of the CSV as soon as it ends: runs that
are in it already are not repeated.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.records import append_rows, check_columns, print_table, read_rows
from benchmarks.trained_models import TASKS, Learner, data_name, settings_of
from recipes.policy_names import named_policy
from recipes.settings import Settings

Row = Mapping[str, Any]

#: Of each model. With 10,000 images, or the text, these are 624, 624, 987 and 1,248 steps.
EPOCHS = {"EfficientNetV2 nano": 4, "ResNet-20": 4, "GPT nano": 3, "ViT nano": 4}
FULL_PRECISION = "None"
COLUMNS = (
    *("model", "data", "policy", "seed", "epochs", "train_size"),
    *("train_loss", "test_loss", "test_accuracy", "test_targets", "seconds"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=TASKS, default=["EfficientNetV2 nano", "GPT nano"], metavar="MODEL"
    )
    parser.add_argument("--policies", nargs="+", default=["StochBackward2bit"], help="as in benchmarks.noise")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data", type=Path, help="folder that holds CIFAR-10; without it, scikit-learn's digits")
    parser.add_argument("--epochs", type=int, help="of all models (default: 3 or 4)")
    parser.add_argument("--train-size", type=int, help="images or characters to train on (default: see the models)")
    parser.add_argument("--csv", required=True, help="append the rows to this file, and skip those that it has")
    options = parser.parse_args(arguments)
    for words in options.policies:
        try:
            named_policy(words)
        except argparse.ArgumentTypeError as error:
            parser.error(f"--policies {error}")
    check_columns(options.csv, COLUMNS)
    rows = []
    for model in options.models:
        settings = settings_of(TASKS[model], options.data, epochs=options.epochs or EPOCHS[model])
        if options.train_size is not None:
            settings = replace(settings, train_size=options.train_size)
        for seed in options.seeds:
            for policy in dict.fromkeys((FULL_PRECISION, *options.policies)):
                rows.append(run(model, policy, replace(settings, seed=seed), options.csv))
    print_table(summary(rows))


def run(model: str, policy: str, settings: Settings, path: str) -> Row:
    """The row of a run: that of the CSV, or that of a new process, which is then added to the CSV.

    Args:
        model: key of `TASKS`.
        policy: words of `named_policy`.
        settings: of the run.
        path: of the CSV.
    """
    facts = {
        "model": model,
        "data": data_name(settings),
        "policy": policy,
        "seed": str(settings.seed),
        "epochs": str(settings.epochs),
        "train_size": str(settings.train_size or "all"),
    }
    for row in read_rows(path):
        if all(row[name] == value for name, value in facts.items()):
            return row
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        found = process.submit(train, model, policy, settings).result()
    append_rows([{**facts, **found}], path)
    return {**facts, **found}


def train(model: str, policy: str, settings: Settings) -> dict[str, Any]:
    """Train a model once.

    Args:
        model: key of `TASKS`.
        policy: words of `named_policy`; its quantizers also go to what the loss stores.
        settings: of the run.

    Returns:
        Mean training loss of the last epoch, loss and accuracy in the test, and seconds of training.
    """
    learner = Learner(TASKS[model], settings)
    named_policy(policy).apply(learner.objective)
    trainer = learner.trainer()
    start = time.perf_counter()
    with tqdm(total=settings.epochs * len(learner.train), desc=f"{model}, {policy}, seed {settings.seed}") as bar:
        for epoch in range(1, settings.epochs + 1):
            scores = trainer.train_epoch(learner.train, epoch, bar.update)
    seconds = time.perf_counter() - start
    test = trainer.evaluate(learner.test)
    return {
        "train_loss": f"{scores.loss:.5f}",
        "test_loss": f"{test.loss:.5f}",
        "test_accuracy": f"{test.accuracy:.5f}",
        "test_targets": sum(targets.numel() for _, targets in learner.test.epoch()),
        "seconds": f"{seconds:.0f}",
    }


def summary(rows: Sequence[Row]) -> list[dict[str, str]]:
    """One line a model and policy: losses less those at full precision of the same seed, and accuracy.

    Args:
        rows: of runs, those at full precision among them.
    """
    lines = []
    for model, policy in dict.fromkeys((row["model"], row["policy"]) for row in rows):
        mine, exact = (
            {row["seed"]: row for row in rows if (row["model"], row["policy"]) == (model, kind)}
            for kind in (policy, FULL_PRECISION)
        )
        line = {"model": model, "policy": "full precision" if policy == FULL_PRECISION else policy}
        for loss in ("train_loss", "test_loss"):
            values = [float(row[loss]) for row in mine.values()]
            line[loss.replace("_", " ")] = f"{statistics.mean(values):.3f}"
            line[f"{loss.split('_')[0]} difference"] = _mean_and_error(
                [value - float(exact[seed][loss]) for seed, value in zip(mine, values, strict=True)]
            )
        shares = [(float(row["test_accuracy"]), int(row["test_targets"])) for row in mine.values()]
        error = math.sqrt(sum(p * (1 - p) / n for p, n in shares)) / len(shares)
        line["test accuracy"] = f"{statistics.mean(p for p, _ in shares):.1%} ± {error:.1%}"
        lines.append(line)
    return lines


def _mean_and_error(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.4f}"
    return f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.4f}" if len(values) > 1 else mean


if __name__ == "__main__":
    main()
