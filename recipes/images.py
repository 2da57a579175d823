"""Settings, data and batches of the recipes that classify images."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from recipes.data import LOADERS, Batches, ImageDataset
from recipes.options import Limit, setting
from recipes.settings import Settings


@dataclass(frozen=True)
class ImageSettings(Settings):
    LIMITS: ClassVar[tuple[Limit, ...]] = (
        *Settings.LIMITS,
        ("train_size", lambda value: value >= 1, "use a number of images of at least 1"),
        ("test_size", lambda value: value >= 1, "use a number of images of at least 1"),
    )

    dataset: str = setting("digits", "images to train on", choices=tuple(LOADERS))
    data_dir: str = setting("data", "folder that holds the data set; digits needs none")
    train_size: int | None = setting(None, "train on this many images only", type=int)
    test_size: int | None = setting(None, "test on this many images only", type=int)


def load_data(settings: ImageSettings) -> ImageDataset:
    return LOADERS[settings.dataset](Path(settings.data_dir), settings.train_size, settings.test_size)


def make_batches(settings: Settings, data: ImageDataset, device: torch.device) -> tuple[Batches, Batches]:
    train_batches = Batches(
        data.train,
        data.normalization,
        settings.batch_size,
        device=device,
        train=True,
        augment=data.augment,
        seed=settings.seed,
    )
    return train_batches, Batches(data.test, data.normalization, settings.batch_size, device=device)
