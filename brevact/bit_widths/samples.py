"""Norms of the gradients of a data set's samples, by which `Adaptive` widens samples."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, distributed, nn

from brevact.quantizers.brief import brief
from brevact.reports.batches import tensors_of

#: Weight of a sample's last norm in its running mean. Source: ActNN, its published code.
_NEW_SHARE = 0.5
#: Most forward passes that may wait for their backward pass.
_MOST_BATCHES = 64


class BatchNorms:
    """Squared norms of the gradients at layers' outputs, per sample of a batch; (N,) int64 indices."""

    def __init__(self, indices: Tensor) -> None:
        self.indices = indices
        self._squares: list[Tensor] = []
        self._rows: set[int] = set()

    def watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: collect gradients of outputs with one row per sample."""
        for x in tensors_of(output):
            if x.requires_grad and x.dim():
                self._rows.add(len(x))
                if len(x) == len(self.indices):
                    x.register_hook(self._add)

    def check_rows(self) -> None:
        """Raise a ValueError if outputs had gradients, but none has one row per sample."""
        if self._rows and len(self.indices) not in self._rows:
            raise ValueError(
                f"indices: got {len(self.indices)}, and the outputs of layers have {sorted(self._rows)} rows; accepted "
                "is one for each sample of the batch, in its order, which dimension 0 of the outputs has"
            )

    def mean(self) -> Tensor | None:
        """Return the (N,) float32 mean over layers, each relative to its mean over the batch; None before backward."""
        if not self._squares:
            return None
        squares_LN = torch.stack([each.cpu() for each in self._squares])
        mean_L1 = squares_LN.mean(1, keepdim=True)
        return torch.where(mean_L1 > 0, squares_LN / mean_L1, squares_LN).sum(0) / (mean_L1 > 0).sum()

    def _add(self, grad: Tensor) -> None:
        self._squares.append(grad.detach().float().flatten(1).square().sum(1))


class SampleNorms:
    """Relative squared gradient norm per sample of a data set, with mean 1 over a batch; 0 for unseen samples.

    Source: ActNN, arXiv:2104.14129, section 4.3: the stale magnitude of the last epoch. Differs: one number per sample
    for all layers, the mean of their squared norms; ActNN has one per layer.

    >>> norms = SampleNorms(4)
    >>> norms.remember(torch.tensor([0, 1]), torch.tensor([1.0, 3.0]))
    >>> norms.of(torch.tensor([0, 1, 2]))
    tensor([1., 3., 2.])
    """

    def __init__(self, samples: int) -> None:
        self.values = torch.zeros(samples)
        self._batches: collections.deque[BatchNorms] = collections.deque(maxlen=_MOST_BATCHES)

    def of(self, indices: Tensor) -> Tensor:
        """Return (N,) float32 squared norms; unseen samples get the mean of the known ones, or 1 if none is known."""
        known = self.values > 0
        mean = self.values.sum() / known.sum() if known.any() else torch.ones(())
        return torch.where(known[indices], self.values[indices], mean)

    def begin(self, indices: Tensor) -> BatchNorms:
        """Return a collector of a batch's norms, which count once its backward pass has run."""
        self._batches.append(BatchNorms(indices))
        return self._batches[-1]

    def finish(self) -> None:
        for batch in list(self._batches):
            squares = batch.mean()
            if squares is not None:
                self.remember(batch.indices, squares)
                self._batches.remove(batch)

    def remember(self, indices: Tensor, squares: Tensor) -> None:
        """Update running means with new (N,) squared norms; skips norms that are 0 or not finite."""
        old = self.values[indices]
        new = torch.where(old > 0, (1 - _NEW_SHARE) * old + _NEW_SHARE * squares, squares)
        self.values[indices] = torch.where(squares.isfinite() & (squares > 0), new, old)

    def reduce(self, device: torch.device) -> None:
        """Average each sample's norm over the ranks that have seen it."""
        parts = torch.stack((self.values, (self.values > 0).float())).to(device)
        distributed.all_reduce(parts)
        total, count = parts.cpu()
        self.values = total / count.clamp(min=1)

    def checked(self, indices: Any) -> Tensor:
        """Return sample indices (a tensor, an array or a sequence) as an int64 tensor on the CPU."""
        accepted = f"accepted are the indices of the batch's samples, integers from 0 to {len(self.values) - 1}"
        found = None
        if not isinstance(indices, str) and (isinstance(indices, Tensor | Sequence) or hasattr(indices, "__array__")):
            with suppress(TypeError, ValueError, RuntimeError):
                found = torch.as_tensor(indices).cpu()
        if found is None or (found.numel() and (found.is_floating_point() or found.dtype is torch.bool)):
            raise TypeError(f"indices: got {brief(indices)} of type {type(indices).__name__}; {accepted}")
        if found.dim() != 1 or not len(found) or found.min() < 0 or found.max() >= len(self.values):
            raise ValueError(f"indices: got {brief(indices)}; {accepted}")
        return found.long()
