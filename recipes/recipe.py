"""The parts of a recipe: its settings, its task, which is one training, and its description."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.checkpoint import checkpoint

from recipes.torchvision_ops import declare_missing_ops

#: Commands for libraries whose import name is not pip's, or whose dependencies need another torch.
_INSTALL = {
    "segmentation_models_pytorch": "pip install --no-deps segmentation-models-pytorch timm torchvision",
    "torchvision": "pip install --no-deps torchvision",
    **dict.fromkeys(("bitsandbytes", "datasets", "trl"), "pip install '.[trainers]'"),
    **dict.fromkeys(("liger_kernel", "triton"), "pip install liger-kernel"),
}
#: Whether a value is accepted (None always is), and what to do if it is not.
Check = tuple[Callable[[Any], bool], str]
ABOVE_0: Check = (lambda value: value > 0, "use a value above 0")
SHARE: Check = (lambda value: 0 <= value < 1, "use a value from 0 to below 1")


class RecipeError(Exception):
    """An error and its fix; a recipe prints it without a traceback and exits with status 2."""


def setting(default: Any, text: str, *, least: int | None = None, check: Check | None = None, **argument: Any) -> Any:
    """A field of settings: its default, its line of the help text, its limit, and arguments for argparse."""
    if default is False:
        argument["action"] = "store_true"
    elif isinstance(default, int | float):
        argument["type"] = type(default)
    if least is not None:
        check = (lambda value: value >= least, f"use at least {least}")
    return field(default=default, metadata={"help": text, "check": check, "argument": argument})


def option(name: str) -> str:
    """The command-line option of a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Settings:
    """Settings of a run, without its variant and its seed. Every field is an option of the same name.

    A recipe adds fields of its own in a subclass.
    """

    epochs: int = setting(8, "passes over the training data", least=1)
    batch_size: int = setting(2, "samples in a training step", least=1)
    lr: float = setting(1e-3, "largest learning rate", check=ABOVE_0)

    def __post_init__(self) -> None:
        for item in fields(self):
            value, check = getattr(self, item.name), item.metadata["check"]
            if check is not None and value is not None and not check[0](value):
                raise RecipeError(f"{option(item.name)} {value} is not possible: {check[1]}")


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
    scheduler: LRScheduler | None = None
    #: Optimizer steps in an epoch.
    steps_per_epoch: int
    #: Of `brevact.quantize_backward`, with every policy.
    policy_settings: ClassVar[dict[str, Any]] = {}
    #: Makes the context of a forward pass and its loss.
    region: Callable[[], AbstractContextManager[object]] = nullcontext

    def __init__(self, settings: Any, seed: int, device: torch.device) -> None:
        self.settings, self.seed, self.device = settings, seed, device

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

    def train_epoch(self, epoch: int, on_step: Callable[[], object]) -> float:
        """Takes a step for each batch and returns the mean loss; replaced only if a library brings a loop of its own.

        Args:
            epoch: counted from 1.
            on_step: called after each step.
        """
        losses = []
        for batch in self.batches(epoch):
            losses.append(self.step(batch))
            if self.scheduler is not None:
                self.scheduler.step()
            self.after_step()
            on_step()
        return float(torch.stack(losses).mean())

    def step(self, batch: Any) -> Tensor:
        """Takes one optimizer step and returns the loss, detached."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.region():
            loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """State of the next epoch beside model, optimizer, scheduler and torch's generators: none by default."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`; the model has its state already, optimizer and scheduler get theirs next."""

    def show(self, path: Any) -> None:
        """Draws results of the trained model to a PNG file, for each variant's first seed; by default, nothing."""


@dataclass(frozen=True)
class Metric:
    """The figure that a recipe judges its runs by."""

    name: str
    words: str
    spec: str = ".4f"


@dataclass(frozen=True)
class Recipe:
    """A kind of training.

    Attributes:
        module: where it lies, such as "recipes.segmentation3d"; its attribute `RECIPE` is this.
        description: of the help text.
        settings: class of the settings.
        task: from settings, a seed and a device to a training.
        metric: compares runs.
        libraries: that the task imports, by the names that Python has for them.
        variants: that are trained by default; all but "plain" and "checkpoint" are names of policies.
        seeds: of the trainings of each variant.
    """

    module: str
    description: str
    settings: type[Settings]
    task: Callable[[Any, int, torch.device], Task]
    metric: Metric
    libraries: tuple[str, ...] = ()
    variants: tuple[str, ...] = ("plain", "checkpoint", "DEFAULT", "RECOMPUTE")
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]


def cosine(optimizer: torch.optim.Optimizer, steps: int, warmup: int | None = None, *, decay: bool = True) -> LambdaLR:
    """A linear warm-up, by default over a twentieth of the steps, then a cosine to zero, or a constant rate.

    f(t) = (t + 1) / (warmup + 1) for t < warmup, then (1 + cos(pi (t - warmup) / (steps - warmup))) / 2 or 1.
    """
    start = steps // 20 if warmup is None else warmup

    def factor(step: int) -> float:
        if step < start:
            return (step + 1) / (start + 1)
        return (1 + math.cos(math.pi * min(1.0, (step - start) / (steps - start)))) / 2 if decay else 1.0

    return LambdaLR(optimizer, factor)


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


def torch_device(name: str) -> torch.device:
    """The device of a name; "auto" takes CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # the meta device allocates but does not compute
    except (RuntimeError, AssertionError, ImportError) as error:
        raise RecipeError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
