"""How the statistics and weights of norms belong to the elements of their inputs.

An alignment knows sizes alone. Equal ones are equal objects, so that the decoder of a norm's input is the same from
one training step to the next.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def along_channels(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Shape (C,) or (N * C,) numbers so that they broadcast over an (N, C, ...) tensor of this shape."""
    samples = 1 if x.numel() == shape[1] else shape[0]
    return x.reshape(samples, shape[1], *[1] * (len(shape) - 2))


class OverChannels(NamedTuple):
    """One mean and one deviation a channel, or a channel of a sample; so of weights.

    A norm that keeps variances adds ``eps`` to them; it is None for one that keeps inverse deviations.
    """

    eps: float | None = None

    def align(self, statistic: Tensor, shape: tuple[int, ...]) -> Tensor:
        return along_channels(statistic, shape)

    def align_weight(self, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        return along_channels(weight, shape)

    def inverse(self, spread: Tensor) -> Tensor:
        spread = in_float32(spread)
        return spread if self.eps is None else torch.rsqrt(spread + self.eps)


class OverLastDims(NamedTuple):
    """Statistics that broadcast as they are; weights are one number an element of the last dimensions."""

    def align(self, statistic: Tensor, shape: tuple[int, ...]) -> Tensor:
        return statistic

    def align_weight(self, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        return weight.view(*[1] * (len(shape) - weight.dim()), *weight.shape)

    def inverse(self, spread: Tensor) -> Tensor:
        return in_float32(spread)


class OverGroups(NamedTuple):
    """One mean and one deviation a group of the channels of a sample; weights are one number a channel."""

    groups: int

    def align(self, statistic: Tensor, shape: tuple[int, ...]) -> Tensor:
        n, c = shape[:2]
        return along_channels(statistic[:, :, None].expand(n, self.groups, c // self.groups).reshape(n * c), shape)

    def align_weight(self, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        return along_channels(weight, shape)

    def inverse(self, spread: Tensor) -> Tensor:
        return in_float32(spread)


def in_float32(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 if it is in that."""
    return x if x.dtype is torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))
