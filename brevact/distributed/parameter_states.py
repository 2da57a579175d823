"""State of a communication hook per parameter, independent of buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from brevact.arguments import check_model
from brevact.distributed.packing import check_count, check_seed
from brevact.quantizers.brief import brief


@dataclass
class ParameterState:
    """State of one parameter: its number in the order first seen, and the rounding errors to feed back, or None."""

    number: int
    residual: Tensor | None = None


class ParameterStates:
    """States of a model's parameters, by identity in memory and by name in files."""

    def __init__(self) -> None:
        self._states: dict[Tensor, ParameterState] = {}
        self._next = 0

    def of(self, parameter: Tensor) -> ParameterState:
        """Return a parameter's state, a new one on first use."""
        if parameter not in self._states:
            self._states[parameter] = ParameterState(self._next)
            self._next += 1
        return self._states[parameter]

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return "numbers" and copied "residuals" by name; raises a ValueError if the model has no known parameter."""
        known = {name: self._states[p] for name, p in _named(model).items() if p in self._states}
        if self._states and not known:
            raise ValueError(
                f"model: got {brief(model)}, which has none of the parameters whose gradients were averaged; "
                "accepted is the model that DistributedDataParallel has, not a copy"
            )
        return {
            "numbers": {name: state.number for name, state in known.items()},
            "residuals": {name: state.residual.clone() for name, state in known.items() if state.residual is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Replace a model's states; raises a ValueError if it lacks parameters of the state, or shapes differ."""
        named = _named(model)
        states: dict[Tensor, ParameterState] = {}
        for name, number in state["numbers"].items():
            if name not in named:
                raise ValueError(f"state: has parameter {name!r}, which the model lacks; load it for the same model")
            states[named[name]] = ParameterState(number)
        for name, residual in state["residuals"].items():
            if name not in state["numbers"]:
                raise ValueError(f"state: {name!r} has a residual and no number; accepted is what state_dict returned")
            parameter = named[name]
            if residual.shape != parameter.shape:
                raise ValueError(
                    f"state: {name!r} has shape {tuple(residual.shape)} there and {tuple(parameter.shape)} in the "
                    "model; load it for the same model"
                )
            states[parameter].residual = residual.to(parameter.device, copy=True)
        own = set(named.values())
        self._states = {p: state for p, state in self._states.items() if p not in own} | states
        self._next = 1 + max((state.number for state in self._states.values()), default=-1)


def check_state(state: Any) -> None:
    """Raise a ValueError unless this is a hook's state."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state: got {brief(state)}; accepted is what state_dict(model) returned")
    if missing := {"step", "seed", "numbers", "residuals"} - set(state):
        raise ValueError(f"state: lacks {sorted(missing)}; accepted is what state_dict(model) returned")
    check_count("state['step']", state["step"], at_least=0)
    check_seed(state["seed"])
    for key, kind in (("numbers", int), ("residuals", Tensor)):
        values = state[key].values() if isinstance(state[key], Mapping) else [state[key]]
        if not all(isinstance(value, kind) for value in values):
            raise ValueError(
                f"state: {key!r} is {brief(state[key])}; accepted is what state_dict(model) returned: names with "
                f"values of type {kind.__name__}"
            )


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    check_model(model)
    return dict((model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model).named_parameters())
