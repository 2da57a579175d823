"""Backward quantization in ``lightning.Trainer``: `LightningCallback`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor, nn

from brevact.autograd import region
from brevact.autograd.hooks import regions_of
from brevact.reports.gradient_passes import Loss, check_loss
from brevact.trainers.training_policy import TrainingPolicy


class LightningCallback(Callback):
    """Lets a ``LightningModule`` store packed activations while ``trainer.fit`` runs.

    The module gets the policy when training starts, and is as it was when it ends. ``training_step`` runs in the region
    of the module itself, the loss that it computes included. Logged are bytes stored, and noise, by the module's own
    ``log_dict``. Checkpoints hold the state of the callback, from which ``fit(ckpt_path=...)`` goes on.

    >>> from brevact.trainers import LightningCallback
    >>> callback = LightningCallback("default", adapt_every=500)
    >>> callback.policy.spec.text
    'default'

    Args:
        policy: as in :class:`TrainingPolicy`, and so are the next four.
        adapt_every: optimizer steps.
        mix_schedule: text.
        noise_every: optimizer steps.
        memory: whether stored bytes are measured.
        loss: takes the module and a batch, and returns a scalar, for what is measured; left out, it is what
            ``training_step(batch, 0)`` of a copy of the module returns, at the trainer's precision.
        batches: what is measured on; left out, those that the training data begins with.

    Raises:
        OSError: ``policy`` is the path of a file that cannot be read.
        TypeError: an argument has another type.
        ValueError: a text is not understood, or a number is out of range.
    """

    def __init__(
        self,
        policy: Any = "default",
        *,
        adapt_every: int | None = None,
        mix_schedule: str | None = None,
        noise_every: int | None = None,
        memory: bool = True,
        loss: Loss | None = None,
        batches: Iterable[Any] | None = None,
    ) -> None:
        if loss is not None:
            check_loss(loss)
        self.policy = TrainingPolicy(
            policy, adapt_every=adapt_every, mix_schedule=mix_schedule, noise_every=noise_every, memory=memory
        )
        self._loss, self._batches, self._steps = loss, batches, 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Give the module its policy, with the state of a checkpoint where the run goes on from one."""
        batches = trainer.train_dataloader if self._batches is None else self._batches
        if isinstance(batches, Mapping) or (self._batches is None and isinstance(batches, list | tuple)):
            raise ValueError("batches: the training data are several loaders; pass batches=, a list of batches")
        steps = int(trainer.estimated_stepping_batches) if trainer.estimated_stepping_batches < float("inf") else None
        self._steps = trainer.global_step
        self.policy.begin(pl_module, batches, self._loss or _loss_of(trainer), steps=steps)
        if "training_step" not in vars(pl_module):  # else it was compiled, with the module as it is
            pl_module.training_step = MethodType(_step_in_region, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the optimizer step, if the batch ended in one, and log figures."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self.policy.step()
        figures = self.policy.figures()
        if figures:
            pl_module.log_dict(figures)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the policy off the module."""
        self._leave(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the policy off the module of a run that fails or is interrupted."""
        self._leave(pl_module)

    def _leave(self, pl_module: nn.Module) -> None:
        step = vars(pl_module).get("training_step")
        if isinstance(step, MethodType) and step.__func__ is _step_in_region:
            del pl_module.training_step
        self.policy.end()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the callback."""
        return self.policy.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint when training starts."""
        self.policy.load_state_dict(state_dict)


def _step_in_region(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The `training_step` of a module's class, in the region of the module, which hooks enter for `forward` alone."""
    with _region_of(module):
        return type(module).training_step(module, *args, **kwargs)  # type: ignore[attr-defined]


class _NoRegion:
    def __enter__(self) -> None: ...

    def __exit__(self, *exc_info: object) -> None: ...


def _region_of(module: nn.Module) -> Any:
    found = regions_of(module)
    return region(found[-1].settings) if found else _NoRegion()


def _loss_of(trainer: Any) -> Loss:
    """The loss of a copy of the module, whose `training_step` logs nothing."""

    def loss(module: nn.Module, batch: Any) -> Tensor:
        step = type(module).training_step  # type: ignore[attr-defined]
        args = (batch, 0) if len(inspect.signature(step).parameters) > 2 else (batch,)
        with trainer.precision_plugin.train_step_context(), _region_of(module), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*self.log.*")
            found = step(module, *args)
        found = found.get("loss") if isinstance(found, Mapping) else found
        if not isinstance(found, Tensor):
            raise ValueError(
                "loss: training_step(batch, 0) returns none (manual optimization?); pass loss=, a function of the "
                "module and a batch, or memory=False"
            )
        return found

    return loss
