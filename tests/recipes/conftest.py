"""A data set and settings small enough to train within a test."""

import pytest
import torch

from recipes.data import ImageDataset, Normalization, Split
from recipes.efficientnetv2 import EfficientNetV2Settings


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small gain nothing from threads, and on a busy machine their barriers cost most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny_settings() -> EfficientNetV2Settings:
    return EfficientNetV2Settings(train_size=16, test_size=8, batch_size=8, epochs=2, warmup_epochs=0.5)


@pytest.fixture
def tiny_data() -> ImageDataset:
    """Random images of two classes, one dark and one bright."""
    generator = torch.Generator().manual_seed(0)

    def split(count: int) -> Split:
        labels = torch.arange(count) % 2
        images = torch.randint(0, 128, (count, 1, 32, 32), generator=generator) + 127 * labels.view(-1, 1, 1, 1)
        return Split(images.to(torch.uint8), labels)

    return ImageDataset("tiny", split(16), split(8), 2, Normalization((0.5,), (0.25,)), augment=True)
