"""The result of every loader, and the choice of a part of a data set."""

from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.errors import RecipeError

_SUBSET_SEED = 20_240_229


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of each channel, of pixels scaled to 0..1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Split:
    """Images (uint8, N x C x H x W) and their labels (int64, N)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageDataset:
    """A data set for classification.

    Attributes:
        name: as the command line knows it.
        train: the images to train on.
        test: the images to measure accuracy on.
        classes: number of classes; labels are 0 .. classes - 1.
        normalization: of the training images, whole set.
        augment: whether random crops and flips keep the label.
    """

    name: str
    train: Split
    test: Split
    classes: int
    normalization: Normalization
    augment: bool

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]

    @property
    def image_size(self) -> int:
        return self.train.images.shape[-1]


def subset_indices(available: int, size: int | None, option: str) -> Tensor:
    """The indices of `size` of `available` images: always the same ones, drawn from the whole set.

    Args:
        available: number of images the data set has.
        size: number of images asked for; None for all, in their own order.
        option: the command line's name for `size`, for the error.

    Returns:
        int64 tensor of indices. A smaller size gives a prefix of a larger one.

    Raises:
        RecipeError: `size` is not in 1 .. `available`.
    """
    if size is None:
        return torch.arange(available)
    if not 1 <= size <= available:
        raise RecipeError(f"{option} {size} is not possible: the data set has {available} images; use 1 to {available}")
    return torch.randperm(available, generator=torch.Generator().manual_seed(_SUBSET_SEED))[:size]


def take(images: Tensor, labels: Tensor, size: int | None, option: str) -> Split:
    """The part of a split that `subset_indices` chooses."""
    if size is None:
        return Split(images, labels)
    indices = subset_indices(len(labels), size, option)
    return Split(images[indices], labels[indices])
