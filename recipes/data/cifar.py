"""CIFAR-10 and CIFAR-100 by torchvision, from the Python version of their official archives.

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from pathlib import Path

import torch

from recipes.data.dataset import ImageDataset, Normalization, take
from recipes.errors import RecipeError
from recipes.torchvision_ops import declare_missing_ops

_ARCHIVES = {10: "cifar-10-python.tar.gz", 100: "cifar-100-python.tar.gz"}
_NORMALIZATION = {
    10: Normalization(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),
    100: Normalization(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
}


def load_cifar10(data_dir: Path, train_size: int | None = None, test_size: int | None = None) -> ImageDataset:
    """Loads CIFAR-10 from the folder `cifar-10-batches-py` in `data_dir`, or parts of its 50,000 and 10,000 images."""
    return _load(10, data_dir, train_size, test_size)


def load_cifar100(data_dir: Path, train_size: int | None = None, test_size: int | None = None) -> ImageDataset:
    """Loads CIFAR-100 with its fine labels from `cifar-100-python`, as `load_cifar10` does."""
    return _load(100, data_dir, train_size, test_size)


def _load(classes: int, data_dir: Path, train_size: int | None, test_size: int | None) -> ImageDataset:
    declare_missing_ops()
    try:
        from torchvision import datasets
    except ImportError as error:
        raise RecipeError(f"CIFAR-{classes} needs torchvision: pip install --no-deps torchvision") from error
    splits = []
    for is_train, size, option in ((True, train_size, "--train-size"), (False, test_size, "--test-size")):
        try:
            found = getattr(datasets, f"CIFAR{classes}")(data_dir, train=is_train)
        except RuntimeError as error:
            raise RecipeError(
                f"CIFAR-{classes} was not found in {data_dir}, or is damaged. Name its folder with --data-dir, or "
                f"download {_ARCHIVES[classes]} from https://www.cs.toronto.edu/~kriz/cifar.html and unpack it there"
            ) from error
        images = torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
        splits.append(take(images, torch.tensor(found.targets), size, option))
    return ImageDataset(f"cifar{classes}", *splits, classes, _NORMALIZATION[classes], augment=True)
