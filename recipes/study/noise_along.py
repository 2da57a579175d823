"""Noise of the gradients along a run, in units of the noise between minibatches: does an early fit stay good?

A run at full precision stops at some epochs. With its weights of then, policies are measured on the same batches each
time, by `brevact.reports.gradient_noise`; others are those that policies are fitted on.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import nn

import brevact
from brevact.reports.gradient_noise import ExactGradients, exact_gradients, gradient_noise
from recipes.fitted_policies import policy_or_fit
from recipes.plots import save
from recipes.study.policies import FITTED_ON, loss_of
from recipes.study.run import Run, Size
from recipes.study.training import Training

NAME = "noise-along-training"
QUESTION = "Does a policy that is fitted early stay good?"
POLICIES = ("StochBackward2bit", "DEFAULT")
FIT = "fit:bytes=DEFAULT"
#: Epochs at which a policy is fitted that is measured at all later ones.
EARLY = (0, 1)
COLUMNS = (
    *("dataset", "train_size", "epochs", "seed", "epoch", "policy", "noise", "noise_error", "bias2", "bias2_error"),
    *("saved_bytes", "plain_bytes", "train_loss"),
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How well noise is measured.

    Attributes:
        unit_batches: batches of the unit.
        batches: the first ones of them, on which policies are measured; the next `FITTED_ON` are fitted on.
        draws: seeds a batch.
    """

    unit_batches: int = 32
    batches: int = 6
    draws: int = 4


def epochs_of(size: Size) -> tuple[int, ...]:
    """The epochs that are measured: 0, 1, 3 and the last one."""
    return tuple(sorted({0, 1, 3, size.epochs} & set(range(size.epochs + 1))))


def measure(
    run: Run, data_dir: str, device: str, effort: Effort, on_step: Callable[[], object] = lambda: None
) -> Iterator[Row]:
    """Trains, and measures policies at the epochs of `epochs_of`.

    Args:
        run: at full precision.
        data_dir: folder that holds the data set.
        device: torch device.
        effort: how well.
        on_step: called after each epoch and each measured policy.

    Yields:
        Rows with the keys `COLUMNS`.

    Raises:
        RecipeError: the data cannot be used.
    """
    training, size = Training(run, data_dir, device), run.size
    later = (training.train_batches.epoch(number) for number in itertools.count(size.epochs + 1))
    batches = list(itertools.islice(itertools.chain.from_iterable(later), effort.unit_batches))
    policies = {words: policy_or_fit(words) for words in POLICIES}
    facts = {"dataset": size.dataset, "train_size": size.train_size or "all", "epochs": size.epochs, "seed": run.seed}
    for epoch in range(size.epochs + 1):
        if epoch:
            training.train_epoch()
            on_step()
        if epoch not in epochs_of(size):
            continue
        model = copy.deepcopy(training.trainer.objective).train()
        now = policy_or_fit(FIT).named(copy.deepcopy(model), batches[effort.batches :][:FITTED_ON], loss_of)
        if epoch in EARLY:
            policies[f"{FIT} at {epoch}"] = now
        exact = exact_gradients(model, batches, loss_of)
        loss = training.losses[-1] if training.losses else ""
        for name, policy in {**policies, f"{FIT} now": now}.items():
            found = _measured(policy.apply(copy.deepcopy(model)), batches[: effort.batches], exact, effort.draws)
            yield facts | {"epoch": epoch, "train_loss": loss, "policy": name} | found
            on_step()


def _measured(model: nn.Module, batches: Sequence[Any], exact: ExactGradients, draws: int) -> Row:
    """Noise, bias and bytes of a model and its loss with backward quantization."""
    noise, bias2 = gradient_noise(model, batches, loss_of, exact, draws)
    report = brevact.memory_report(model, batches[0])
    return {
        "noise": noise.value,
        "noise_error": noise.error,
        "bias2": bias2.value,
        "bias2_error": bias2.error,
        "saved_bytes": report.saved_bytes,
        "plain_bytes": report.plain_bytes,
    }


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draws noise and squared bias over the epochs, each the mean of seeds.

    Args:
        path: of the PNG file.
        rows: of `measure`, or as a CSV has them.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"{QUESTION} {rows[0]['dataset']}, {rows[0]['train_size']} images")
    epochs = sorted({int(row["epoch"]) for row in rows})
    for panel, column, words in zip(figure.subplots(1, 2), ("noise", "bias2"), ("noise", "bias²"), strict=True):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            means, errors = (mean_by_epoch(rows, policy, name) for name in (column, f"{column}_error"))
            places = [epochs.index(epoch) for epoch in means]
            bars = list(errors.values())  # those of one seed: what seeds differ by is not in them
            panel.errorbar(places, list(means.values()), bars, fmt="o-", markersize=4, capsize=2, label=policy)
        panel.set(xlabel="epoch", ylabel=f"{words}, in minibatch noise")
        panel.set_xticks(range(len(epochs)), [str(epoch) for epoch in epochs])
        panel.set_yscale("log" if column == "noise" else "linear")
        panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize=8)
    save(figure, path)


def mean_by_epoch(rows: Sequence[Row], policy: str, column: str) -> dict[int, float]:
    """The mean of a column over seeds, by epoch."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["policy"] == policy:
            found.setdefault(int(row["epoch"]), []).append(float(row[column]))
    return {epoch: sum(values) / len(values) for epoch, values in sorted(found.items())}


def table(rows: Sequence[Row]) -> str:
    """Noise and squared bias of each policy at each epoch, mean over seeds, in Markdown.

    Args:
        rows: of `measure`, or as a CSV has them.
    """
    epochs = sorted({int(row["epoch"]) for row in rows})
    lines = ["| policy | MiB a batch | " + " | ".join(f"epoch {epoch}" for epoch in epochs) + " |"]
    lines.append("| --- " * (2 + len(epochs)) + "|")
    for policy in dict.fromkeys(row["policy"] for row in rows):
        noise, bias2, saved = (mean_by_epoch(rows, policy, column) for column in ("noise", "bias2", "saved_bytes"))
        cells = [f"{noise[epoch]:.3f} (bias² {bias2[epoch]:.3f})" if epoch in noise else "" for epoch in epochs]
        lines.append(f"| `{policy}` | {max(saved.values()) / 2**20:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)
