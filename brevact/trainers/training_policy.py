"""A policy over a training run: attached, fitted, adapted, measured, and part of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from brevact.arguments import check_model
from brevact.autograd.seeds import noise_count
from brevact.bit_widths.adaptive import Adaptive
from brevact.bit_widths.spec import PolicySpec
from brevact.policy.presets import Policy
from brevact.reports.gradient_passes import Loss
from brevact.reports.memory_table import MemoryReport
from brevact.tables import MIB
from brevact.trainers.arguments import check_flags, check_run, check_steps, check_values, mix_of, spec_of
from brevact.trainers.attached import AttachedPolicy
from brevact.trainers.batches import device_of, first_batches, kept_random_state, moved
from brevact.trainers.run import BATCHES, FIRST_STATE, Run
from brevact.user_lines import warn


class TrainingPolicy:
    """Backward quantization for a training run in any loop: ``begin``, ``step``, ``figures`` and ``end``.

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
    ...     with brevact.backward_quant(model):
    ...         value = loss(model, batch)
    ...     value.backward()
    ...     policy.step()  # beside optimizer.step()
    >>> sorted(policy.figures())
    ['brevact/bit_width', 'brevact/plain_mib', 'brevact/saved_mib']
    >>> policy.end()  # the model stores what it stored before

    Args:
        policy: a text that :func:`brevact.parse_policy` reads, or a policy as :func:`brevact.quantize_backward` takes
            it; None for the policy that the model has.
        adapt_every: steps from one measurement of the layers' sensitivities to the next (:class:`brevact.Adaptive`):
            bits move, bytes stay; None for widths that stay.
        mix_schedule: schedule of quantizers that mix two widths (:class:`brevact.MixSchedule`), as text:
            "cosine:start=0.9,end=0.1"; ``steps`` is by default that of the run. None for no schedule.
        noise_every: steps from one measurement of the gradients' noise to the next; None for none.
        memory: whether stored bytes are measured when the run begins, by two forward passes of the model, which take
            no more memory than a step.
        quick_fit: whether a budget is fitted by ``brevact.fit(..., quick=True)``, on parts of batches; False for whole
            batches, which takes two passes and more for each layer before the first step.

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
        quick_fit: bool = True,
    ) -> None:
        check_flags(memory=memory, quick_fit=quick_fit)
        self._policy = AttachedPolicy(spec_of(policy), quick_fit=quick_fit)
        check_steps(adapt_every=adapt_every, noise_every=noise_every)
        self._adapt_every, self._noise_every, self._measures_memory = adapt_every, noise_every, memory
        self._mix = None if mix_schedule is None else mix_of(mix_schedule)
        #: Bytes that a training step stores, measured when the run begins; None before.
        self.memory: MemoryReport | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._ended: dict[str, Any] | None = None
        self._run: Run | None = None

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
        """Give a model the policy of the run, and measure the stored bytes. Random generators stay as they are.

        In a distributed run, call it in all processes; rank 0 fits.

        Args:
            model: the model inside of wrappers: ``accelerator.unwrap_model(model)``.
            batches: a data loader, whose first batches are copied to the model's device, or a list; needed by budgets,
                ``adapt_every`` and ``noise_every``. An iterator loses the batches that are taken from it.
            loss: takes the model and a batch, and returns a scalar; needed where ``batches`` are. It runs in the region
                of the model, as in ``with brevact.backward_quant(model):``.
            steps: number of steps of the run, for a schedule that does not name its own.
            prepare: applied to a batch before the model gets it; by default the batch is moved to the model's device.

        Raises:
            TypeError: ``model`` is no module, ``batches`` no batches, or ``loss`` no function.
            ValueError: the model has a policy already; batches, a loss or steps are missing; or an error of
                :func:`brevact.fit`, :class:`brevact.Adaptive` or :class:`brevact.MixSchedule`.
        """
        check_model(model, "begin(model, batches, loss)", batches)
        check_run(batches, loss)
        check_steps(steps=steps)
        self.end()  # of a run that was interrupted
        self._policy.take(model)
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
        """Give the model its policy; measure bytes, if asked for, or if widths that move are to keep them."""
        self._policy.attach(run.batches, run.loss, rules)
        run.memory = None
        if self._measures_memory or self._adapt_every:
            run.measure()
        self.memory = run.memory
        if self._adapt_every is not None:
            budget = {} if self.spec is None else self.spec.budget
            has_bytes = {"ratio", "saved_bytes"} & budget.keys()
            run.adapt(self._adapt_every, None if has_bytes else budget.get("peak_bytes"))

    def _needs_batches(self, state: Mapping[str, Any] | None) -> list[str]:
        found = []
        if self.spec is not None and self.spec.needs_fit and (state is None or state["rules"] is None):
            found.append(f"policy {self.spec.text!r}")
        given = {"adapt_every": self._adapt_every, "noise_every": self._noise_every}
        return found + [name for name, value in given.items() if value is not None]

    def step(self) -> None:
        """Count one training step; call it beside ``optimizer.step()``, in all processes of a distributed run.

        Raises:
            ValueError: the run has not begun.
        """
        if self._run is None:
            raise ValueError("step(): the run has not begun; call begin(model, batches, loss) first")
        with kept_random_state():
            self._run.step(self._noise_every)

    def figures(self) -> dict[str, float]:
        """Return figures for a logger: MiB stored, and at full precision; noise; mean bit width; mixing probability.

        The noise is the last one measured, or that of a fitted policy, in units of the noise between minibatches.
        Unknown figures are left out.
        """
        found: dict[str, float] = {}
        if self.memory is not None:
            found["brevact/saved_mib"] = self.memory.saved_bytes / MIB
            found["brevact/plain_mib"] = self.memory.plain_bytes / MIB
        if self.fitted is not None and self.fitted.report is not None:
            found["brevact/noise"] = self.fitted.report.noise
        return found if self._run is None else found | self._run.figures()

    def end(self) -> None:
        """Take the policy off the model again, if this object gave it one; figures and a fitted policy stay."""
        if self._run is None:
            return
        self._policy.release()
        self._ended = self.state_dict()  # a trainer may save its last checkpoint now
        self._run = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next steps depend on, as plain values that JSON holds.

        That of a run that has ended stays; between a checkpoint that was loaded and the run that goes on from it, it is
        that of the checkpoint.
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
        """Go on from a checkpoint: at once, or where the run has not begun, when it begins.

        A state of another policy text is left aside with a warning: what is asked for now applies.

        Args:
            state: what :meth:`state_dict` returned.

        Raises:
            TypeError: ``state`` is no mapping, or a value in it of another type.
            ValueError: it is of another version, or does not fit the model; a run that has begun ends then.
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
        except BaseException:  # a part may be loaded
            self.end()
            raise
