"""A recipe without a library of its own: a regression whose model trains in milliseconds."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recipes import command_line
from recipes.recipe import Metric, Recipe, Settings, Task, setting


@dataclass(frozen=True)
class TinySettings(Settings):
    epochs: int = setting(2, "passes", least=1)
    batch_size: int = setting(64, "rows in a step", least=1)
    width: int = setting(64, "features of a row", least=8)


class Net(nn.Sequential):
    checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class TinyTask(Task):
    steps_per_epoch = 2

    def __init__(self, settings: TinySettings, seed: int, device: torch.device) -> None:
        super().__init__(settings, seed, device)
        width = settings.width
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.GELU()) for _ in range(2)]
        self.model = Net(*blocks, nn.Linear(width, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.steps = 0

    def batches(self, epoch):
        generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
        for _ in range(self.steps_per_epoch):
            x = torch.randn(self.settings.batch_size, self.settings.width, generator=generator)
            yield x, x.square().mean(1, keepdim=True)

    def loss(self, batch):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        x = torch.linspace(-1, 1, self.settings.width).repeat(4, 1)
        error = float(self.model(x).square().mean())
        self.model.train()
        return error

    def use_checkpoints(self):
        self.model.checkpointed = True

    def after_step(self):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def show(self, path):
        path.write_text(f"{self.steps} steps")


RECIPE = Recipe("tests.recipes.tiny", __doc__, TinySettings, TinyTask, Metric("error", "error"))
main = partial(command_line.main, RECIPE)
