"""Handwritten digits that come with scikit-learn: 1797 images, no download."""

from pathlib import Path

import torch

from recipes.data.dataset import ImageDataset, Normalization, subset_indices, take
from recipes.errors import RecipeError

_TEST_IMAGES = 360
_ZOOM = 4


def load_digits(data_dir: Path, train_size: int | None = None, test_size: int | None = None) -> ImageDataset:
    """Loads the digits, enlarged from 8x8 to 32x32 pixels by repeating each; a fixed fifth is the test set.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 (its test part).
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise RecipeError("the digits data set needs scikit-learn: pip install '.[recipes]' in the checkout") from error
    bunch = datasets.load_digits()
    pixels = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8)  # N x 8 x 8, 0..16 before
    images = pixels.repeat_interleave(_ZOOM, 1).repeat_interleave(_ZOOM, 2).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    order = subset_indices(len(labels), len(labels), "digits")  # shuffled: the file is sorted by writer
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    return ImageDataset(
        name="digits",
        train=take(images[train], labels[train], train_size, "--train-size"),
        test=take(images[test], labels[test], test_size, "--test-size"),
        classes=10,
        normalization=Normalization(mean=(0.3048,), std=(0.3754,)),
        augment=False,
    )
