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
    """Two images of each class in train, one in val; an image's pixels identify it. Some are grey-scale."""
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
    path = root / "train/n02/images/n02_1.JPEG"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(RecipeError, match=r"n02_1.JPEG is missing or damaged"):
        LOADERS["tiny-imagenet"](root, None, None)
    path.unlink()
    (root / "val/images/val_1.JPEG").unlink()
    with pytest.raises(RecipeError, match=r"val_1.JPEG is missing or damaged"):
        LOADERS["tiny-imagenet"](root, None, None)
