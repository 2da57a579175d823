"""How the statistics and weights of norms map to the elements of their inputs.

An alignment depends on sizes alone. Equal ones are equal objects: a norm's input keeps its decoder between steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def along_channels(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape (C,) or (N * C,) numbers to broadcast over an (N, C, ...) tensor of this shape."""
    samples = 1 if x.numel() == shape[1] else shape[0]
    return x.reshape(samples, shape[1], *[1] * (len(shape) - 2))


class OverChannels(NamedTuple):
    """One mean and deviation per channel (and sample); ``eps`` is added to saved variances, None for deviations."""

    eps: float | None = None

    def align(self, statistic: Tensor, shape: tuple[int, ...]) -> Tensor:
        return along_channels(statistic, shape)

    def align_weight(self, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        return along_channels(weight, shape)

    def inverse(self, spread: Tensor) -> Tensor:
        spread = in_float32(spread)
        return spread if self.eps is None else torch.rsqrt(spread + self.eps)


class OverLastDims(NamedTuple):
    """Statistics that broadcast unchanged; weights have one number per element of the last dimensions."""

    def align(self, statistic: Tensor, shape: tuple[int, ...]) -> Tensor:
        return statistic

    def align_weight(self, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        return weight.view(*[1] * (len(shape) - weight.dim()), *weight.shape)

    def inverse(self, spread: Tensor) -> Tensor:
        return in_float32(spread)


class OverGroups(NamedTuple):
    """One mean and one deviation per group of a sample's channels; weights have one number per channel."""

    groups: int

    def align(self, statistic: Tensor, shape: tuple[int, ...]) -> Tensor:
        n, c = shape[:2]
        return along_channels(statistic[:, :, None].expand(n, self.groups, c // self.groups).reshape(n * c), shape)

    def align_weight(self, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        return along_channels(weight, shape)

    def inverse(self, spread: Tensor) -> Tensor:
        return in_float32(spread)


def in_float32(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 if it is float64."""
    return x if x.dtype is torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))
