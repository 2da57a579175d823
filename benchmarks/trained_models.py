"""Small models of the recipes that learn for a minute: what gradients and whole runs are measured on.

Each learns without dropout and label smoothing, with AdamW under a one-cycle schedule; images are CIFAR-10's, or
scikit-learn's digits, mirrored at random. All of it follows from the seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from recipes import char_gpt, efficientnetv2, images, vit
from recipes.data import Batches, ImageDataset
from recipes.files import write_atomically
from recipes.models import Layers, ResNet20
from recipes.recipe import BatchSource, Recipe
from recipes.settings import Settings
from recipes.training import Objective, Trainer

CPU = torch.device("cpu")
#: Settings that change nothing of what is learned at full precision.
_WITHOUT_EFFECT = ("data_dir", "adapt_every", "budget", "noise")


def _build_resnet(settings: Settings, data: ImageDataset, layers: Layers) -> nn.Module:
    return ResNet20(classes=data.classes, channels_in=data.channels)


def _mirrored_batches(settings: Settings, data: ImageDataset, device: torch.device) -> tuple[Batches, Batches]:
    """Batches for training, whose images are mirrored but not cropped, and for testing."""
    train = Batches(
        data.train,
        data.normalization,
        settings.batch_size,
        device=device,
        train=True,
        augment=data.augment,
        padding=0,
        seed=settings.seed,
    )
    return train, images.make_batches(settings, data, device)[1]


@dataclass(frozen=True)
class Task:
    """A model, its data and how it learns.

    Args:
        recipe: that builds them.
        settings: those that differ from the recipe's.
    """

    recipe: Recipe
    settings: dict[str, Any]


_CONVOLUTIONAL = replace(efficientnetv2.RECIPE, make_batches=_mirrored_batches)
_LEARNING: dict[str, Any] = {"schedule": "onecycle", "dropout": 0.0, "label_smoothing": 0.0}
_IMAGES = {**_LEARNING, "train_size": 10_000, "test_size": 1_000, "batch_size": 64}

#: By name. An epoch of 10,000 images, or of the text, has 156, 156, 329 and 312 steps.
TASKS = {
    "EfficientNetV2 nano": Task(_CONVOLUTIONAL, {**_IMAGES, "epochs": 3}),
    "ResNet-20": Task(replace(_CONVOLUTIONAL, build_model=_build_resnet), {**_IMAGES, "epochs": 2}),
    "GPT nano": Task(char_gpt.RECIPE, {**_LEARNING, "epochs": 1, "warmup_epochs": 0.25}),
    "ViT nano": Task(
        replace(vit.RECIPE, make_batches=_mirrored_batches),
        {**_IMAGES, "batch_size": 32, "patch_size": 4, "epochs": 1, "warmup_epochs": 0.25},
    ),
}


def settings_of(task: Task, data_dir: Path | None, **changes: Any) -> Settings:
    """The settings of a task.

    Args:
        task: a value of `TASKS`.
        data_dir: folder that holds CIFAR-10; None for scikit-learn's digits, all of them.
        **changes: that go before those of the task.
    """
    found = {**task.settings, **changes}
    if issubclass(task.recipe.settings, images.ImageSettings):
        if data_dir is None:
            found |= {"dataset": "digits", "train_size": None, "test_size": None}
        else:
            found |= {"dataset": "cifar10", "data_dir": str(data_dir)}
    return task.recipe.settings(**found)


def data_name(settings: Settings) -> str:
    """What a task learns, for tables."""
    return getattr(settings, "dataset", "text")


class Learner:
    """A model with its data, before its first step.

    Args:
        task: a value of `TASKS`.
        settings: of the run, by `settings_of`.
    """

    def __init__(self, task: Task, settings: Settings) -> None:
        data = task.recipe.load_data(settings)
        self.settings = settings
        self.train: BatchSource
        self.test: BatchSource
        self.train, self.test = task.recipe.make_batches(settings, data, CPU)
        torch.manual_seed(settings.seed)
        self.objective = Objective(task.recipe.build_model(settings, data, task.recipe.layers), 0.0)

    def trainer(self) -> Trainer:
        """What takes the steps."""
        return Trainer(self.objective, self.settings, CPU, len(self.train))

    def learn(self, label: str, cache: Path | None) -> None:
        """Take all steps, or the weights that an earlier run with the same settings has written.

        Args:
            label: of the progress bar.
            cache: file with weights; None for none.
        """
        facts = {name: value for name, value in asdict(self.settings).items() if name not in _WITHOUT_EFFECT}
        key = repr((facts, torch.__version__))
        if cache is not None and cache.is_file():
            found = torch.load(cache, weights_only=True)
            if found["key"] == key:
                self.objective.load_state_dict(found["state"])
                return
        trainer = self.trainer()
        with tqdm(total=self.settings.epochs * len(self.train), desc=label, unit="step") as bar:
            for epoch in range(1, self.settings.epochs + 1):
                trainer.train_epoch(self.train, epoch, bar.update)
        if cache is not None:
            cache.parent.mkdir(parents=True, exist_ok=True)
            state = {"key": key, "state": self.objective.state_dict()}
            write_atomically(cache, lambda file: torch.save(state, file))

    def later_batches(self) -> Iterator[dict[str, Tensor]]:
        """Yields training batches of the epochs that follow, without end, as arguments of `LossOf`."""
        for epoch in itertools.count(self.settings.epochs + 1):
            for inputs, targets in self.train.epoch(epoch):
                yield {"inputs": inputs, "targets": targets}


def learned(
    name: str, data_dir: Path | None, cache: Path | None, *, is_quick: bool = False
) -> tuple[LossOf, Iterator[dict[str, Tensor]], Settings]:
    """A model that has learnt, with its loss, the batches that would follow, and its settings.

    Args:
        name: key of `TASKS`.
        data_dir: folder that holds CIFAR-10; None for scikit-learn's digits.
        cache: folder with weights of earlier runs; None for none.
        is_quick: whether it learns on little data for two epochs.
    """
    task = TASKS[name]
    settings = settings_of(task, data_dir)
    if is_quick:
        size = 30_000 if hasattr(settings, "text_file") else min(settings.train_size or 1_280, 1_280)
        settings = replace(settings, train_size=size, epochs=2)
    learner = Learner(task, settings)
    file = None if cache is None else cache / f"{name}.pt".replace(" ", "-").lower()
    learner.learn(f"{name} learns", file)
    return LossOf(learner.objective).train(), learner.later_batches(), settings


class LossOf(nn.Module):
    """A model and its loss, without the outputs.

    Args:
        objective: of a `Learner`.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.objective(inputs, targets)[1]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What a `LossOf` returns."""
    return model(**batch)
