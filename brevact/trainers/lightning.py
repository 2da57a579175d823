"""Backward quantization in ``lightning.Trainer``: `LightningCallback`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from brevact.policy.attach import region_of_step
from brevact.reports.gradient_noise import Loss, check_loss
from brevact.trainers.training_policy import TrainingPolicy, in_region

_NO_LOSS = (
    "loss: training_step(batch, 0) returns none (manual optimization?); pass loss=, a function of the module and a "
    "batch, or memory=False"
)
_NO_TRAINER = (
    "loss: training_step asks for its trainer, which a module that is measured has not, so that it logs nothing; pass "
    "loss=, a function of the module and a batch, or memory=False"
)


class LightningCallback(Callback):
    """Makes a ``LightningModule`` save packed activations while ``trainer.fit`` runs.

    The module has the policy only while it trains. ``training_step`` runs in the module's region, including its loss.
    The module's ``log_dict`` logs saved bytes and noise. Checkpoints hold the callback's state, from which
    ``fit(ckpt_path=...)`` resumes.

    >>> from brevact.trainers import LightningCallback
    >>> callback = LightningCallback("default", adapt_every=500)
    >>> callback.policy.spec.text
    'default'

    Args:
        policy: as in :class:`TrainingPolicy`.
        loss: for measurements, takes the module and a batch, and returns a scalar; by default the module's
            ``training_step(batch, 0)``, without a trainer, at the trainer's precision.
        batches: for measurements; by default the first batches of the training data.
        **options: ``adapt_every`` and ``memory`` of :class:`TrainingPolicy`; steps are those of the
            optimizer.

    Raises:
        OSError: ``policy`` is the path of an unreadable file.
        TypeError: an argument has the wrong type.
        ValueError: a text cannot be parsed, or a number is out of range.
    """

    def __init__(
        self, policy: Any = "default", *, loss: Loss | None = None, batches: Iterable[Any] | None = None, **options: Any
    ) -> None:
        if loss is not None:
            check_loss(loss)
        self.policy = TrainingPolicy(policy, **options)
        self._loss, self._batches, self._steps = loss, batches, 0
        self._training_step: Callable[..., Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the policy, with the checkpoint's state in a resumed run."""
        batches = trainer.train_dataloader if self._batches is None else self._batches
        if isinstance(batches, Mapping) or (self._batches is None and isinstance(batches, list | tuple)):
            raise ValueError("batches: the training data are several loaders; pass batches=, a list of batches")
        self._steps = trainer.global_step
        loss = self._loss or _loss_of(trainer)
        prepare, progress = _prepare_of(trainer, pl_module), trainer.progress_bar_callback is not None
        self.policy.begin(pl_module, batches, loss, prepare=prepare, progress=progress)
        if "training_step" not in vars(pl_module):  # else it was compiled together with the module
            step: Any = type(pl_module).training_step
            self._training_step = in_region(step)
            # The trainer unwraps one function for the argument names that select its arguments.
            self._training_step.__wrapped__ = getattr(step, "__wrapped__", step)  # type: ignore[attr-defined]
            pl_module.training_step = MethodType(self._training_step, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the optimizer step, if the batch ended in one, and log metrics."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self.policy.step()
        figures = self.policy.figures()
        if figures:
            pl_module.log_dict(figures, batch_size=1)  # metrics do not depend on the batch size

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the policy from the module."""
        self._leave(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the policy after a run that fails or is interrupted."""
        self._leave(pl_module)

    def _leave(self, pl_module: nn.Module) -> None:
        step = vars(pl_module).get("training_step")
        if isinstance(step, MethodType) and step.__func__ is self._training_step:
            del pl_module.training_step
        self._training_step = None
        self.policy.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state for a checkpoint."""
        return self.policy.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint when training starts."""
        self.policy.load_state_dict(state_dict)


def _prepare_of(trainer: Any, module: Any) -> Callable[[Any], Any] | None:
    """Return the trainer's processing of a batch before `training_step`; None for a step that takes iterators."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return None
    data = trainer.datamodule
    holder = data if data is not None and is_overridden("on_before_batch_transfer", data) else module

    def prepare(batch: Any) -> Any:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = holder.on_before_batch_transfer(batch, 0)
        return trainer.strategy.batch_to_device(batch)

    return prepare


def _loss_of(trainer: Any) -> Loss:
    """Return a module's `training_step` as a loss, detached from the trainer so that it logs nothing."""

    def loss(module: nn.Module, batch: Any) -> Tensor:
        if not module.automatic_optimization:
            raise ValueError(_NO_LOSS)
        step = type(module).training_step  # type: ignore[attr-defined]
        args: tuple[Any, ...] = (batch, 0) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else (batch,)
        if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            args = (iter([(batch, 0, 0)]),)
        with trainer.precision_plugin.train_step_context(), region_of_step(module), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*self.log.*")
            before, module.trainer = module._trainer, None  # type: ignore[assignment]
            try:
                found = step(module, *args)
            except RuntimeError as error:
                if "is not attached to a `Trainer`" not in str(error):
                    raise
                raise ValueError(_NO_TRAINER) from error
            finally:
                module.trainer = before
        found = found.get("loss") if isinstance(found, Mapping) else found
        if not isinstance(found, Tensor):
            raise ValueError(_NO_LOSS)
        return found

    return loss
