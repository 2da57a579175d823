import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.data import LOADERS
from recipes.recipe import RecipeError


def test_digits_are_split_without_overlap_normalized_and_enlarged():
    data = LOADERS["digits"](Path("unused"), None, None)
    assert (len(data.train), len(data.test), data.classes, data.channels, data.image_size) == (1437, 360, 10, 1, 32)
    both = torch.cat([data.train.images, data.test.images])
    assert len(both.flatten(1).unique(dim=0)) == 1797  # they differ from each other, so none is in both parts
    assert both.min() == 0 and both.max() == 255
    pixels, (means, deviations) = data.train.images.double() / 255, data.normalization
    assert pixels.mean().item() == pytest.approx(means[0], abs=5e-5)  # stated to four decimals
    assert pixels.std().item() == pytest.approx(deviations[0], abs=5e-5)
    blocks = both.unfold(2, 4, 4).unfold(3, 4, 4)
    assert torch.equal(blocks.amin((4, 5)), blocks.amax((4, 5)))
    with pytest.raises(RecipeError, match="--test-size 361 is not possible: the data set has 360 images"):
        LOADERS["digits"](Path("unused"), None, 361)


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Six files of four images each, in place of torchvision's, whose checksums it knows; their pixels."""
    datasets = pytest.importorskip("torchvision.datasets", reason="torchvision is not installed")
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 3072), dtype=np.uint8)
    for index, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        part = pixels[4 * index : 4 * index + 4]
        (folder / name).write_bytes(pickle.dumps({"data": part, "labels": [0, 1, 2, index]}, protocol=2))
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(datasets.CIFAR10, "_load_meta", lambda self: None)
    return torch.from_numpy(pixels).view(-1, 3, 32, 32)


def test_cifar_has_its_images_and_labels_and_the_same_part_every_time(cifar10, tmp_path):
    data = LOADERS["cifar10"](tmp_path, None, None)
    assert torch.equal(data.train.images, cifar10[:20]) and torch.equal(data.test.images, cifar10[20:])
    assert data.train.labels[-4:].tolist() == [0, 1, 2, 4] and data.test.labels.tolist() == [0, 1, 2, 5]
    assert (data.classes, data.channels, data.image_size, data.augment) == (10, 3, 32, True)
    small, large = (LOADERS["cifar10"](tmp_path, size, 2).train for size in (5, 9))
    assert torch.equal(small.images, large.images[:5]) and torch.equal(small.labels, large.labels[:5])
    with pytest.raises(RecipeError, match=r"--train-size 21 is not possible: the data set has 20 images"):
        LOADERS["cifar10"](tmp_path, 21, None)


def test_loaders_say_where_to_get_their_data(tmp_path):
    with pytest.raises(RecipeError, match=rf"expected {tmp_path}/tiny-imagenet-200.*--data-dir, or download"):
        LOADERS["tiny-imagenet"](tmp_path, None, None)
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    with pytest.raises(RecipeError, match=rf"was not found in {tmp_path}, .*--data-dir.*download cifar-.*https://"):
        LOADERS["cifar100"](tmp_path, None, None)


def jpeg(path, color, mode="RGB", size=(64, 64)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (color, color, color)).convert(mode).save(path, "JPEG", quality=100)


@pytest.fixture
def tiny_imagenet(tmp_path):
    """Two images of each class in train, one in val; an image's pixels identify it. Some are grey-scale."""
    root, lines = tmp_path / "tiny-imagenet-200", []
    for index, wnid in enumerate(("n01", "n02", "n03")):
        for number in range(2):
            jpeg(root / f"train/{wnid}/images/{wnid}_{number}.JPEG", 40 * index + 10 * number, "L" if number else "RGB")
        jpeg(root / f"val/images/val_{index}.JPEG", 200 + 10 * index)
        lines.append(f"val_{index}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (root / "val/val_annotations.txt").write_text("".join(reversed(lines)))
    return root


@pytest.mark.parametrize("inside", [False, True])
def test_tiny_imagenet_is_read_from_its_official_folders(tiny_imagenet, inside):
    data = LOADERS["tiny-imagenet"](tiny_imagenet if inside else tiny_imagenet.parent, None, None)
    assert (data.classes, data.channels, data.image_size) == (3, 3, 64)
    assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.train.images.shape == (6, 3, 64, 64) and data.train.images.dtype == torch.uint8
    assert data.train.images.float().mean((1, 2, 3)).tolist() == pytest.approx([0, 10, 40, 50, 80, 90], abs=1)
    assert data.test.labels.tolist() == [2, 1, 0]
    assert data.test.images.float().mean((1, 2, 3)).tolist() == pytest.approx([220, 210, 200], abs=1)


def test_tiny_imagenet_decodes_only_what_it_takes_and_names_damaged_files(tiny_imagenet):
    taken = LOADERS["tiny-imagenet"](tiny_imagenet, 4, None).train
    kept = {round(float(mean)) for mean in taken.images.float().mean((1, 2, 3))}
    for path in sorted((tiny_imagenet / "train").glob("*/images/*")):
        if round(float(np.asarray(Image.open(path)).mean())) not in kept:
            path.write_bytes(path.read_bytes()[:300])
    assert torch.equal(LOADERS["tiny-imagenet"](tiny_imagenet, 4, None).train.images, taken.images)
    with pytest.raises(RecipeError, match=r"n0._..JPEG is missing or damaged"):
        LOADERS["tiny-imagenet"](tiny_imagenet, None, None)
