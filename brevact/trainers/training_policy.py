"""Attach, fit, adapt, measure and checkpoint a policy over a training run."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from brevact.arguments import check_model
from brevact.autograd import has_region
from brevact.autograd.seeds import noise_count
from brevact.bit_widths.adaptive import Adaptive
from brevact.bit_widths.spec import PolicySpec
from brevact.policy.attach import quantize_backward, restore_backward
from brevact.policy.presets import Policy
from brevact.policy.rules import has_policy
from brevact.quantizers.checks import check_bool
from brevact.reports.gradient_passes import Loss
from brevact.reports.in_place import kept_random_state
from brevact.reports.memory_table import MemoryReport
from brevact.tables import MIB
from brevact.trainers.arguments import check_run, check_steps, check_values, mix_of, refuse_to_fit, spec_of
from brevact.trainers.batches import device_of, first_batches, in_one_process, moved
from brevact.trainers.run import BATCHES, FIRST_STATE, Run
from brevact.user_lines import warn

_log = logging.getLogger(__name__)
#: The training policy of each model in a run.
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[TrainingPolicy]] = weakref.WeakKeyDictionary()


class TrainingPolicy:
    """Backward quantization for a training run in any loop: ``begin``, ``step``, ``figures`` and ``end``.

    A checkpoint holds plain values: a fitted policy as JSON text, widths as numbers. With Accelerate,
    ``accelerator.register_for_checkpointing(policy)`` saves and resumes it.

    >>> import torch, brevact
    >>> from brevact.trainers import TrainingPolicy
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    >>> batches = list(torch.randn(4, 128, 64))
    >>> loss = lambda model, batch: model(batch).square().mean()
    >>> policy = TrainingPolicy("default", adapt_every=2)
    >>> policy.begin(model, batches, loss)
    >>> for batch in batches:
    ...     with brevact.backward_quant(model):
    ...         value = loss(model, batch)
    ...     value.backward()
    ...     policy.step()  # beside optimizer.step()
    >>> sorted(policy.figures())
    ['brevact/bit_width', 'brevact/plain_mib', 'brevact/saved_mib']
    >>> policy.end()  # the model stores what it stored before

    Args:
        policy: text for :func:`brevact.parse_policy`, or a policy for :func:`brevact.quantize_backward`; None for the
            policy that the model has.
        adapt_every: steps between measurements of the layers' sensitivities (:class:`brevact.Adaptive`), which move
            bits between layers at constant bytes; None for fixed widths.
        mix_schedule: schedule of quantizers that mix two widths (:class:`brevact.MixSchedule`), as text:
            "cosine:start=0.9,end=0.1"; ``steps`` defaults to the length of the run. None for no schedule.
        noise_every: steps between measurements of the gradients' noise; None for no measurements.
        memory: whether to measure saved bytes when the run begins, by two forward passes of the model, which take no
            more memory than a step.
        quick_fit: whether to fit a budget by ``brevact.fit(..., quick=True)``, by a pass per layer before the first
            step; False takes two or more.

    Raises:
        OSError: ``policy`` is the path of an unreadable file.
        TypeError: an argument has the wrong type.
        ValueError: a text cannot be parsed, or a number is out of range.
    """

    def __init__(
        self,
        policy: Any = "default",
        *,
        adapt_every: int | None = None,
        mix_schedule: str | None = None,
        noise_every: int | None = None,
        memory: bool = True,
        quick_fit: bool = True,
    ) -> None:
        check_bool("memory", memory)
        check_bool("quick_fit", quick_fit)
        #: The requested policy; None for the policy that the model has.
        self.spec: PolicySpec | None = spec_of(policy)
        #: The policy fitted to a budget; None without a budget.
        self.fitted: Policy | None = None
        self._quick_fit = quick_fit
        check_steps(adapt_every=adapt_every, noise_every=noise_every)
        self._adapt_every, self._noise_every, self._measures_memory = adapt_every, noise_every, memory
        self._mix = None if mix_schedule is None else mix_of(mix_schedule)
        #: Bytes that a training step saves, measured when the run begins; None before.
        self.memory: MemoryReport | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._ended: dict[str, Any] | None = None
        self._run: Run | None = None

    @property
    def adaptive(self) -> Adaptive | None:
        """The object that moves bits between layers in this run, or None."""
        return None if self._run is None else self._run.adaptive

    def begin(
        self,
        model: nn.Module,
        batches: Iterable[Any] = (),
        loss: Loss | None = None,
        *,
        steps: int | None = None,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        """Attach the run's policy to a model, and measure the saved bytes. Random generators are unchanged.

        In a distributed run, call it in all processes; rank 0 fits.

        Args:
            model: the unwrapped model: ``accelerator.unwrap_model(model)``.
            batches: a data loader, whose first batches are copied to the model's device, or a list; needed by budgets,
                ``adapt_every`` and ``noise_every``. An iterator loses the batches that are taken from it.
            loss: takes the model and a batch, and returns a scalar; needed if ``batches`` are. It runs in the region of
                the model, as in ``with brevact.backward_quant(model):``.
            steps: number of steps of the run, for a schedule without ``steps``.
            prepare: applied to a batch before the model gets it; by default moves the batch to the model's device.

        Raises:
            TypeError: ``model`` is not a module, ``batches`` not iterable, or ``loss`` not a function.
            ValueError: the model already has a policy; batches, a loss or steps are missing; or an error of
                :func:`brevact.fit`, :class:`brevact.Adaptive` or :class:`brevact.MixSchedule`.
        """
        check_model(model, "begin(model, batches, loss)", batches)
        check_run(batches, loss)
        check_steps(steps=steps)
        self.end()  # of an interrupted run
        owner = _owners[model]() if model in _owners else None
        if owner is not None and (owner.spec is None or has_policy(model)):
            raise ValueError(
                "model: another training policy is at work on it; a trainer takes one callback of brevact: remove the "
                "other, or, after a run that was interrupted, call its end()"
            )
        _owners[model] = weakref.ref(self)
        self._run, self._ended = Run(model, [], loss), None
        try:
            with kept_random_state():
                self._start(self._run, batches, steps, prepare or (lambda batch: moved(batch, device_of(model))))
            if self._resumed is not None:
                noise_count(self._resumed["noise_count"])
                self._resumed = None
        except BaseException:
            self.end()
            raise

    def _start(self, run: Run, batches: Iterable[Any], steps: int | None, prepare: Callable[[Any], Any]) -> None:
        state = self._resumed
        needed = self._needs_batches(state)
        if run.loss is not None and (needed or self._measures_memory):
            found = first_batches(batches, BATCHES if needed else 1)
            run.batches = [prepare(batch) for batch in found]
        if needed and (run.loss is None or not run.batches):
            raise ValueError(
                f"{' and '.join(needed)}: measured on batches with a loss, of which there are none; pass both: "
                "begin(model, batches, loss)"
            )
        self._attach(run, None if state is None else state["rules"])
        if self._mix is not None:
            run.mix(*self._mix, steps)
        if state is not None:
            run.load_state_dict(state)

    def _attach(self, run: Run, rules: str | None) -> None:
        """Attach the policy; measure bytes if requested or needed as the budget of `adapt_every`."""
        self._attach_policy(run, rules)
        run.memory = None
        if self._measures_memory or self._adapt_every:
            run.measure()
        self.memory = run.memory
        if self._adapt_every is not None:
            run.adapt(self._adapt_every)

    def _attach_policy(self, run: Run, rules: str | None) -> None:
        """Attach the policy, in place of an earlier one; rank 0 fits a budget unless there are rules, as JSON."""
        model = run.model
        if self.spec is None:
            if not (has_policy(model) or any(map(has_region, model.modules()))):
                raise ValueError(
                    "policy=None is the policy that the model has, and it has none; give it one, or pass a text, such "
                    'as "default"'
                )
            return
        if run.has_attached and has_policy(model):
            restore_backward(model)
        policy, self.fitted = self.spec.source, None
        if self.spec.needs_fit:
            refuse_to_fit(model)
            if rules is None:
                _log.info("the policy %s is fitted to batches of the run, layer by layer", self.spec.text)
                options = {"quick": self._quick_fit, "progress": True}
                fitted = functools.partial(self.spec.policy_for, model, run.batches, run.loss, **options)
                rules = in_one_process(lambda: fitted().to_json(), device_of(model))
            policy = self.fitted = Policy.from_json(rules)
        quantize_backward(model, policy)
        run.has_attached = True

    def _needs_batches(self, state: Mapping[str, Any] | None) -> list[str]:
        found = []
        if self.spec is not None and self.spec.needs_fit and (state is None or state["rules"] is None):
            found.append(f"policy {self.spec.text!r}")
        given = {"adapt_every": self._adapt_every, "noise_every": self._noise_every}
        return found + [name for name, value in given.items() if value is not None]

    def step(self) -> None:
        """Count one training step; call it next to ``optimizer.step()``, in all processes of a distributed run.

        Raises:
            ValueError: the run has not begun.
        """
        if self._run is None:
            raise ValueError("step(): the run has not begun; call begin(model, batches, loss) first")
        with kept_random_state():
            self._run.step(self._noise_every)

    def figures(self) -> dict[str, float]:
        """Return metrics for a logger: MiB saved, and at full precision; noise; mean bit width; mixing probability.

        The noise is the last measurement, or a fitted policy's, in units of the noise between minibatches. Unknown
        metrics are left out.
        """
        found: dict[str, float] = {}
        if self.memory is not None:
            found["brevact/saved_mib"] = self.memory.saved_bytes / MIB
            found["brevact/plain_mib"] = self.memory.plain_bytes / MIB
        if self.fitted is not None and self.fitted.report is not None:
            found["brevact/noise"] = self.fitted.report.noise
        return found if self._run is None else found | self._run.figures()

    def end(self) -> None:
        """Remove the policy from the model, if this object attached it; metrics and a fitted policy stay available."""
        if self._run is None:
            return
        model = self._run.model
        if self._run.has_attached and has_policy(model):
            restore_backward(model)
        if model in _owners and _owners[model]() is self:
            del _owners[model]
        self._ended = self.state_dict()  # a trainer may save its last checkpoint now
        self._run = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next steps depend on, as plain JSON values.

        After a run ends, its last state; after loading a checkpoint and before the run begins, the checkpoint's.
        """
        if self._run is None and (kept := self._resumed or self._ended):
            return dict(kept)
        return {
            "policy": None if self.spec is None else self.spec.text,
            "rules": None if self.fitted is None else self.fitted.to_json(),
            "noise_count": noise_count(),
            **(FIRST_STATE if self._run is None else self._run.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint: at once, or when the run begins.

        A state with another policy text is ignored with a warning: the policy of this object applies.

        Args:
            state: result of :meth:`state_dict`.

        Raises:
            TypeError: ``state`` is not a mapping, or a value in it has the wrong type.
            ValueError: ``state`` is of another version, or does not fit the model; this ends a run that has begun.
        """
        own = self.state_dict()
        check_values(state, own)
        if state["policy"] != own["policy"]:
            warn(
                f"the checkpoint's policy is {state['policy']!r}, that of this run {own['policy']!r}; the latter "
                "applies, from its beginning"
            )
            return
        if self._run is None:
            self._resumed = state
            return
        try:
            if state["rules"] is not None and state["rules"] != own["rules"]:
                with kept_random_state():
                    self._attach(self._run, state["rules"])
            self._run.load_state_dict(state)
            noise_count(state["noise_count"])
        except BaseException:  # may be partly loaded
            self.end()
            raise
