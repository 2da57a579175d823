"""Images for classification: scikit-learn's digits, CIFAR by torchvision, and Tiny ImageNet.

Sources: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 (its test part); A. Krizhevsky,
Learning Multiple Layers of Features from Tiny Images, 2009; Stanford CS231N, Tiny ImageNet Visual Recognition
Challenge, 2015.
"""

import csv
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.recipe import RecipeError, library

_SUBSET_SEED = 20_240_229
_CIFAR = {
    10: ("cifar-10-python.tar.gz", ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))),
    100: ("cifar-100-python.tar.gz", ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))),
}
_TINY_IMAGENET = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


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
        train: the images to train on.
        test: the images to measure accuracy on.
        classes: number of classes; labels are 0 .. classes - 1.
        normalization: means and standard deviations of the channels of the training images, pixels scaled to 0..1.
        augment: whether random crops and flips keep the label.
    """

    train: Split
    test: Split
    classes: int
    normalization: tuple[tuple[float, ...], tuple[float, ...]]
    augment: bool

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]

    @property
    def image_size(self) -> int:
        return self.train.images.shape[-1]


def load_digits(data_dir: Path, train_size: int | None = None, test_size: int | None = None) -> ImageDataset:
    """Loads 1797 digits, enlarged from 8x8 to 32x32 pixels by repeating each; a fixed fifth is the test set."""
    bunch = library("sklearn.datasets").load_digits()
    pixels = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8)  # N x 8 x 8, 0..16 before
    images = pixels.repeat_interleave(4, 1).repeat_interleave(4, 2).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    order = _chosen(len(labels), len(labels), "digits")  # shuffled: the file is sorted by writer
    test, train = order.split([360, len(order) - 360])
    splits = (
        _part(images[train], labels[train], train_size, "--train-size"),
        _part(images[test], labels[test], test_size, "--test-size"),
    )
    return ImageDataset(*splits, classes=10, normalization=((0.3048,), (0.3754,)), augment=False)


def load_cifar(
    classes: int, data_dir: Path, train_size: int | None = None, test_size: int | None = None
) -> ImageDataset:
    """Loads CIFAR-10 or CIFAR-100 (fine labels) from the Python version of its archive, unpacked in `data_dir`."""
    datasets, splits, (archive, normalization) = library("torchvision.datasets"), [], _CIFAR[classes]
    for is_train, size, name in ((True, train_size, "--train-size"), (False, test_size, "--test-size")):
        try:
            found = getattr(datasets, f"CIFAR{classes}")(data_dir, train=is_train)
        except RuntimeError as error:
            raise RecipeError(
                f"CIFAR-{classes} was not found in {data_dir}, or is damaged. Name its folder with --data-dir, or "
                f"download {archive} from https://www.cs.toronto.edu/~kriz/cifar.html and unpack it there"
            ) from error
        images = torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
        splits.append(_part(images, torch.tensor(found.targets), size, name))
    return ImageDataset(*splits, classes, normalization, augment=True)


def load_tiny_imagenet(data_dir: Path, train_size: int | None = None, test_size: int | None = None) -> ImageDataset:
    """Loads `train/<wnid>/images/*.JPEG` and, as the test set, `val/images` with `val/val_annotations.txt`."""
    folder = data_dir / "tiny-imagenet-200"
    root = next((root for root in (folder, data_dir) if (root / "val/val_annotations.txt").is_file()), folder)
    train = sorted((root / "train").glob("*/images/*.JPEG"))
    if not train:
        raise RecipeError(
            f"Tiny ImageNet was not found: expected {folder} with train/<wnid>/images and val/val_annotations.txt. "
            f"Name its folder with --data-dir, or download {_TINY_IMAGENET} and unzip it there"
        )
    classes = {name: index for index, name in enumerate(sorted({path.parts[-3] for path in train}))}
    with (root / "val/val_annotations.txt").open(encoding="utf-8") as file:
        test = [(root / "val/images" / name, classes[wnid]) for name, wnid, *_ in csv.reader(file, delimiter="\t")]
    splits = (
        _decode([(path, classes[path.parts[-3]]) for path in train], train_size, "--train-size"),
        _decode(test, test_size, "--test-size"),
    )
    normalization = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    return ImageDataset(*splits, len(classes), normalization, augment=True)


#: By name: from the data's folder and the numbers of images to train and to test on (None: all).
LOADERS: dict[str, Callable[[Path, int | None, int | None], ImageDataset]] = {
    "digits": load_digits,
    "cifar10": partial(load_cifar, 10),
    "cifar100": partial(load_cifar, 100),
    "tiny-imagenet": load_tiny_imagenet,
}


def _chosen(available: int, size: int | None, name: str) -> Tensor:
    """Indices of `size` of all images: the same ones every time, drawn from all; a smaller size gives a prefix."""
    if size is None:
        return torch.arange(available)
    if not 1 <= size <= available:
        raise RecipeError(f"{name} {size} is not possible: the data set has {available} images; use 1 to {available}")
    return torch.randperm(available, generator=torch.Generator().manual_seed(_SUBSET_SEED))[:size]


def _part(images: Tensor, labels: Tensor, size: int | None, name: str) -> Split:
    chosen = _chosen(len(labels), size, name)
    return Split(images, labels) if size is None else Split(images[chosen], labels[chosen])


def _decode(items: list[tuple[Path, int]], size: int | None, name: str) -> Split:
    chosen = [items[index] for index in _chosen(len(items), size, name).tolist()]
    with ThreadPoolExecutor() as pool:
        images = np.stack(list(pool.map(_read_jpeg, [path for path, _ in chosen])))
    return Split(
        torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.tensor([label for _, label in chosen])
    )


def _read_jpeg(path: Path) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise RecipeError(f"{path} is missing or damaged ({error}); unzip {_TINY_IMAGENET} again") from error
