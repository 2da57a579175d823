"""Tiny ImageNet: 200 classes, 64x64 pixels, JPEG files in the folders of its official archive.

Source: Stanford CS231N, Tiny ImageNet Visual Recognition Challenge, 2015.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from recipes.data.dataset import ImageDataset, Normalization, Split, subset_indices
from recipes.errors import RecipeError

_SIZE = 64
_FOLDER = "tiny-imagenet-200"
_ARCHIVE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


def load_tiny_imagenet(data_dir: Path, train_size: int | None = None, test_size: int | None = None) -> ImageDataset:
    """Loads `train/<wnid>/images/*.JPEG` and, as the test set, `val/images` with `val/val_annotations.txt`.

    Args:
        data_dir: the folder that holds `tiny-imagenet-200`, or that folder itself.
        train_size: number of training images; None for all 100,000. Only these are decoded.
        test_size: number of test images; None for all 10,000.

    Returns:
        Images of 3 x 64 x 64; classes are the folders of `train` in alphabetical order.

    Raises:
        RecipeError: Pillow is missing, files are missing or damaged, or a size is larger than the set.
    """
    root = _find(data_dir)
    wnids = sorted(folder.name for folder in (root / "train").iterdir() if folder.is_dir())
    classes = {wnid: index for index, wnid in enumerate(wnids)}
    train = [(path, classes[wnid]) for wnid in wnids for path in sorted((root / "train" / wnid / "images").iterdir())]
    return ImageDataset(
        name="tiny-imagenet",
        train=_decode(train, train_size, "--train-size"),
        test=_decode(_validation(root / "val", classes), test_size, "--test-size"),
        classes=len(wnids),
        normalization=Normalization(mean=(0.4802, 0.4481, 0.3975), std=(0.2770, 0.2691, 0.2821)),
        augment=True,
    )


def _find(data_dir: Path) -> Path:
    for root in (data_dir / _FOLDER, data_dir):
        if (root / "train").is_dir() and (root / "val" / "val_annotations.txt").is_file():
            return root
    raise RecipeError(
        f"Tiny ImageNet was not found: expected {data_dir / _FOLDER} with train/<wnid>/images and "
        f"val/val_annotations.txt. Name its folder with --data-dir, or download {_ARCHIVE} and unzip it there"
    )


def _validation(folder: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    annotations = folder / "val_annotations.txt"
    items = []
    for number, line in enumerate(annotations.read_text().splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) < 2 or fields[1] not in classes:
            raise RecipeError(
                f"{annotations} is damaged: line {number} is {line!r}, expected a file name, a tab and one of the "
                f"{len(classes)} class folders of train; unzip {_ARCHIVE} again"
            )
        items.append((folder / "images" / fields[0], classes[fields[1]]))
    return items


def _decode(items: list[tuple[Path, int]], size: int | None, option: str) -> Split:
    chosen = [items[index] for index in subset_indices(len(items), size, option).tolist()]
    with ThreadPoolExecutor() as pool:
        images = np.stack(list(pool.map(_read_jpeg, [path for path, _ in chosen])))
    labels = torch.tensor([label for _, label in chosen])
    return Split(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), labels)


def _read_jpeg(path: Path) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError as error:
        raise RecipeError("Tiny ImageNet needs Pillow: pip install 'brevact[recipes]'") from error
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise RecipeError(f"{path} is missing or damaged ({error}); unzip {_ARCHIVE} again") from error
    if pixels.shape != (_SIZE, _SIZE, 3):
        raise RecipeError(f"{path} has {pixels.shape[1]}x{pixels.shape[0]} pixels, expected {_SIZE}x{_SIZE}")
    return pixels
