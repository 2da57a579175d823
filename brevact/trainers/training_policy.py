"""A policy over a training run: attached, fitted, adapted, measured, and part of checkpoints."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from brevact.arguments import check_model
from brevact.bit_widths.adaptive import Adaptive
from brevact.bit_widths.spec import PolicySpec
from brevact.policy.mixing import MixSchedule
from brevact.policy.presets import Policy
from brevact.reports.gradient_passes import Loss
from brevact.reports.gradients import gradient_report
from brevact.reports.memory import memory_of
from brevact.reports.memory_table import MemoryReport
from brevact.tables import MIB
from brevact.trainers.arguments import check_run, check_state, check_steps, mix_of, spec_of
from brevact.trainers.attached import AttachedPolicy
from brevact.trainers.batches import device_of, first_batches, kept_random_state, moved

_log = logging.getLogger(__name__)
#: Batches on which a policy is fitted, and on which noise and sensitivities are measured.
_BATCHES = 8
#: Seeds a batch of a measurement of noise.
_DRAWS = 2


class TrainingPolicy:
    """What a training run does with backward quantization, in any loop: ``begin``, ``step``, ``figures`` and ``end``.

    Its state is plain values: a checkpoint holds a fitted policy as JSON text, widths as numbers. With Accelerate,
    ``accelerator.register_for_checkpointing(policy)`` saves and resumes it.

    >>> import torch, brevact
    >>> from brevact.trainers import TrainingPolicy
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    >>> batches = list(torch.randn(4, 128, 64))
    >>> loss = lambda model, batch: model(batch).square().mean()
    >>> policy = TrainingPolicy("default", adapt_every=2)
    >>> policy.begin(model, batches, loss)
    >>> for batch in batches:
    ...     loss(model, batch).backward()
    ...     policy.step()  # beside optimizer.step()
    >>> sorted(policy.figures())
    ['brevact/bit_width', 'brevact/plain_mib', 'brevact/saved_mib']
    >>> policy.end()  # the model stores what it stored before

    Args:
        policy: a text that :func:`brevact.parse_policy` reads, or what :func:`brevact.quantize_backward` takes; None
            for the policy that the model has.
        adapt_every: steps from one measurement of the layers' sensitivities to the next (:class:`brevact.Adaptive`):
            bits move, bytes stay; None for widths that stay.
        mix_schedule: of the probability of quantizers that mix two widths (:class:`brevact.MixSchedule`), as text:
            "cosine:start=0.9,end=0.1"; its ``steps`` are those of the run, if it does not say. None for none.
        noise_every: steps from one measurement of the gradients' noise to the next; None for none.
        memory: whether stored bytes are measured when the run begins, by two forward passes of a copy of the model.

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
    ) -> None:
        self._policy = AttachedPolicy(spec_of(policy))
        check_steps(adapt_every=adapt_every, noise_every=noise_every)
        self._adapt_every, self._noise_every, self._measures_memory = adapt_every, noise_every, memory
        self._mix = None if mix_schedule is None else mix_of(mix_schedule)
        #: Bytes that a training step stores, measured when the run begins; None before.
        self.memory: MemoryReport | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._ended: dict[str, Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self._model: nn.Module | None = None
        self._loss: Loss | None = None
        self._steps = 0
        self._noise: float | None = None
        self._batches: list[Any] = []
        self._adaptive: Adaptive | None = None
        self._schedule: MixSchedule | None = None

    @property
    def spec(self) -> PolicySpec | None:
        """What was asked for; None for the policy that the model has."""
        return self._policy.spec

    @property
    def fitted(self) -> Policy | None:
        """The policy that was fitted to a budget; None for others."""
        return self._policy.fitted

    @property
    def adaptive(self) -> Adaptive | None:
        """What moves bits between layers in this run."""
        return self._adaptive

    def begin(
        self,
        model: nn.Module,
        batches: Iterable[Any] = (),
        loss: Loss | None = None,
        *,
        steps: int | None = None,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        """Give a model the policy of the run, and measure what it stores. Random generators stay as they are.

        In a distributed run all processes call it; the one of rank 0 fits.

        Args:
            model: the one inside of wrappers: ``accelerator.unwrap_model(model)``.
            batches: a data loader, of whose first batches copies on the model's device are taken, or a list; needed by
                budgets, ``adapt_every`` and ``noise_every``. What is taken of an iterator is missing in it afterwards.
            loss: takes the model and a batch, and returns a scalar; needed by the same.
            steps: of the run, for a schedule that does not say.
            prepare: what the loop does with a batch before the model gets it; left out, it is moved to its device.

        Raises:
            TypeError: ``model`` is no module, ``batches`` no batches, or ``loss`` no function.
            ValueError: the model has a policy already; batches, a loss or steps are missing; or an error of
                :func:`brevact.fit`, :class:`brevact.Adaptive` or :class:`brevact.MixSchedule`.
        """
        check_model(model, "begin(model, batches, loss)", batches)
        check_run(batches, loss)
        self.end()  # of a run that was interrupted
        self._policy.take(model)
        self._model, self._ended = model, None
        try:
            with kept_random_state():
                self._start(model, batches, loss, steps, prepare or (lambda batch: moved(batch, device_of(model))))
        except BaseException:
            self.end()
            raise

    def _start(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        loss: Loss | None,
        steps: int | None,
        prepare: Callable[[Any], Any],
    ) -> None:
        state, self._resumed = self._resumed, None
        self._loss = loss
        needed = self._needs_batches(state)
        if loss is not None and (needed or self._measures_memory):
            found = first_batches(batches, _BATCHES if needed else 1)
            self._batches = [prepare(batch) for batch in found]
        if needed and (loss is None or not self._batches):
            raise ValueError(
                f"{' and '.join(needed)}: measured on batches with a loss, of which there are none; pass both: "
                "begin(model, batches, loss)"
            )
        self._policy.attach(self._batches, loss, None if state is None else state["rules"])
        self._measure()
        if self._adapt_every is not None:
            self._adapt(model, self._adapt_every)
        if self._mix is not None:
            kind, settings = self._mix
            if kind != "constant" and "steps" not in settings and steps is None:
                raise ValueError(f'mix_schedule={kind!r}: the run has no known length; add it: "{kind}:steps=1000"')
            self._schedule = MixSchedule(model, kind, **{"steps": max(1, steps or 1), **settings})
        if state is not None:
            self._load(state)

    def _needs_batches(self, state: Mapping[str, Any] | None) -> list[str]:
        found = []
        if self.spec is not None and self.spec.needs_fit and (state is None or state["rules"] is None):
            found.append(f"policy {self.spec.text!r}")
        given = {"adapt_every": self._adapt_every, "noise_every": self._noise_every}
        return found + [name for name, value in given.items() if value is not None]

    def _measure(self) -> None:
        """Measure bytes, if asked for, or if widths that move are to keep them."""
        self.memory = None
        loss, model = self._loss, self._model
        if self._batches and loss is not None and model is not None and (self._measures_memory or self._adapt_every):
            batch = self._batches[0]
            self.memory = memory_of(model, lambda copied: loss(copied, batch), batch)
            _log.info("a step stores %.1f of %.1f MiB", self.memory.saved_bytes / MIB, self.memory.plain_bytes / MIB)

    def _adapt(self, model: nn.Module, every: int) -> None:
        assert self.memory is not None and self._loss is not None
        if not self.memory.saved_bytes:
            raise ValueError(f"adapt_every={every}: the model stores nothing for backward: {self.memory.note}")
        ratio = max(1.0, self.memory.ratio)
        try:
            self._adaptive = Adaptive(model, self._batches[0], self._loss, ratio=ratio, every=every)
        except ValueError as error:
            raise ValueError(
                f"adapt_every={every}, at the bytes that the policy stores: {error}; or pass a policy of more bits"
            ) from error

    def step(self) -> None:
        """Go on by one training step; call it beside ``optimizer.step()``, in all processes of a distributed run.

        Raises:
            ValueError: the run has not begun.
        """
        if self._model is None:
            raise ValueError("step(): the run has not begun; call begin(model, batches, loss) first")
        self._steps += 1
        with kept_random_state():
            if self._adaptive is not None:
                self._adaptive.step(self._batches[self._steps % len(self._batches)])
            if self._schedule is not None:
                self._schedule.step()
            if self._noise_every is not None and self._steps % self._noise_every == 0:
                assert self._loss is not None
                report = gradient_report(
                    self._model, self._batches[: _BATCHES // 2], self._loss, None, _DRAWS, layers=None, progress=False
                )
                self._noise = report.noise

    def figures(self) -> dict[str, float]:
        """Return what a logger shows: MiB stored, and at full precision; noise; mean bit width; mixing probability.

        The noise is the last that was measured, or what was measured of a fitted policy, in units of the noise between
        minibatches. Figures that are not known are left out.
        """
        found: dict[str, float] = {}
        if self.memory is not None:
            saved = self.memory.saved_bytes if self._adaptive is None else self._adaptive.saved_bytes
            found |= {"brevact/saved_mib": saved / MIB, "brevact/plain_mib": self.memory.plain_bytes / MIB}
        of_fit = None if self.fitted is None or self.fitted.report is None else self.fitted.report.noise
        noise = of_fit if self._noise is None else self._noise
        if noise is not None:
            found["brevact/noise"] = noise
        if self._adaptive is not None:
            widths = self._adaptive.bit_widths.values()
            found["brevact/bit_width"] = sum(widths) / len(widths)
        if self._schedule is not None:
            found["brevact/mix_prob"] = self._schedule.mix_prob
        return found

    def end(self) -> None:
        """Take the policy off the model again, if this object gave it one; figures and a fitted policy stay."""
        if self._model is None:
            return
        self._policy.release()
        self._ended = self.state_dict()  # a trainer may save its last checkpoint now
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on, as plain values that JSON holds; that of a run that has ended stays."""
        if self._model is None and self._ended is not None:
            return self._ended
        return {
            "policy": None if self.spec is None else self.spec.text,
            "rules": None if self.fitted is None else self.fitted.to_json(),
            "steps": self._steps,
            "noise": self._noise,
            "adaptive": None if self._adaptive is None else self._adaptive.state_dict(),
            "mix_schedule": None if self._schedule is None else self._schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: at once, or where the run has not begun, when it begins.

        A state of another policy text is left aside with a warning: what is asked for now applies.

        Args:
            state: what :meth:`state_dict` returned.

        Raises:
            TypeError: ``state`` is no mapping, or a value in it of another type.
            ValueError: it is of another version, or does not fit the model; a run that has begun ends then.
        """
        own = self.state_dict()
        check_state(state, own)
        if state["policy"] != own["policy"]:
            warnings.warn(
                f"the checkpoint's policy is {state['policy']!r}, that of this run {own['policy']!r}; the latter "
                "applies, from its beginning",
                stacklevel=2,
            )
            return
        if self._model is None:
            self._resumed = state
            return
        try:
            if state["rules"] is not None and state["rules"] != own["rules"]:
                with kept_random_state():
                    self._policy.attach(self._batches, self._loss, state["rules"])
                    self._measure()
                    if self._adapt_every is not None:
                        self._adapt(self._model, self._adapt_every)
            self._load(state)
        except BaseException:  # a part may be loaded
            self.end()
            raise

    def _load(self, state: Mapping[str, Any]) -> None:
        self._steps, self._noise = state["steps"], state["noise"]
        for name, part in (("adaptive", self._adaptive), ("mix_schedule", self._schedule)):
            if part is not None and state[name] is not None:
                part.load_state_dict(state[name])
