"""Clusters of two kinds of particles that attract and repel each other, with their energies and forces.

E = sum over pairs i < j of 4 eps (s^12 - s^6) with s = sigma / r, sigma and eps by the kinds of the two: the mixture
of W. Kob and H. C. Andersen, Phys. Rev. E 51, 4626 (1995), which does not crystallize. Lengths are in units of kind 0's
sigma, energies of its eps. Differs: no cutoff and no box.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

#: By the kinds of two particles.
_SIGMA = torch.tensor([[1.0, 0.8], [0.8, 0.88]], dtype=torch.float64)
_EPSILON = torch.tensor([[1.0, 1.5], [1.5, 0.5]], dtype=torch.float64)
#: Distance of neighbours on the lattice from which particles are moved, near the minimum of the potential.
_SPACING = 1.15
#: Standard deviation of a move, in each direction.
_NOISE = 0.06
#: One particle in so many is of kind 1.
_ONE_IN = 5


class Configurations(NamedTuple):
    """Clusters of N particles: kinds (B, N), int64; positions (B, N, 3), energies (B,), forces (B, N, 3), float32."""

    kinds: Tensor
    positions: Tensor
    energies: Tensor
    forces: Tensor

    def __len__(self) -> int:
        return self.kinds.shape[0]

    def at(self, index: Tensor | slice) -> Configurations:
        """Those at some places."""
        return Configurations(*(each[index] for each in self))

    def to(self, device: torch.device) -> Configurations:
        return Configurations(*(each.to(device) for each in self))

    def batches(self, size: int, seed: int | None = None) -> Iterator[Configurations]:
        """Yields batches; in an order that the seed decides, without the rest, or in order where it is None."""
        if seed is None:
            yield from (self.at(slice(i, i + size)) for i in range(0, len(self), size))
            return
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        for part in order.split(size):
            if len(part) == size:
                yield self.at(part.to(self.kinds.device))


def energies_of(kinds: Tensor, positions: Tensor) -> Tensor:
    """Energies (B,) of clusters: kinds (B, N), positions (B, N, 3) in float64."""
    first, second = torch.triu_indices(*(2 * [kinds.shape[1]]), offset=1)
    square = (positions[:, first] - positions[:, second]).square().sum(-1)
    pair = kinds[:, first], kinds[:, second]
    sixth = (_SIGMA[pair].square() / square) ** 3
    return (4 * _EPSILON[pair] * (sixth * sixth - sixth)).sum(-1)


def make_configurations(count: int, side: int, seed: int) -> Configurations:
    """Clusters of `side`**3 particles: a simple cubic lattice whose sites are moved at random, and kinds at random."""
    generator = torch.Generator().manual_seed(seed)
    lattice = _SPACING * torch.cartesian_prod(*(3 * [torch.arange(side, dtype=torch.float64)]))
    moves = torch.randn(count, side**3, 3, generator=generator, dtype=torch.float64)
    positions = (lattice + _NOISE * moves).requires_grad_()
    order = torch.rand(count, side**3, generator=generator).argsort(-1)
    kinds = (order < max(1, side**3 // _ONE_IN)).long()
    with torch.enable_grad():
        energies = energies_of(kinds, positions)
        (gradient,) = torch.autograd.grad(energies.sum(), positions)
    return Configurations(kinds, positions.detach().float(), energies.detach().float(), -gradient.float())
