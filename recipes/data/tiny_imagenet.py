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
_SUFFIXES = (".jpeg", ".jpg")
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
    wnids = sorted(folder.name for folder in _visible(root / "train") if folder.is_dir())
    if not wnids:
        raise RecipeError(f"{root / 'train'} is damaged: it holds no class folders; unzip {_ARCHIVE} again")
    classes = {wnid: index for index, wnid in enumerate(wnids)}
    train = [(path, classes[wnid]) for wnid in wnids for path in _images(root / "train" / wnid / "images")]
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


def _visible(folder: Path) -> list[Path]:
    """What is in a folder, without what other programs hide there, such as .ipynb_checkpoints."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    found = [path for path in _visible(folder) if path.suffix.lower() in _SUFFIXES] if folder.is_dir() else []
    if not found:
        raise RecipeError(f"{folder} is missing or holds no JPEG images; unzip {_ARCHIVE} again")
    return found


def _validation(folder: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    annotations = folder / "val_annotations.txt"
    items = []
    try:
        lines = annotations.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{annotations} is damaged ({error}); unzip {_ARCHIVE} again") from error
    if not lines:
        raise RecipeError(f"{annotations} is damaged: it is empty; unzip {_ARCHIVE} again")
    for number, line in enumerate(lines, start=1):
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
        raise RecipeError("Tiny ImageNet needs Pillow: pip install '.[recipes]' in the checkout") from error
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise RecipeError(f"{path} is missing or damaged ({error}); unzip {_ARCHIVE} again") from error
    if pixels.shape != (_SIZE, _SIZE, 3):
        raise RecipeError(f"{path} has {pixels.shape[1]}x{pixels.shape[0]} pixels, expected {_SIZE}x{_SIZE}")
    return pixels
