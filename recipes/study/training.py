"""One run, from new weights to its row."""

import datetime
import itertools
import math
import platform
import time
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import torch

import brevact
from recipes.data import LOADERS, Batches, ImageDataset, Split
from recipes.errors import RecipeError
from recipes.metrics import Scores
from recipes.recipe import BatchSource
from recipes.runs import build_objective
from recipes.study.policies import attach
from recipes.study.run import FULL_PRECISION, KEY, RECIPES, Run
from recipes.training import Trainer

#: Of a run, behind those of `KEY`. Lists of an epoch each have spaces between them.
FIGURES = (
    *("train_loss", "test_loss", "test_accuracy", "test_images", "spikes", "saved_bytes", "plain_bytes"),
    *("train_losses", "accuracies"),
)
COLUMNS = (*KEY, *FIGURES, "seconds", "device", "torch", "brevact", "time")
#: Images that are tested after every epoch; the whole test set is after the last one.
PROBED = 1_000
#: A spike is an epoch after which the accuracy on the probed images is lower than after the epoch before by more.
SPIKE = 0.05

Row = dict[str, str]


def train_run(run: Run, data_dir: str, device: str = "auto") -> Row:
    """Trains once.

    Args:
        run: what to train.
        data_dir: folder that holds the data set.
        device: torch device.

    Returns:
        The row, with the keys `COLUMNS`. Where the loss did not stay finite, later losses are nan.

    Raises:
        RecipeError: the data or the policy cannot be used.
    """
    settings, recipe, data = run.settings(data_dir, device), RECIPES[run.recipe], data_of(run, data_dir)
    target = settings.torch_device()
    start = time.perf_counter()
    torch.manual_seed(run.seed)
    objective = build_objective(recipe, settings, data).to(target)
    train_batches, test_batches = recipe.make_batches(settings, data, target)
    if recipe.prepare is not None:
        recipe.prepare(objective.model, settings, train_batches)
    trainer = Trainer(objective, settings, target, len(train_batches))
    on_step = attach(run.policy, trainer, train_batches, settings.epochs * len(train_batches))
    report = brevact.memory_report(objective, next(train_batches.epoch()))
    probe = Batches(first_images(data.test, PROBED), data.normalization, settings.batch_size, device=target)
    losses: list[float] = []
    accuracies: list[float] = []
    for epoch in range(1, settings.epochs + 1):
        losses.append(train_epoch(trainer, train_batches, epoch, on_step))
        if math.isnan(losses[-1]):
            break
        accuracies.append(trainer.evaluate(probe).accuracy)
    tested = trainer.evaluate(test_batches)
    return dict(zip(KEY, run.key, strict=True)) | {
        **_figures(losses, accuracies, tested),
        "test_images": str(len(data.test)),
        "saved_bytes": str(report.plain_bytes if run.policy == FULL_PRECISION else report.saved_bytes),
        "plain_bytes": str(report.plain_bytes),
        "seconds": f"{time.perf_counter() - start:.0f}",
        "device": torch.cuda.get_device_name(target) if target.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "brevact": version("brevact"),
        "time": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }


def data_of(run: Run, data_dir: str) -> ImageDataset:
    """The images of a run; a process that trains many runs loads them once.

    Args:
        run: to be trained.
        data_dir: folder that holds the data set.

    Raises:
        RecipeError: the images cannot be read.
    """
    settings = run.settings(data_dir)
    return _load(settings.dataset, settings.data_dir, settings.train_size, settings.test_size)


@lru_cache(maxsize=1)
def _load(dataset: str, data_dir: str, train_size: int | None, test_size: int | None) -> ImageDataset:
    return LOADERS[dataset](Path(data_dir), train_size, test_size)


def first_images(split: Split, count: int) -> Split:
    """The first images of a split."""
    return Split(split.images[:count], split.labels[:count])


def train_epoch(trainer: Trainer, batches: BatchSource, epoch: int, on_step: Callable[[], object]) -> float:
    """The mean loss of an epoch; nan where the loss does not stay finite."""
    try:
        return trainer.train_epoch(batches, epoch, on_step).loss
    except RecipeError:  # what `Trainer.train_epoch` raises for a loss that is not finite
        return math.nan


def count_spikes(accuracies: list[float]) -> int:
    """The number of epochs after which accuracy is lower than after the epoch before by more than `SPIKE`.

    >>> count_spikes([0.5, 0.6, 0.52, 0.58, 0.55])
    1
    """
    return sum(before - after > SPIKE for before, after in itertools.pairwise(accuracies))


def _figures(losses: list[float], accuracies: list[float], tested: Scores) -> Row:
    return {
        "train_loss": f"{losses[-1]:.5f}",
        "test_loss": f"{tested.loss:.5f}",
        "test_accuracy": f"{tested.accuracy:.5f}",
        "spikes": str(count_spikes(accuracies)),
        "train_losses": " ".join(f"{loss:.4f}" for loss in losses),
        "accuracies": " ".join(f"{accuracy:.3f}" for accuracy in accuracies),
    }
