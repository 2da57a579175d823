"""Tiny ImageNet: 200 classes, 64x64 pixels, JPEG files in the folders of its official archive.

Source: Stanford CS231N, Tiny ImageNet Visual Recognition Challenge, 2015.
"""

import csv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from recipes.data.dataset import ImageDataset, Normalization, Split, subset_indices
from recipes.errors import RecipeError

_FOLDER = "tiny-imagenet-200"
_ARCHIVE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


def load_tiny_imagenet(data_dir: Path, train_size: int | None = None, test_size: int | None = None) -> ImageDataset:
    """Loads `train/<wnid>/images/*.JPEG` and, as the test set, `val/images` with `val/val_annotations.txt`."""
    root = next((root for root in (data_dir / _FOLDER, data_dir) if (root / "val/val_annotations.txt").is_file()), None)
    train = [] if root is None else sorted((root / "train").glob("*/images/*.JPEG"))
    if root is None or not train:
        raise RecipeError(
            f"Tiny ImageNet was not found: expected {data_dir / _FOLDER} with train/<wnid>/images and "
            f"val/val_annotations.txt. Name its folder with --data-dir, or download {_ARCHIVE} and unzip it there"
        )
    classes = {name: index for index, name in enumerate(sorted({path.parts[-3] for path in train}))}
    with (root / "val/val_annotations.txt").open(encoding="utf-8") as file:
        test = [(root / "val/images" / name, wnid) for name, wnid, *_ in csv.reader(file, delimiter="\t")]
    return ImageDataset(
        name="tiny-imagenet",
        train=_decode([(path, classes[path.parts[-3]]) for path in train], train_size, "--train-size"),
        test=_decode([(path, classes[wnid]) for path, wnid in test], test_size, "--test-size"),
        classes=len(classes),
        normalization=Normalization(mean=(0.4802, 0.4481, 0.3975), std=(0.2770, 0.2691, 0.2821)),
        augment=True,
    )


def _decode(items: list[tuple[Path, int]], size: int | None, option: str) -> Split:
    chosen = [items[index] for index in subset_indices(len(items), size, option).tolist()]
    with ThreadPoolExecutor() as pool:
        images = np.stack(list(pool.map(_read_jpeg, [path for path, _ in chosen])))
    labels = torch.tensor([label for _, label in chosen])
    return Split(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), labels)


def _read_jpeg(path: Path) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise RecipeError(f"{path} is missing or damaged ({error}); unzip {_ARCHIVE} again") from error
