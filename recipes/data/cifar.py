"""CIFAR-10 and CIFAR-100 from their official files, the Python version or the binary one.

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. An image is 3072 bytes: 1024 red,
1024 green, 1024 blue, each row by row.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from recipes.data.dataset import ImageDataset, Normalization, take
from recipes.data.safe_pickle import load_arrays
from recipes.errors import RecipeError

_PIXELS = 3 * 32 * 32
_HOME_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True)
class _Format:
    """How one version of a data set lies on disk: its folder, its files, and where the label is."""

    folder: str
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    label: str | int  # key in a pickled file; offset in the label bytes of a binary record
    label_bytes: int = 0

    def read(self, path: Path, classes: int) -> tuple[np.ndarray, np.ndarray]:
        return _read_binary(path, self, classes) if self.label_bytes else _read_pickle(path, self, classes)


@dataclass(frozen=True)
class _Cifar:
    name: str
    classes: int
    archive: str
    formats: tuple[_Format, ...]
    normalization: Normalization


_CIFAR10 = _Cifar(
    name="CIFAR-10",
    classes=10,
    archive="cifar-10-python.tar.gz",
    formats=(
        _Format("cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",), "labels"),
        _Format("cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",), 0, 1),
    ),
    normalization=Normalization(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),
)
_CIFAR100 = _Cifar(
    name="CIFAR-100",
    classes=100,
    archive="cifar-100-python.tar.gz",
    formats=(
        _Format("cifar-100-python", ("train",), ("test",), "fine_labels"),
        _Format("cifar-100-binary", ("train.bin",), ("test.bin",), 1, 2),
    ),
    normalization=Normalization(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
)


def load_cifar10(data_dir: Path, train_size: int | None = None, test_size: int | None = None) -> ImageDataset:
    """Loads CIFAR-10 from `cifar-10-batches-py` or `cifar-10-batches-bin`.

    Args:
        data_dir: the folder that holds one of these folders, or one of them itself.
        train_size: number of training images; None for all 50,000.
        test_size: number of test images; None for all 10,000.

    Returns:
        Images of 3 x 32 x 32 and 10 classes.

    Raises:
        RecipeError: files are missing or damaged, or a size is larger than the set.
    """
    return _load("cifar10", _CIFAR10, data_dir, train_size, test_size)


def load_cifar100(data_dir: Path, train_size: int | None = None, test_size: int | None = None) -> ImageDataset:
    """Loads CIFAR-100, with its fine labels, from `cifar-100-python` or `cifar-100-binary`.

    Args:
        data_dir: the folder that holds one of these folders, or one of them itself.
        train_size: number of training images; None for all 50,000.
        test_size: number of test images; None for all 10,000.

    Returns:
        Images of 3 x 32 x 32 and 100 classes.

    Raises:
        RecipeError: files are missing or damaged, or a size is larger than the set.
    """
    return _load("cifar100", _CIFAR100, data_dir, train_size, test_size)


def _load(name: str, cifar: _Cifar, data_dir: Path, train_size: int | None, test_size: int | None) -> ImageDataset:
    folder, layout = _find(cifar, data_dir)
    splits = []
    for files, size, option in (
        (layout.train_files, train_size, "--train-size"),
        (layout.test_files, test_size, "--test-size"),
    ):
        parts = [layout.read(folder / file, cifar.classes) for file in files]
        images = torch.from_numpy(np.concatenate([images for images, _ in parts])).view(-1, 3, 32, 32)
        labels = torch.from_numpy(np.concatenate([labels for _, labels in parts])).long()
        splits.append(take(images, labels, size, option))
    return ImageDataset(name, *splits, classes=cifar.classes, normalization=cifar.normalization, augment=True)


def _find(cifar: _Cifar, data_dir: Path) -> tuple[Path, _Format]:
    for layout in cifar.formats:
        for folder in (data_dir / layout.folder, data_dir):
            files = [folder / file for file in layout.train_files + layout.test_files]
            if any(file.is_file() for file in files):
                if missing := [file.name for file in files if not file.is_file()]:
                    raise RecipeError(f"{cifar.name}: {folder} lacks {', '.join(missing)}; {_remedy(cifar)}")
                return folder, layout
    folders = " or ".join(str(data_dir / layout.folder) for layout in cifar.formats)
    raise RecipeError(
        f"{cifar.name} was not found: expected {folders}. Name its folder with --data-dir, or {_remedy(cifar)}"
    )


def _remedy(cifar: _Cifar) -> str:
    return f"download {cifar.archive} from {_HOME_PAGE} and unpack it (tar -xzf {cifar.archive} -C DATA_DIR)"


def _read_binary(path: Path, layout: _Format, classes: int) -> tuple[np.ndarray, np.ndarray]:
    record = layout.label_bytes + _PIXELS
    data = np.fromfile(path, np.uint8)
    if data.size == 0 or data.size % record:
        raise _damaged(path, f"{data.size} bytes are not a whole number of records of {record}")
    rows = data.reshape(-1, record)
    labels = rows[:, layout.label].astype(np.int64)
    return np.ascontiguousarray(rows[:, layout.label_bytes :]), _check_labels(path, labels, classes)


def _read_pickle(path: Path, layout: _Format, classes: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        content = load_arrays(path)
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise _damaged(path, f"not readable as a pickled batch ({error})") from error
    data, labels = (
        (content.get(key.encode()) for key in ("data", layout.label)) if isinstance(content, dict) else 2 * [0]
    )
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != _PIXELS:
        raise _damaged(path, f"'data' is not an array of N x {_PIXELS} bytes")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(label) is int for label in labels):
        raise _damaged(path, f"'{layout.label}' is not a list of {len(data)} integers")
    try:
        return data, _check_labels(path, np.array(labels, np.int64), classes)
    except OverflowError as error:
        raise _damaged(path, f"labels are not all in 0 .. {classes - 1}") from error


def _check_labels(path: Path, labels: np.ndarray, classes: int) -> np.ndarray:
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= classes:
        raise _damaged(path, f"labels are not all in 0 .. {classes - 1}")
    return labels


def _damaged(path: Path, reason: str) -> RecipeError:
    return RecipeError(f"{path} is damaged: {reason}; download the data set again from {_HOME_PAGE}")
