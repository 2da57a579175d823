"""The task, metric and description that each recipe of a field provides."""

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recipes.errors import RecipeError
from recipes.options import Limit, check_limits, setting
from recipes.torchvision_ops import declare_missing_ops

#: Commands for libraries whose import name is not pip's, or whose dependencies need another torch.
_INSTALL = {
    "segmentation_models_pytorch": "pip install --no-deps segmentation-models-pytorch timm torchvision",
    "torchvision": "pip install --no-deps torchvision",
    **dict.fromkeys(("bitsandbytes", "datasets", "trl"), "pip install '.[trainers]'"),
    **dict.fromkeys(("liger_kernel", "triton"), "pip install liger-kernel"),
}

#: A context that a training step's forward pass and loss run in.
Region = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class DomainSettings:
    """Settings of a run, without its variant and its seed. Every field is an option of the same name.

    A recipe adds fields of its own, and limits of them, in a subclass.
    """

    LIMITS: ClassVar[tuple[Limit, ...]] = (
        ("epochs", lambda value: value >= 1, "use at least 1"),
        ("batch_size", lambda value: value >= 1, "use at least 1"),
        ("lr", lambda value: value > 0, "use a value above 0"),
    )

    epochs: int = setting(8, "passes over the training data", type=int)
    batch_size: int = setting(2, "samples in a training step", type=int)
    lr: float = setting(1e-3, "largest learning rate", type=float)

    def __post_init__(self) -> None:
        check_limits(self, self.LIMITS)


class Task:
    """One training: a model, its data, its loss and its metric. A recipe derives a class from it.

    Args:
        settings: of the run.
        seed: of weights, training data and batches; torch's generator has it already.
        device: of the model and the batches.
    """

    #: In training mode; gets the policy.
    model: nn.Module
    optimizer: torch.optim.Optimizer
    #: Stepped after the optimizer, if there is one.
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    #: Optimizer steps in an epoch.
    steps_per_epoch: int
    #: Of `brevact.quantize_backward`, with every policy.
    policy_settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, settings: Any, seed: int, device: torch.device) -> None:
        raise NotImplementedError

    def batches(self, epoch: int) -> Iterable[Any]:
        """Yields the batches of an epoch, counted from 1, which depend on the seed and the epoch alone."""
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch, autocast included; called inside of the variant's region."""
        raise NotImplementedError

    def evaluate(self) -> float:
        """The metric on data that are the same for all seeds; leaves the model in training mode."""
        raise NotImplementedError

    def use_checkpoints(self) -> None:
        """Lets the blocks of the model keep their inputs alone (gradient checkpointing), as users of the library do."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Called after each optimizer step of a training, such as for an average of the weights."""

    def train_epoch(self, epoch: int, region: Region, on_step: Callable[[], object]) -> float:
        """Takes a step for each batch; a recipe replaces it only if a library brings a loop of its own.

        Args:
            epoch: counted from 1.
            region: of the forward pass and the loss.
            on_step: called after each step.

        Returns:
            The mean loss.
        """
        losses = []
        for batch in self.batches(epoch):
            losses.append(self.step(batch, region))
            self.after_step()
            on_step()
        return float(torch.stack(losses).mean())

    def step(self, batch: Any, region: Region) -> Tensor:
        """Takes one optimizer step and returns the loss, detached."""
        self.optimizer.zero_grad(set_to_none=True)
        with region():
            loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """State of the next epoch beside model, optimizer, scheduler and torch's generators: none by default."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""

    def show(self, path: Path) -> None:
        """Draws results of the trained model to a PNG file, for each variant's first seed; by default, nothing."""


@dataclass(frozen=True)
class Metric:
    """The figure that a recipe judges its runs by."""

    name: str
    words: str
    higher_is_better: bool
    spec: str = ".4f"


@dataclass(frozen=True)
class Domain:
    """The recipe of a field.

    Attributes:
        module: where it lies, such as "recipes.segmentation3d"; its attribute `DOMAIN` is this.
        description: of the help text.
        settings: class of the settings.
        task: from settings, a seed and a device to a training.
        metric: compares runs.
        libraries: that the task imports, by the names that Python has for them.
        variants: that are trained by default; all but "plain" and "checkpoint" are names of policies.
    """

    module: str
    description: str
    settings: type[DomainSettings]
    task: Callable[[Any, int, torch.device], Task]
    metric: Metric
    libraries: tuple[str, ...] = ()
    variants: tuple[str, ...] = ("plain", "checkpoint", "DEFAULT", "RECOMPUTE")

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]


def checkpoint_each(modules: Iterable[nn.Module]) -> None:
    """Lets modules keep their inputs alone for the backward pass, and recompute the rest; in place."""
    for module in modules:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def library(name: str) -> ModuleType:
    """Imports a library, or a module of one."""
    check_libraries([name.partition(".")[0]])
    declare_missing_ops()  # of torchvision, which many libraries import if it is there
    return importlib.import_module(name)


def check_libraries(names: Iterable[str]) -> None:
    """Finds out whether libraries are installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        commands = dict.fromkeys(_INSTALL.get(name, "pip install '.[domains]'") for name in missing)
        raise RecipeError(f"{', '.join(missing)} cannot be imported; install by {' and '.join(commands)}")
