"""A potential that learns energies and forces of Lennard-Jones clusters: gradients that are differentiated again.

    python -m recipes.forces --compare 'DitherBackward4bit+*basis=None' DEFAULT --seeds 0 1 2

makes clusters of two kinds of particles on the spot (`recipes/data/lennard_jones.py` has the potential and its source),
and trains a small SchNet at full precision and with each policy, from the same weights and on the same batches for each
seed. Forces are gradients of the energy, and the loss differentiates them again (`create_graph=True`), which takes
`double_backward=True`. The metric is the mean absolute error of forces on clusters that were not trained on, in units
of eps over sigma.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes import command_line
from recipes.data.lennard_jones import Configurations, make_configurations
from recipes.models.schnet import SchNet
from recipes.recipe import ABOVE_0, Metric, Recipe, RecipeError, Settings, Task, cosine, setting

#: Much of the forces' noise comes from the codes of distances.
POLICY = "DitherBackward4bit+*basis=None"
_SIDE = (lambda value: 2 <= value <= 8, "use 2 to 8, since all particles are neighbours of each other")
_TEST_SEED = 2**20  # of the clusters, which are those of no run's training


@dataclass(frozen=True)
class ForceSettings(Settings):
    epochs: int = setting(30, "passes over the clusters", least=1)
    batch_size: int = setting(16, "clusters in a step", least=1)
    lr: float = setting(2e-3, "largest rate of Adam", check=ABOVE_0)
    side: int = setting(3, "particles along an edge of a cluster", check=_SIDE)
    train_size: int = setting(512, "clusters to train on")
    test_size: int = setting(128, "clusters to test on", least=1)
    width: int = setting(64, "features of a particle", least=2)
    interactions: int = setting(3, "blocks of the SchNet", least=1)
    energy_weight: float = setting(1.0, "of energies beside forces", check=ABOVE_0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_size < self.batch_size:
            raise RecipeError(f"--train-size {self.train_size} is not possible: use at least {self.batch_size}")


class ForceLoss(nn.Module):
    """A potential and its loss: (F - F*)^2 / s^2 + weight (E - E*)^2 / (s^2 N), s the scale of forces."""

    def __init__(self, potential: SchNet, energy_weight: float) -> None:
        super().__init__()
        self.potential = potential
        self.energy_weight = energy_weight

    def forward(self, batch: Configurations) -> Tensor:
        energies, forces = self.potential(batch.kinds, batch.positions)
        scale = self.potential.scale**2
        of_energies = F.mse_loss(energies, batch.energies) / batch.kinds.shape[1]
        return (F.mse_loss(forces, batch.forces) + self.energy_weight * of_energies) / scale


class ForceTask(Task):
    policy_settings: ClassVar[dict[str, Any]] = {"double_backward": True}

    def __init__(self, settings: ForceSettings, seed: int, device: torch.device) -> None:
        super().__init__(settings, seed, device)
        self.train = make_configurations(settings.train_size, settings.side, seed).to(device)
        potential = SchNet(
            *(2, settings.width, settings.interactions),
            energy=float(self.train.energies.mean()) / self.train.kinds.shape[1],
            scale=float(self.train.forces.square().mean().sqrt()),
        ).to(device)
        self.model = ForceLoss(potential, settings.energy_weight)
        self.steps_per_epoch = settings.train_size // settings.batch_size
        self.optimizer = torch.optim.Adam(potential.parameters(), lr=settings.lr)
        self.scheduler = cosine(self.optimizer, settings.epochs * self.steps_per_epoch)

    @cached_property
    def test(self) -> Configurations:
        """The same for all seeds."""
        return make_configurations(self.settings.test_size, self.settings.side, _TEST_SEED).to(self.device)

    def batches(self, epoch: int) -> Iterator[Configurations]:
        return self.train.batches(self.settings.batch_size, seed=1000 * self.seed + epoch)

    def loss(self, batch: Configurations) -> Tensor:
        return self.model(batch)

    def evaluate(self) -> float:
        self.model.eval()
        total = 0.0
        for batch in self.test.batches(self.settings.batch_size):
            _, forces = self.model.potential(batch.kinds, batch.positions)
            total += float((forces - batch.forces).abs().sum()) / batch.forces[0].numel()
        self.model.train()
        return total / len(self.test)

    def use_checkpoints(self) -> None:
        raise RecipeError("--variants checkpoint is not possible: forces are gradients inside of the forward pass")


RECIPE = Recipe(
    module="recipes.forces",
    description=__doc__,
    settings=ForceSettings,
    task=ForceTask,
    metric=Metric("force_error", "force error"),
    variants=("plain", POLICY),
)
main = partial(command_line.main, RECIPE)

if __name__ == "__main__":
    sys.exit(main())
