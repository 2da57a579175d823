"""Squared gradient norms of the samples of a data set, remembered from one epoch to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from brevact.quantizers.brief import brief

#: Share of a sample's last norm in what is remembered of it. Source: ActNN, its published code.
_NEW_SHARE = 0.5


class SampleNorms:
    """A number a sample; 0 for samples that have not been seen.

    Source: ActNN, arXiv:2104.14129, section 4.3: the stale magnitude of the last epoch. Differs: one number a sample,
    the squared norm of the gradient at the outputs of the model, for all layers; ActNN's is one a layer.

    >>> norms = SampleNorms(4)
    >>> norms.remember(torch.tensor([0, 1]), torch.tensor([1.0, 3.0]))
    >>> norms.of(torch.tensor([0, 1, 2]))
    tensor([1., 3., 2.])

    Args:
        samples: of the data set.
    """

    def __init__(self, samples: int) -> None:
        self.values = torch.zeros(samples)

    def of(self, indices: Tensor) -> Tensor:
        """The norms of samples; the mean of the known ones for others, 1 where none is known.

        Args:
            indices: (N,) int64 indices.

        Returns:
            (N,) float32 squared norms.
        """
        known = self.values > 0
        mean = self.values.sum() / known.sum() if known.any() else torch.ones(())
        return torch.where(known[indices], self.values[indices], mean)

    def remember(self, indices: Tensor, squares: Tensor) -> None:
        """Mix new squared norms into those of before; what is not finite, or 0, changes nothing.

        Args:
            indices: (N,) int64 indices.
            squares: (N,) float32 squared norms.
        """
        old = self.values[indices]
        new = torch.where(old > 0, (1 - _NEW_SHARE) * old + _NEW_SHARE * squares, squares)
        self.values[indices] = torch.where(squares.isfinite() & (squares > 0), new, old)

    def reduce(self, device: torch.device) -> None:
        """Give all ranks of a distributed run the mean of what those know that have seen a sample."""
        parts = torch.stack((self.values, (self.values > 0).float())).to(device)
        distributed.all_reduce(parts)
        total, count = parts.cpu()
        self.values = total / count.clamp(min=1)

    def checked(self, indices: Any) -> Tensor:
        """Indices of samples as an int64 tensor on the CPU.

        Args:
            indices: tensor or sequence of integers.

        Raises:
            TypeError: they are no integers.
            ValueError: they are none, not of one dimension, or out of range.
        """
        accepted = f"accepted are the indices of the batch's samples, integers from 0 to {len(self.values) - 1}"
        if not isinstance(indices, Tensor | Sequence) or isinstance(indices, str):
            raise TypeError(f"indices: got {brief(indices)} of type {type(indices).__name__}; {accepted}")
        found = torch.as_tensor(indices).cpu()
        if found.numel() and (found.is_floating_point() or found.dtype is torch.bool):
            raise TypeError(f"indices: got {brief(indices)}; {accepted}")
        if found.dim() != 1 or not len(found) or found.min() < 0 or found.max() >= len(self.values):
            raise ValueError(f"indices: got {brief(indices)}; {accepted}")
        return found.long()
