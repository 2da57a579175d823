"""What a communication hook remembers of each parameter, whatever buckets its gradient comes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from brevact.arguments import check_model


@dataclass
class ParameterState:
    """Of one parameter: its place among those seen, and what rounding took from its gradients.

    Args:
        number: Place in the order of the first buckets.
        residual: Tensor of its shape, or None where nothing is owed.
    """

    number: int
    residual: Tensor | None = None


class ParameterStates:
    """Of all parameters of a model. Parameters are told apart by identity, in files by name."""

    def __init__(self) -> None:
        self._states: dict[Tensor, ParameterState] = {}

    def of(self, parameter: Tensor) -> ParameterState:
        """Return the state of a parameter, a new one if it is seen for the first time."""
        return self._states.setdefault(parameter, ParameterState(len(self._states)))

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return numbers and residuals by name.

        Args:
            model: Has the parameters.

        Returns:
            Dictionaries "numbers" and "residuals"; the tensors are copies.
        """
        known = {name: self._states[p] for name, p in _named(model).items() if p in self._states}
        return {
            "numbers": {name: state.number for name, state in known.items()},
            "residuals": {name: state.residual.clone() for name, state in known.items() if state.residual is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Replace all states.

        Args:
            state: What :meth:`state_dict` returned.
            model: Has the parameters.

        Raises:
            ValueError: If the state names parameters that the model lacks, or of other shapes.
        """
        named = _named(model)
        states: dict[Tensor, ParameterState] = {}
        for name, number in state["numbers"].items():
            if name not in named:
                raise ValueError(f"state: has parameter {name!r}, which the model lacks; load it for the same model")
            states[named[name]] = ParameterState(number)
        for name, residual in state["residuals"].items():
            parameter = named[name]
            if residual.shape != parameter.shape:
                raise ValueError(
                    f"state: {name!r} has shape {tuple(residual.shape)} there and {tuple(parameter.shape)} in the "
                    "model; load it for the same model"
                )
            states[parameter].residual = residual.to(parameter.device, copy=True)
        self._states = states


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    check_model(model)
    return dict((model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model).named_parameters())
