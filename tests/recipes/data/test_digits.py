from pathlib import Path

import pytest
import torch

from recipes.data import LOADERS
from recipes.errors import RecipeError


def test_load_digits_splits_without_overlap_and_normalizes():
    data = LOADERS["digits"](Path("unused"), None, None)
    assert (len(data.train), len(data.test), data.classes, data.channels, data.image_size) == (1437, 360, 10, 1, 32)
    both = torch.cat([data.train.images, data.test.images]).flatten(1)
    assert len(both.unique(dim=0)) == 1797  # the 1797 digits differ from each other, so none is in both parts
    assert both.min() == 0 and both.max() == 255
    pixels = data.train.images.double() / 255
    assert pixels.mean().item() == pytest.approx(data.normalization.mean[0], abs=5e-5)  # stated to four decimals
    assert pixels.std().item() == pytest.approx(data.normalization.std[0], abs=5e-5)


def test_load_digits_repeats_each_pixel():
    blocks = LOADERS["digits"](Path("unused"), 20, 10).train.images.unfold(2, 4, 4).unfold(3, 4, 4)
    assert blocks.shape == (20, 1, 8, 8, 4, 4)
    assert torch.equal(blocks.amin((4, 5)), blocks.amax((4, 5)))


def test_load_digits_refuses_more_images_than_there_are():
    with pytest.raises(RecipeError, match="--test-size 361 is not possible: the data set has 360 images"):
        LOADERS["digits"](Path("unused"), None, 361)
