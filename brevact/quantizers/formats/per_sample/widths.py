"""Bit widths of the samples of a tensor: how sensitive each of them is, and the widths of least noise."""

from __future__ import annotations

import torch
from torch import Tensor

NARROWEST, WIDEST = 1, 8


class SampleWeights:
    """Factors of the sensitivities of a batch's samples: squared norms of their gradients, say.

    One object serves all quantizers of a model; who knows the batch writes `values` before each forward pass. It counts
    as equal to itself alone, a copy of a model shares it, and a pickled one has no values.

    >>> weights = SampleWeights()
    >>> weights.values = torch.tensor([1.0, 4.0])
    >>> weights.of_parts(4, 2)
    tensor([1., 1., 4., 4.], dtype=torch.float64)

    Attributes:
        values: (N,) floating-point factors of at least 0, of the samples in the order of the batch; None for 1.
    """

    __slots__ = ("__weakref__", "values")

    def __init__(self) -> None:
        self.values: Tensor | None = None

    def of_parts(self, parts: int, samples: int) -> Tensor | None:
        """(parts,) float64 factors of equal parts of a tensor, some for each sample, or each of some samples.

        `samples` is the size of the dimension along which the tensor holds samples, or several rows of each. None if
        there are no factors, or if they are of another batch.
        """
        values = self.values
        count = 0 if values is None else values.numel()
        if values is None or count == 0 or samples % count:
            return None
        values = values.detach().to("cpu", torch.float64)
        if parts % count == 0:
            return values.repeat_interleave(parts // count)
        return values.view(parts, -1).sum(1) if count % parts == 0 else None

    def __deepcopy__(self, memo: object) -> SampleWeights:
        """The same object: a copied model runs the same batches."""
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle no values: they are of one batch."""
        return SampleWeights, ()


def widths_of_least_noise(sensitivity: Tensor, total: int) -> Tensor:
    """Bit widths that minimize sum_n sensitivity_n / (2^b_n - 1)^2, the b_n adding up to a total.

    The noise falls by less with each further bit of a sample, so that the bits that lower it most, one by one, are the
    best of all choices. Widths of equally sensitive samples differ by a bit at most.

    Source: ActNN, arXiv:2104.14129, equation 10, for samples of one size. Differs: exact, where ActNN starts from 8
    bits and takes away the cheapest.

    >>> widths_of_least_noise(torch.tensor([1.0, 100.0, 1.0]), 6).tolist()
    [1, 4, 1]

    Args:
        sensitivity: (N,) floating-point numbers of at least 0; NaN counts as 0.
        total: Sum of the widths, N to 8 N.

    Returns:
        (N,) uint8 widths, 1 to 8.
    """
    count = sensitivity.numel()
    widths = torch.arange(NARROWEST, WIDEST + 1, dtype=torch.float64)
    noise = (torch.exp2(widths) - 1) ** -2
    gains = torch.outer(noise[:-1] - noise[1:], sensitivity.detach().to("cpu", torch.float64).nan_to_num())
    order = gains.flatten().argsort(descending=True, stable=True)  # ties: first the first bit of all
    chosen = order[: total - NARROWEST * count] % count
    return (NARROWEST + torch.bincount(chosen, minlength=count)).to(torch.uint8)
