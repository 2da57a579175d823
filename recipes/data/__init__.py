"""Data sets of the recipes, as tensors of pixels."""

from collections.abc import Callable
from pathlib import Path

from recipes.data.batches import Batches
from recipes.data.cifar import load_cifar10, load_cifar100
from recipes.data.dataset import ImageDataset, Normalization, Split
from recipes.data.digits import load_digits
from recipes.data.tiny_imagenet import load_tiny_imagenet

LOADERS: dict[str, Callable[[Path, int | None, int | None], ImageDataset]] = {
    "digits": load_digits,
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
    "tiny-imagenet": load_tiny_imagenet,
}

__all__ = ["LOADERS", "Batches", "ImageDataset", "Normalization", "Split"]
