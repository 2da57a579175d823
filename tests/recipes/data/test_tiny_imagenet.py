import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.data import LOADERS
from recipes.errors import RecipeError

WNIDS = ("n02", "n01", "n03")


def jpeg(path, color, mode="RGB", size=(64, 64)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (color, color, color)).convert(mode).save(path, "JPEG", quality=100)


@pytest.fixture
def root(tmp_path):
    """Two images of each class in train, one in val; an image's pixels tell which one it is. Some are grey-scale."""
    root = tmp_path / "tiny-imagenet-200"
    lines = []
    for index, wnid in enumerate(sorted(WNIDS)):
        for number in range(2):
            jpeg(root / f"train/{wnid}/images/{wnid}_{number}.JPEG", 40 * index + 10 * number, "L" if number else "RGB")
        jpeg(root / f"val/images/val_{index}.JPEG", 200 + 10 * index)
        lines.append(f"val_{index}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (root / "val/val_annotations.txt").write_text("".join(reversed(lines)))
    return root


@pytest.mark.parametrize("inside", [False, True])
def test_load_tiny_imagenet_reads_the_official_folders(root, inside):
    data = LOADERS["tiny-imagenet"](root if inside else root.parent, None, None)
    assert (data.classes, data.channels, data.image_size) == (3, 3, 64)
    assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.train.images.shape == (6, 3, 64, 64) and data.train.images.dtype == torch.uint8
    assert data.train.images.float().mean((1, 2, 3)).tolist() == pytest.approx([0, 10, 40, 50, 80, 90], abs=1)
    assert data.test.labels.tolist() == [2, 1, 0]
    assert data.test.images.float().mean((1, 2, 3)).tolist() == pytest.approx([220, 210, 200], abs=1)


def test_load_tiny_imagenet_decodes_only_what_it_takes(root):
    paths = sorted((root / "train").glob("*/images/*"))
    taken = LOADERS["tiny-imagenet"](root, 4, None).train
    kept = {round(float(mean)) for mean in taken.images.float().mean((1, 2, 3))}
    for path in paths:
        if round(float(np.asarray(Image.open(path)).mean())) not in kept:
            path.write_bytes(b"damaged")
    assert torch.equal(LOADERS["tiny-imagenet"](root, 4, None).train.images, taken.images)


def test_load_tiny_imagenet_says_what_is_missing(tmp_path):
    with pytest.raises(RecipeError, match=rf"expected {tmp_path}/tiny-imagenet-200.*--data-dir, or download"):
        LOADERS["tiny-imagenet"](tmp_path, None, None)


def test_load_tiny_imagenet_names_damaged_files(root):
    annotations = root / "val/val_annotations.txt"
    good = annotations.read_text()
    annotations.write_text(good + "val_9.JPEG\tn99\t0\t0\t1\t1\n")
    with pytest.raises(RecipeError, match=r"val_annotations.txt is damaged: line 4 .*one of the 3 class folders"):
        LOADERS["tiny-imagenet"](root, None, None)
    annotations.write_text(good)
    path = root / "train/n02/images/n02_1.JPEG"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(RecipeError, match=r"n02_1.JPEG is missing or damaged"):
        LOADERS["tiny-imagenet"](root, None, None)
    jpeg(path, 0, size=(32, 64))
    with pytest.raises(RecipeError, match=r"n02_1.JPEG has 32x64 pixels, expected 64x64"):
        LOADERS["tiny-imagenet"](root, None, None)
    path.unlink()
    (root / "val/images/val_1.JPEG").unlink()
    with pytest.raises(RecipeError, match=r"val_1.JPEG is missing or damaged"):
        LOADERS["tiny-imagenet"](root, None, None)


def test_load_tiny_imagenet_leaves_out_what_is_no_part_of_it(root):
    for folder in (root / "train", root / "train/n02/images"):
        (folder / ".ipynb_checkpoints").mkdir()
    (root / "train/n02/images/Thumbs.db").write_bytes(b"")
    data = LOADERS["tiny-imagenet"](root, None, None)
    assert (data.classes, len(data.train)) == (3, 6)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n"])
def test_load_tiny_imagenet_refuses_annotations_that_are_no_text(root, content):
    (root / "val/val_annotations.txt").write_bytes(content)
    with pytest.raises(RecipeError, match=r"val_annotations.txt is damaged.*unzip"):
        LOADERS["tiny-imagenet"](root, None, None)


def test_load_tiny_imagenet_refuses_classes_without_images(root):
    for path in (root / "train/n02/images").iterdir():
        path.unlink()
    with pytest.raises(RecipeError, match=r"train/n02/images is missing or holds no JPEG images; unzip"):
        LOADERS["tiny-imagenet"](root, None, None)
    (root / "train/n02/images").rmdir()
    with pytest.raises(RecipeError, match=r"train/n02/images is missing or holds no JPEG images; unzip"):
        LOADERS["tiny-imagenet"](root, None, None)
    shutil.rmtree(root / "train")
    (root / "train").mkdir()
    with pytest.raises(RecipeError, match=r"train is damaged: it holds no class folders; unzip"):
        LOADERS["tiny-imagenet"](root, None, None)
