"""A potential of particles by continuous-filter convolutions: energies, and forces as their negative gradients.

Source: K. T. Schuett et al., SchNet, arXiv:1706.08566, sections 4 and 5. Differs: all particles are neighbours of each
other, of a cluster with a fixed number of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ShiftedSoftplus(nn.Module):
    """ln(e^x / 2 + 1 / 2)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x) - math.log(2.0)


class GaussianBasis(nn.Module):
    """Distances r as exp(-(r - m)^2 / (2 d^2)), for means m from 0 to `reach` with the distance d."""

    def __init__(self, size: int, reach: float) -> None:
        super().__init__()
        self.register_buffer("means", torch.linspace(0.0, reach, size))
        self.factor = -0.5 * ((size - 1) / reach) ** 2

    def forward(self, distances: Tensor) -> Tensor:
        """Distances (...) to (..., size)."""
        return torch.exp(self.factor * (distances.unsqueeze(-1) - self.means).square())


class Interaction(nn.Module):
    """x_i + W2 ssp(W1 sum_j (W0 x_j) * filter(r_ij)): a residual block over the neighbours j of each particle i."""

    def __init__(self, width: int, basis: int) -> None:
        super().__init__()
        self.filter = nn.Sequential(
            *(nn.Linear(basis, width), ShiftedSoftplus(), nn.Linear(width, width), ShiftedSoftplus())
        )
        self.project = nn.Linear(width, width, bias=False)
        self.out = nn.Sequential(nn.Linear(width, width), ShiftedSoftplus(), nn.Linear(width, width))

    def forward(self, x: Tensor, basis: Tensor, neighbours: Tensor) -> Tensor:
        """Features (B, N, width), distances (B, N, N - 1, basis), neighbours (N, N - 1) to features."""
        return x + self.out((self.project(x)[:, neighbours] * self.filter(basis)).sum(2))


class SchNet(nn.Module):
    """Energies and forces of clusters.

    Args:
        kinds: number of kinds of particles.
        width: features of a particle.
        interactions: number of blocks.
        basis: numbers that encode a distance.
        reach: the largest distance that they distinguish.
        energy: mean energy of a particle, which is added.
        scale: of forces, by which energies are multiplied.
    """

    def __init__(
        self,
        kinds: int,
        width: int = 64,
        interactions: int = 3,
        basis: int = 32,
        reach: float = 6.0,
        *,
        energy: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, width)
        self.basis = GaussianBasis(basis, reach)
        self.interactions = nn.ModuleList(Interaction(width, basis) for _ in range(interactions))
        self.head = nn.Sequential(nn.Linear(width, width // 2), ShiftedSoftplus(), nn.Linear(width // 2, 1))
        self.register_buffer("energy", torch.tensor(energy))
        self.register_buffer("scale", torch.tensor(scale))

    def energies(self, kinds: Tensor, positions: Tensor) -> Tensor:
        """Energies (B,) of kinds (B, N) at positions (B, N, 3)."""
        count = kinds.shape[1]
        others = torch.arange(count - 1, device=kinds.device).expand(count, -1)
        neighbours = others + (others >= torch.arange(count, device=kinds.device).unsqueeze(1))
        distances = (positions.unsqueeze(2) - positions[:, neighbours]).norm(dim=-1)
        x, basis = self.embedding(kinds), self.basis(distances)
        for interaction in self.interactions:
            x = interaction(x, basis, neighbours)
        return (self.scale * self.head(x).squeeze(-1) + self.energy).sum(-1)

    def forward(self, kinds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Energies (B,) and forces (B, N, 3); in training mode forces can be differentiated again."""
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energies = self.energies(kinds, positions)
            (gradient,) = torch.autograd.grad(energies.sum(), positions, create_graph=self.training)
        return energies, -gradient
