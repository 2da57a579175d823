"""One run, from new weights to its row."""

import datetime
import itertools
import math
import platform
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import brevact
from recipes.data import LOADERS, Batches, ImageDataset, Split
from recipes.errors import RecipeError
from recipes.runs import build_objective
from recipes.study.policies import attach
from recipes.study.run import FULL_PRECISION, KEY, RECIPES, Run
from recipes.training import Trainer

#: Of a run, behind those of `KEY`. Lists of an epoch each have spaces between them.
NUMBERS = ("train_loss", "test_loss", "test_accuracy", "test_images", "spikes", "saved_bytes", "plain_bytes")
LISTS = ("train_losses", "accuracies")
FIGURES = (*NUMBERS, *LISTS)
COLUMNS = (*KEY, *FIGURES, "seconds", "device", "torch", "brevact", "time")
#: Images that are tested after every epoch; the whole test set is after the last one.
PROBED = 1_000
#: A spike is an epoch after which the accuracy on the probed images is lower than after the epoch before by more.
SPIKE = 0.05
#: What a run has found so far.
_FOUND = ("losses", "accuracies", "seconds")

Row = dict[str, str]


class Training:
    """A run that has begun: its model, and what it has found so far.

    Args:
        run: what to train.
        data_dir: folder that holds the data set.
        device: torch device.

    Raises:
        RecipeError: the data or the policy cannot be used.
    """

    def __init__(self, run: Run, data_dir: str, device: str = "auto") -> None:
        start = time.perf_counter()
        self.run, self.settings, self.data = run, run.settings(data_dir, device), data_of(run, data_dir)
        recipe, self.device = RECIPES[run.recipe], self.settings.torch_device()
        torch.manual_seed(run.seed)
        objective = build_objective(recipe, self.settings, self.data).to(self.device)
        self.train_batches, self.test_batches = recipe.make_batches(self.settings, self.data, self.device)
        if recipe.prepare is not None:
            recipe.prepare(objective.model, self.settings, self.train_batches)
        self.trainer = Trainer(objective, self.settings, self.device, len(self.train_batches))
        steps = self.settings.epochs * len(self.train_batches)
        self.mix_schedule = attach(run.policy, self.trainer, self.train_batches, steps)
        self.report = brevact.memory_report(objective, next(self.train_batches.epoch()))
        probed = Split(self.data.test.images[:PROBED], self.data.test.labels[:PROBED])
        self._probe = Batches(probed, self.data.normalization, self.settings.batch_size, device=self.device)
        self.losses: list[float] = []
        self.accuracies: list[float] = []
        self.seconds = time.perf_counter() - start

    @property
    def is_done(self) -> bool:
        """Whether no epoch is left, or the loss did not stay finite."""
        return len(self.losses) == self.settings.epochs or any(map(math.isnan, self.losses))

    def train_epoch(self) -> None:
        """Trains for an epoch and measures accuracy on the probed images."""
        start = time.perf_counter()
        on_step = (lambda: None) if self.mix_schedule is None else self.mix_schedule.step
        try:
            self.losses.append(self.trainer.train_epoch(self.train_batches, len(self.losses) + 1, on_step).loss)
            self.accuracies.append(self.trainer.evaluate(self._probe).accuracy)
        except RecipeError:  # what `Trainer.train_epoch` raises where the loss is not finite
            self.losses.append(math.nan)
        self.seconds += time.perf_counter() - start

    def row(self) -> Row:
        """What was found, with the keys `COLUMNS`, after a pass over all test images."""
        start = time.perf_counter()
        tested, report = self.trainer.evaluate(self.test_batches), self.report
        is_plain = self.run.policy == FULL_PRECISION
        return dict(zip(KEY, self.run.key, strict=True)) | {
            "train_loss": f"{self.losses[-1]:.5f}",
            "test_loss": f"{tested.loss:.5f}",
            "test_accuracy": f"{tested.accuracy:.5f}",
            "test_images": str(len(self.data.test)),
            "spikes": str(count_spikes(self.accuracies)),
            "saved_bytes": str(report.plain_bytes if is_plain else report.saved_bytes),
            "plain_bytes": str(report.plain_bytes),
            "train_losses": " ".join(f"{loss:.4f}" for loss in self.losses),
            "accuracies": " ".join(f"{accuracy:.3f}" for accuracy in self.accuracies),
            "seconds": f"{self.seconds + time.perf_counter() - start:.0f}",
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine(),
            "torch": torch.__version__,
            "brevact": brevact.__version__,
            "time": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        }

    def state_dict(self) -> dict[str, object]:
        """All that the next epoch depends on; a policy is made anew from the same weights and batches."""
        schedule = None if self.mix_schedule is None else self.mix_schedule.state_dict()
        figures = {name: getattr(self, name) for name in _FOUND}
        return {"trainer": self.trainer.state_dict(), "schedule": schedule, **figures}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self.trainer.load_state_dict(state["trainer"])
        if self.mix_schedule is not None:
            self.mix_schedule.load_state_dict(state["schedule"])
        for name in _FOUND:
            setattr(self, name, state[name])


def train_run(run: Run, data_dir: str, device: str = "auto") -> Row:
    """Trains once.

    Args:
        run: what to train.
        data_dir: folder that holds the data set.
        device: torch device.

    Returns:
        The row, with the keys `COLUMNS`. Where the loss did not stay finite, it is nan.

    Raises:
        RecipeError: the data or the policy cannot be used.
    """
    training = Training(run, data_dir, device)
    while not training.is_done:
        training.train_epoch()
    return training.row()


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


def count_spikes(accuracies: list[float]) -> int:
    """The number of epochs after which accuracy is lower than after the epoch before by more than `SPIKE`.

    >>> count_spikes([0.5, 0.6, 0.52, 0.58, 0.55])
    1
    """
    return sum(round(before - after, 6) > SPIKE for before, after in itertools.pairwise(accuracies))
