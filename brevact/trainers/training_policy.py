"""Attach, fit, adapt, measure and checkpoint a policy over a training run."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from brevact.arguments import check_model, check_state
from brevact.autograd import has_region
from brevact.autograd.region.running import is_distributed
from brevact.autograd.region.seeds import noise_count
from brevact.bit_widths.adaptive import Adaptive
from brevact.bit_widths.spec import PolicySpec, parse_policy
from brevact.policy.attach import quantize_backward, region_of_step, restore_backward
from brevact.policy.presets import Policy
from brevact.policy.rules import has_policy
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_bool, check_int
from brevact.reports.gradient_noise import Loss, check_loss
from brevact.reports.in_place import holds_graphs, kept_random_state, uncompiled
from brevact.reports.memory import memory_of
from brevact.reports.memory_table import MemoryReport
from brevact.reports.step import StepLoss, device_of
from brevact.tables import MIB
from brevact.user_lines import warn

_ZERO_3 = "DeepSpeed's ZeRO-3 no longer gathers weights for its steps after passes that measure"


def spec_of(policy: Any) -> PolicySpec | None:
    """Return a policy's spec, parsed if it is text; None for the policy that a model has."""
    if policy is None:
        return None
    if isinstance(policy, PolicySpec):
        return policy
    if isinstance(policy, str | os.PathLike):
        return parse_policy(policy)
    if not isinstance(policy, Policy):
        Policy(policy if isinstance(policy, Mapping) else {"*": policy})  # raises unless valid
    text = brief(policy.rules if isinstance(policy, Policy) else policy)
    return PolicySpec(re.sub(r" at 0x[0-9a-f]+", "", text), policy)  # the same in the process that resumes


def _generators_of(loader: Any) -> Iterator[torch.Generator]:
    holders, found = [loader], set()
    while holders:
        holder = holders.pop()
        if holder is None or id(holder) in found:
            continue
        found.add(id(holder))
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and id(generator) not in found:
            found.add(id(generator))
            yield generator
        holders += [getattr(holder, name, None) for name in ("base_dataloader", "batch_sampler", "sampler")]


