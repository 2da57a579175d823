import pickle

import numpy as np
import pytest
import torch

from recipes.data import LOADERS
from recipes.errors import RecipeError

datasets = pytest.importorskip("torchvision.datasets", reason="torchvision is not installed")


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Six files of four images each, in place of torchvision's, whose checksums it knows; their pixels and labels."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 3072), dtype=np.uint8)
    for index, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        part = pixels[4 * index : 4 * index + 4]
        (folder / name).write_bytes(pickle.dumps({"data": part, "labels": [0, 1, 2, index]}, protocol=2))
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(datasets.CIFAR10, "_load_meta", lambda self: None)
    return torch.from_numpy(pixels).view(-1, 3, 32, 32)


def test_load_cifar10_reads_images_and_labels(cifar10, tmp_path):
    data = LOADERS["cifar10"](tmp_path, None, None)
    assert torch.equal(data.train.images, cifar10[:20]) and torch.equal(data.test.images, cifar10[20:])
    assert data.train.labels[-4:].tolist() == [0, 1, 2, 4] and data.test.labels.tolist() == [0, 1, 2, 5]
    assert (data.classes, data.channels, data.image_size, data.augment) == (10, 3, 32, True)


def test_load_cifar10_takes_the_same_part_every_time(cifar10, tmp_path):
    small, large = (LOADERS["cifar10"](tmp_path, size, 2).train for size in (5, 9))
    assert torch.equal(small.images, large.images[:5]) and torch.equal(small.labels, large.labels[:5])
    with pytest.raises(RecipeError, match=r"--train-size 21 is not possible: the data set has 20 images"):
        LOADERS["cifar10"](tmp_path, 21, None)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_load_cifar_says_where_to_get_it(tmp_path, name):
    with pytest.raises(RecipeError, match=rf"was not found in {tmp_path}, .*--data-dir.*download cifar-.*https://"):
        LOADERS[name](tmp_path, None, None)
