"""Batches of a split: shuffled, augmented and normalized as tensors, reproducible for a seed and an epoch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from recipes.data.images import Split


class Batches:
    """Iterates over a split whose pixels stay on `device` as uint8.

    In training the order and the augmentation of an epoch depend on `seed` and the epoch's number alone, so that a
    resumed run sees the batches that an uninterrupted one would have seen. Images that do not fill a last training
    batch are left out of that epoch.

    Args:
        split: images and labels.
        normalization: means and standard deviations of the channels, of pixels scaled to 0..1.
        batch_size: images in a batch.
        device: where the pixels are kept and the batches are made.
        train: shuffle, and leave out the incomplete last batch.
        augment: random crop of the padded image, and random horizontal flip.
        padding: pixels on each side before the crop; None for an eighth of the image's size, 0 for flips alone.
        seed: of order and augmentation.
    """

    def __init__(
        self,
        split: Split,
        normalization: tuple[tuple[float, ...], tuple[float, ...]],
        batch_size: int,
        *,
        device: torch.device,
        train: bool = False,
        augment: bool = False,
        padding: int | None = None,
        seed: int = 0,
    ) -> None:
        self.images = split.images.to(device)
        self.labels = split.labels.to(device)
        self.batch_size = min(batch_size, len(split)) if train else batch_size
        self.train = train
        self.augment = augment
        self.padding = self.images.shape[-1] // 8 if padding is None else padding
        self.seed = seed
        self._mean, self._std = (torch.tensor(each, device=device).view(1, -1, 1, 1) * 255 for each in normalization)

    def __len__(self) -> int:
        if self.train:
            return len(self.labels) // self.batch_size
        return -(-len(self.labels) // self.batch_size)

    def epoch(self, number: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (float32 images B x C x H x W, int64 labels B) for one pass over the split."""
        # One stream for each pair of seed and epoch, up to 2**20 epochs.
        generator = torch.Generator().manual_seed(self.seed * 2**20 + number)
        order = torch.randperm(len(self.labels), generator=generator) if self.train else torch.arange(len(self.labels))
        order = order.to(self.images.device)
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            chosen = order[start : start + self.batch_size]
            images = self.images[chosen]
            if self.augment:
                images = crop_and_flip(images, self.padding, generator)
            yield (images.float() - self._mean) / self._std, self.labels[chosen]


def crop_and_flip(images_BCHW: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Shifts each image by up to `padding` pixels each way, zeros moving in, and mirrors half of them."""
    batch, _, height, width = images_BCHW.shape
    device = images_BCHW.device
    top_left = torch.randint(0, 2 * padding + 1, (2, batch, 1), generator=generator).to(device)
    flip = torch.rand(batch, 1, generator=generator).to(device) < 0.5
    rows_BH = top_left[0] + torch.arange(height, device=device)
    columns_W = torch.arange(width, device=device)
    columns_BW = top_left[1] + torch.where(flip, columns_W.flip(0), columns_W)
    padded = torch.nn.functional.pad(images_BCHW, (padding,) * 4)
    samples_B = torch.arange(batch, device=device)[:, None, None]
    picked_BHWC = padded.permute(0, 2, 3, 1)[samples_B, rows_BH[:, :, None], columns_BW[:, None, :]]
    return picked_BHWC.permute(0, 3, 1, 2).contiguous()