def first_batches(loader: Iterable[Any], count: int) -> list[Any]:
    """Return at most `count` first batches of a loader (Accelerate's, too) or list; later iterations are unchanged."""
    # Accelerate's prepared loader counts its passes for gradient accumulation: the inner one does not.
    plain = getattr(loader, "base_dataloader", loader)
    states = [(generator, generator.get_state()) for generator in _generators_of(loader)]
    try:
        with kept_random_state():
            iterator = iter(plain)
            found = list(itertools.islice(iterator, count))
            del iterator  # ends its workers
    finally:
        for generator, state in states:
            generator.set_state(state)
    return found


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, tuple | list):
        found = [moved(each, device) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


def in_region(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function of a model in the model's region, which hooks enter only for `forward`."""

    @functools.wraps(function)
    def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with region_of_step(model):
            return function(model, *args, **kwargs)

    return run


_log = logging.getLogger(__name__)
#: Batches for fitting a policy and measuring sensitivities.
_BATCHES = 8
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
    >>> policy.end()  # detaches the policy

    Args:
        policy: text for :func:`brevact.parse_policy`, whose budget is fitted by ``brevact.fit(..., quick=True)``, or a
            policy for :func:`brevact.quantize_backward`; None for the policy that the model has.
        adapt_every: steps between measurements of the layers' sensitivities (:class:`brevact.Adaptive`), which move
            bits between layers at constant bytes; None for fixed widths.
        memory: whether to measure saved bytes when the run begins, by two forward passes of the model, which take no
            more memory than a step.

    Raises:
        OSError: ``policy`` is the path of an unreadable file.
        TypeError: an argument has the wrong type.
        ValueError: a text cannot be parsed, or a number is out of range.
    """

    def __init__(self, policy: Any = "default", *, adapt_every: int | None = None, memory: bool = True) -> None:
        check_bool("memory", memory)
        #: The requested policy; None for the policy that the model has.
        self.spec: PolicySpec | None = spec_of(policy)
        #: The policy fitted to a budget; None without a budget.
        self.fitted: Policy | None = None
        self._shows_progress = True
        if adapt_every is not None:
            check_int("adapt_every", adapt_every, 1)
        self._adapt_every, self._measures_memory = adapt_every, memory
        #: Bytes that a training step saves, measured when the run begins; None before.
        self.memory: MemoryReport | None = None
        self._is_compiled = False
        self._resumed: Mapping[str, Any] | None = None
        self._ended: dict[str, Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self._model: nn.Module | None = None
        self._batches: list[Any] = []
        self._loss: Loss | None = None
        self._has_attached = False
        self._steps = 0
        #: The object that moves bits between layers in this run, or None.
        self.adaptive: Adaptive | None = None

    def begin(
        self,
        model: nn.Module,
        batches: Iterable[Any] = (),
        loss: Loss | None = None,
        *,
        prepare: Callable[[Any], Any] | None = None,
        progress: bool = True,
        compiled: bool = False,
    ) -> None:
        """Attach the run's policy to a model, and measure the saved bytes. Random generators are unchanged.

        In a distributed run, call it in all processes; budgets are fitted in runs of one process alone.

        Args:
            model: the unwrapped model: ``accelerator.unwrap_model(model)``.
            batches: a data loader, whose first batches are copied to the model's device, or a list; needed by budgets
                and ``adapt_every``. An iterator loses the batches that are taken from it.
            loss: takes the model and a batch, and returns a scalar; needed if ``batches`` are. It runs in the region of
                the model, as in ``with brevact.backward_quant(model):``.
            prepare: applied to a batch before the model gets it; by default moves the batch to the model's device.
            progress: whether fitting a budget shows a bar.
            compiled: whether the loop compiles the model: :meth:`figures` then has no bytes, which its graphs decide.

        Raises:
            TypeError: ``model`` is not a module, ``batches`` not iterable, or ``loss`` not a function.
            ValueError: the model already has a policy; batches or a loss are missing; or an error of
                :func:`brevact.fit` or :class:`brevact.Adaptive`.
        """
        check_model(model, "begin(model, batches, loss)", batches)
        if not isinstance(batches, Iterable):
            raise TypeError(
                f"batches: got {brief(batches)} of type {type(batches).__name__}; accepted is a data loader or a list"
            )
        if loss is not None:
            check_loss(loss)
        self.end()  # of an interrupted run
        self._shows_progress = progress
        owner = _owners[model]() if model in _owners else None
        if owner is not None and (owner.spec is None or has_policy(model)):
            raise ValueError(
                "model: another training policy is at work on it; a trainer takes one callback of brevact: remove the "
                "other, or, after a run that was interrupted, call its end()"
            )
        _owners[model] = weakref.ref(self)
        self._model, self._loss, self._ended = model, loss, None
        self._is_compiled = compiled or (self._adapt_every is not None and holds_graphs(model))
        try:
            with kept_random_state():
                self._start(model, batches, prepare or (lambda batch: moved(batch, device_of(model, ()))))
            if self._resumed is not None:
                noise_count(self._resumed["noise_count"])
                self._resumed = None
        except BaseException:
            self.end()
            raise

    def _start(self, model: nn.Module, batches: Iterable[Any], prepare: Callable[[Any], Any]) -> None:
        state = self._resumed
        needed = self._needs_batches(state)
        measures = self._measures_memory
        if any(hasattr(x, "ds_id") for x in model.parameters()):
            if needed:
                raise ValueError(f'{" and ".join(needed)}: {_ZERO_3}; fit in a run without it, and pass "policy.json"')
            if measures:
                warn(f"{_ZERO_3}: logs have no bytes (memory=False leaves this warning out)")
            measures = False
        if self._loss is not None and (needed or measures):
            self._batches = [prepare(batch) for batch in first_batches(batches, _BATCHES if needed else 1)]
        if needed and not self._batches:
            raise ValueError(
                f"{' and '.join(needed)}: measured on batches with a loss, of which there are none; pass both: "
                "begin(model, batches, loss)"
            )
        self._attach(model, None if state is None else state["rules"])
        if state is not None:
            self._load(state)

    def _attach(self, model: nn.Module, rules: str | None) -> None:
        """Attach the policy; measure bytes if requested or needed as the budget of `adapt_every`."""
        self._attach_policy(model, rules)
        self.memory = None
        if self._batches and (self._adapt_every or (self._measures_memory and not self._is_compiled)):
            assert self._loss is not None
            batch, loss = self._batches[0], StepLoss(self._loss)
            with uncompiled(self._is_compiled):
                self.memory = memory_of(model, lambda model: loss(model, batch))
            _log.info("a step stores %.1f of %.1f MiB", self.memory.saved_bytes / MIB, self.memory.plain_bytes / MIB)
        if self._adapt_every is None:
            return
        assert self.memory is not None and self._loss is not None
        budget = {"ratio": max(1.0, self.memory.ratio), "every": self._adapt_every}
        try:
            self.adaptive = Adaptive(model, self._batches[0], self._loss, **budget)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(
                f"adapt_every={self._adapt_every}, at the bytes that the policy stores: {error}; or pass a policy of "
                "more bits"
            ) from error

    def _attach_policy(self, model: nn.Module, rules: str | None) -> None:
        """Attach the policy, in place of an earlier one; fit a budget unless there are rules, as JSON."""
        if self.spec is None:
            if not (has_policy(model) or any(map(has_region, model.modules()))):
                raise ValueError(
                    "policy=None is the policy that the model has, and it has none; give it one, or pass a text, such "
                    'as "default"'
                )
            return
        if self._has_attached and has_policy(model):
            restore_backward(model)
        policy, self.fitted = self.spec.source, None
        if self.spec.needs_fit:
            if rules is None:
                if is_distributed() and distributed.get_world_size() > 1:
                    raise ValueError(
                        f"policy {self.spec.text!r}: a budget is fitted in a run of one process; save its policy there "
                        'by policy.save("policy.json"), and pass "policy.json"'
                    )
                _log.info("the policy %s is fitted to batches of the run, layer by layer", self.spec.text)
                options = {"quick": True, "progress": self._shows_progress}
                rules = self.spec.policy_for(model, self._batches, self._loss, **options).to_json()
            policy = self.fitted = Policy.from_json(rules)
        quantize_backward(model, policy)
        self._has_attached = True

    def _needs_batches(self, state: Mapping[str, Any] | None) -> list[str]:
        found = []
        if self.spec is not None and self.spec.needs_fit and (state is None or state["rules"] is None):
            found.append(f"policy {self.spec.text!r}")
        return found + ["adapt_every"] * (self._adapt_every is not None)

    def step(self) -> None:
        """Count one training step; call it next to ``optimizer.step()``, in all processes of a distributed run.

        Raises:
            ValueError: the run has not begun.
        """
        if self._model is None:
            raise ValueError("step(): the run has not begun; call begin(model, batches, loss) first")
        with kept_random_state():
            self._steps += 1
            if self.adaptive is not None:
                self.adaptive.step(self._batches[self._steps % len(self._batches)])

    def figures(self) -> dict[str, float]:
        """Return metrics for a logger: MiB saved, and at full precision; noise; mean bit width.

        The noise is a fitted policy's, in units of the noise between minibatches. Unknown metrics are left out.
        """
        found: dict[str, float] = {}
        if self.memory is not None and not self._is_compiled:
            found["brevact/saved_mib"] = (self.adaptive or self.memory).saved_bytes / MIB
            found["brevact/plain_mib"] = self.memory.plain_bytes / MIB
        if self.fitted is not None and self.fitted.report is not None:
            found["brevact/noise"] = self.fitted.report.noise
        if self.adaptive is not None:
            widths = self.adaptive.bit_widths.values()
            found["brevact/bit_width"] = sum(widths) / len(widths)
        return found

    def end(self) -> None:
        """Remove the policy from the model, if this object attached it; metrics and a fitted policy stay available."""
        if self._model is None:
            return
        model = self._model
        if self._has_attached and has_policy(model):
            restore_backward(model)
        if model in _owners and _owners[model]() is self:
            del _owners[model]
        self._ended = self.state_dict()  # a trainer may save its last checkpoint now
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next steps depend on, as plain JSON values.

        After a run ends, its last state; after loading a checkpoint and before the run begins, the checkpoint's.
        """
        if self._model is None and (kept := self._resumed or self._ended):
            return dict(kept)
        return {
            "policy": None if self.spec is None else self.spec.text,
            "rules": None if self.fitted is None else self.fitted.to_json(),
            "noise_count": noise_count(),
            "steps": self._steps,
            "adaptive": None if self.adaptive is None else self.adaptive.state_dict(),
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
        check_state(state, own)
        for name in ("steps", "noise_count"):
            check_int(f"state: {name}", state[name], 0)
        if state["rules"] is not None:
            Policy.from_json(state["rules"])  # raises unless valid
        if state["policy"] != own["policy"]:
            warn(
                f"the checkpoint's policy is {state['policy']!r}, that of this run {own['policy']!r}; the latter "
                "applies, from its beginning"
            )
            return
        if self._model is None:
            self._resumed = state
            return
        try:
            if state["rules"] is not None and state["rules"] != own["rules"]:
                with kept_random_state():
                    self._attach(self._model, state["rules"])
            self._load(state)
            noise_count(state["noise_count"])
        except BaseException:  # may be partly loaded
            self.end()
            raise

    def _load(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        if self.adaptive is not None and state["adaptive"] is not None:
            self.adaptive.load_state_dict(state["adaptive"])
