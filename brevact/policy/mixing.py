"""The probability of the higher width over the steps of a training run."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from brevact.arguments import check_model, check_state
from brevact.autograd import BackwardSettings
from brevact.autograd.region.module_hooks import regions_of
from brevact.injectors import BackwardQuantProxy
from brevact.injectors.resolve import with_quantizers
from brevact.quantizers import MixingQuantizer
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_int, check_number

_KINDS = ("constant", "linear", "cosine", "step")
#: Decimals of probabilities between start and end: a run then has few settings, equal from step to step.
_DECIMALS = 3


class MixSchedule:
    """Schedules the share of buckets at the higher width over a training; call ``step()`` once per iteration.

    This share is ``mix_prob`` of ``StochBackward2bit4bitMix`` and the like, ``mix_levels_prob`` of
    ``SignMagnitudeBackward``.

    With t = min(step / steps, 1): constant p = start; linear p = start + (end - start) t; cosine p = end + (start -
    end) (1 + cos(pi t)) / 2; step p = start + (end - start) floor(t * stairs) / stairs, in equal stairs. Source: J. Li,
    master's thesis, Heidelberg University, 2025, section 5.7, for constant probabilities.

    >>> import torch.nn as nn, brevact
    >>> model = brevact.quantize_backward(nn.Linear(512, 512), brevact.StochBackward2bit4bitMix)
    >>> schedule = brevact.MixSchedule(model, "linear", start=1.0, end=0.0, steps=100)
    >>> for _ in range(25):
    ...     schedule.step()  # beside optimizer.step()
    >>> schedule.mix_prob
    0.75

    Layers that get a mixing quantizer later follow from their next step on. Under ``torch.compile`` a new probability
    means a new graph: use "constant", or "step" with few stairs.

    Args:
        model: module whose backward quantizers mix two widths: from ``quantize_backward`` or ``act_quant=``.
        kind: "constant", "linear", "cosine" or "step".
        start: probability at the beginning, from 0 to 1; None takes it from the first quantizer.
        end: probability after ``steps`` steps; unused for "constant".
        steps: number of steps from start to end.
        stairs: number of equal changes of "step".

    Raises:
        ValueError: an argument is out of range, or the model has no mixing quantizer.
        TypeError: ``model`` is no module, or a number is none.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: str = "constant",
        *,
        start: float | None = None,
        end: float = 0.0,
        steps: int = 1,
        stairs: int = 4,
    ) -> None:
        check_model(model, "MixSchedule(model, kind)", kind)
        self._model = model
        start = _mixtures(self._holders()[0][1])[0].probability if start is None else start
        self._plan = checked_plan({"kind": kind, "start": start, "end": end, "steps": steps, "stairs": stairs})
        self._done = 0
        self._apply()

    @property
    def mix_prob(self) -> float:
        """Probability of the higher width in the next step."""
        kind, start, end = self._plan["kind"], self._plan["start"], self._plan["end"]
        t = min(self._done / self._plan["steps"], 1.0)
        if kind == "constant" or t == 0:
            return start
        if t == 1:
            return end
        if kind == "cosine":
            return round(end + (start - end) * (1 + math.cos(math.pi * t)) / 2, _DECIMALS)
        if kind == "step":
            t = math.floor(t * self._plan["stairs"]) / self._plan["stairs"]
        return round(start + (end - start) * t, _DECIMALS)

    def step(self) -> None:
        """Advance by one training step.

        Raises:
            ValueError: the model no longer has a mixing quantizer.
        """
        self._done += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and the number of steps done, for a checkpoint."""
        return {**self._plan, "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint: its plan, its step, and its probability in the model.

        Raises:
            ValueError: ``state`` is no result of :meth:`state_dict`.
            TypeError: ``state`` is no mapping.
        """
        check_state(state, (*self._plan, "done"))
        plan, done = checked_plan({name: state[name] for name in self._plan}), state["done"]
        check_int("done", done, 0)
        self._plan, self._done = plan, done
        self._apply()

    def _apply(self) -> None:
        changed: dict[BackwardSettings, BackwardSettings | None] = {}  # shared settings stay shared
        probability = self.mix_prob

        def mixed(quantizer: Any) -> Any:
            return quantizer.with_probability(probability) if isinstance(quantizer, MixingQuantizer) else quantizer

        for holder, settings in self._holders():
            if all(quantizer.probability == probability for quantizer in _mixtures(settings)):
                continue
            if settings not in changed:
                changed[settings] = with_quantizers(settings, mixed)
            holder.settings = changed[settings]

    def _holders(self) -> list[tuple[Any, BackwardSettings]]:
        holders: list[Any] = []
        for module in self._model.modules():
            holders += regions_of(module)
            if isinstance(module, BackwardQuantProxy):
                holders.append(module)
        mixing = [(holder, holder.settings) for holder in holders if _mixtures(holder.settings)]
        if not mixing:
            raise ValueError(
                "model has no quantizer that mixes two widths; give it one first: "
                "brevact.quantize_backward(model, brevact.StochBackward2bit4bitMix)"
            )
        return mixing


def _mixtures(settings: BackwardSettings | None) -> list[MixingQuantizer]:
    if settings is None:
        return []
    own = [settings.quantizer] if isinstance(settings.quantizer, MixingQuantizer) else []
    return own + [quantizer for _, each in settings.of_functions for quantizer in _mixtures(each)]


def checked_plan(plan: dict[str, Any]) -> dict[str, Any]:
    if plan["kind"] not in _KINDS:
        raise ValueError(f"kind={brief(plan['kind'])}; accepted are {', '.join(_KINDS)}")
    for name in ("steps", "stairs"):
        check_int(name, plan[name], 1)
    for name in ("start", "end"):
        check_number(name, plan[name], 0, 1)
    return {**plan, "start": float(plan["start"]), "end": float(plan["end"])}
