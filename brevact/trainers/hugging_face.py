"""Backward quantization in ``transformers.Trainer``: `HuggingFaceCallback`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from brevact.policy.attach import region_of_step
from brevact.reports.gradient_noise import Loss, check_loss
from brevact.trainers.training_policy import TrainingPolicy, in_region


class HuggingFaceCallback(TrainerCallback, ExportableState):
    """Makes the model of a Hugging Face ``Trainer`` save packed activations while it trains.

    The model has the policy only while it trains: ``save_model`` writes no brevact keys. Logs of the training loss
    include the saved bytes and the gradient noise. Checkpoints hold the state in ``trainer_state.json``, from which
    ``resume_from_checkpoint`` resumes; ``restore_callback_states_from_checkpoint`` of the trainer also restores the
    arguments, if policy and loss are texts or left out.

    ``Trainer(..., callbacks=[callback])`` is enough. :meth:`add_to` also measures with the trainer's ``compute_loss``,
    computes that loss in the model's region, so that a loss outside the model packs, too, and passes metrics to loggers
    that run before user callbacks (TensorBoard, W&B).

    >>> from brevact.trainers import HuggingFaceCallback
    >>> callback = HuggingFaceCallback("24x", adapt_every=500)
    >>> callback.policy.spec.budget
    {'ratio': 24.0}

    Args:
        policy: as in :class:`TrainingPolicy`.
        loss: for measurements, takes the model and a batch, and returns a scalar; by default the loss that the model
            returns for a batch with labels.
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
        policy = os.fsdecode(policy) if isinstance(policy, os.PathLike) else policy
        is_text = policy is None or isinstance(policy, str)
        self._arguments = {"policy": policy if is_text else "(an object, which JSON cannot hold)", **options}
        if loss is not None:
            self._arguments["loss"] = "(a function, which JSON cannot hold)"
        self.policy = TrainingPolicy(policy, **options)
        self._loss, self._batches = loss, batches
        self._trainer: weakref.ref[Any] | None = None
        self._run: weakref.ref[Any] | None = None
        self._compute_loss: Callable[..., Any] | None = None

    def add_to(self, trainer: Any) -> HuggingFaceCallback:
        """Add the callback to a trainer, before its others, and measure with the trainer's own loss.

        Args:
            trainer: a ``transformers.Trainer`` or a subclass.

        Returns:
            The callback.

        Raises:
            ValueError: the trainer already has a callback of this class.
        """
        handler = trainer.callback_handler
        if any(isinstance(each, HuggingFaceCallback) for each in handler.callbacks):
            raise ValueError("trainer: it has a callback of brevact already; a trainer takes one")
        trainer.add_callback(self)
        handler.callbacks.remove(self)
        handler.callbacks.insert(0, self)
        self._trainer = weakref.ref(trainer)
        return self

    def state(self) -> dict[str, Any]:
        """Return the callback's state for a checkpoint."""
        return {"args": self._arguments, "attributes": {"saved_state": self.policy.state_dict()}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the policy, with the checkpoint's state in a resumed run."""
        if self._run is not None and self._run() is state:
            raise ValueError("callbacks: this callback of brevact stands in them twice; a trainer takes it once")
        self._run = weakref.ref(state)
        saved = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(saved, list):
            raise ValueError("callbacks: two callbacks of brevact are among them; a trainer takes one")
        if state.global_step and saved:
            self.policy.end()
            self.policy.load_state_dict(saved["attributes"]["saved_state"])
        # When it saves, the trainer looks up each callback in the states of its checkpoint, which may lack this one.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        batches = kwargs["train_dataloader"] if self._batches is None else self._batches
        model, loss, progress = kwargs["model"], self._loss_of_run(), not args.disable_tqdm
        self.policy.begin(model, batches, loss, progress=progress, compiled=args.torch_compile)
        self._enter_trainer()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count an optimizer step."""
        self.policy.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add metrics to logs of the training loss, and to the trainer's history."""
        if logs is not None and "loss" in logs:
            logs.update(self.policy.figures())
            state.log_history[-1].update(self.policy.figures())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the policy from the model."""
        self.policy.end()
        self._run = None
        self._leave_trainer()

    def _enter_trainer(self) -> None:
        trainer = None if self._trainer is None else self._trainer()
        if trainer is not None and "compute_loss" not in vars(trainer):  # else someone replaced it
            self._compute_loss = trainer.compute_loss = in_region(trainer.compute_loss)

    def _leave_trainer(self) -> None:
        trainer = None if self._trainer is None else self._trainer()
        if trainer is not None and vars(trainer).get("compute_loss") is self._compute_loss is not None:
            del trainer.compute_loss
        self._compute_loss = None

    def _loss_of_run(self) -> Loss:
        trainer = None if self._trainer is None else self._trainer()
        if self._loss is not None:
            return self._loss
        if trainer is None:
            return _loss_of_model

        def loss(model: nn.Module, batch: Any) -> Tensor:
            with trainer.compute_loss_context_manager(), region_of_step(model):
                return trainer.compute_loss(model, dict(batch))

        return loss


def _loss_of_model(model: nn.Module, batch: Any) -> Tensor:
    found = model(**batch)
    loss = found.get("loss") if hasattr(found, "get") else getattr(found, "loss", None)
    if loss is None:
        raise ValueError(
            "loss: the model returns none for a batch of the training data (no labels?); pass loss=, a function of the "
            "model and a batch, or add the callback by add_to(trainer), whose compute_loss then counts"
        )
    return loss
