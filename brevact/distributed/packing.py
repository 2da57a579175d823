"""Pack gradients for other processes, in a size and format that all processes know."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from brevact.arguments import check_model
from brevact.quantizers import (
    ActivationQuantizer,
    DualPrecisionQuantizer,
    MixingQuantizer,
    PackedActivation,
    SampleQuantizer,
    UniformQuantizer,
    WeibullQuantizer,
)
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_int
from brevact.quantizers.formats.sign_magnitude.quantizer import SignMagnitudeLevels

#: Packs a tensor losslessly into its own bytes.
AS_IT_IS = UniformQuantizer(bit_width=32)

_ALL_RANKS = -1
_UNBIASED = (UniformQuantizer, WeibullQuantizer, DualPrecisionQuantizer, SampleQuantizer, SignMagnitudeLevels)


def pack(quantizer: ActivationQuantizer, x: Tensor, place: tuple[int, int, int], rank: int) -> PackedActivation:
    """Pack a gradient with this rank's random bits, and in the size that all ranks use.

    `place` is the run's seed, the step and the parameter's number, the same on all ranks.
    """
    if isinstance(quantizer, MixingQuantizer):
        quantizer = quantizer.with_drawn_size(x.numel(), _seed(*place, _ALL_RANKS))
    return quantizer.quantize(x, _seed(*place, rank))


def is_unbiased(quantizer: ActivationQuantizer) -> bool:
    """Return whether a quantizer is lossless or rounds at random between levels that span a bucket.

    Others count as biased: nearest rounding, grids that clip, and users' quantizers.
    """
    if isinstance(quantizer, MixingQuantizer):
        return is_unbiased(quantizer.low) and is_unbiased(quantizer.high)
    if any(getattr(quantizer, name, False) for name in ("is_exact", "is_lossless", "keeps_elements")):
        return True
    return isinstance(quantizer, _UNBIASED) and quantizer.is_stochastic


def check_feedback(quantizer: ActivationQuantizer) -> None:
    """Raise a ValueError if a quantizer's error is not smaller than its input, measured on 4096 normal values."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), device="cpu")
    if (pack(quantizer, x, (0, 0, 0), 0).dequantize() - x).norm() >= x.norm():
        raise ValueError(
            f"error_feedback: got True with {brief(quantizer)}, whose errors exceed the gradients: they would grow "
            "from step to step; accepted is a quantizer of smaller errors, StochBackward2bit, or error_feedback=False"
        )


def check_count(name: str, value: object, at_least: int | None = None) -> None:
    """Raise a TypeError unless the value is an int, and a ValueError if it is too small."""
    check_int(name, value)
    if at_least is not None and value < at_least:  # type: ignore[operator]
        raise ValueError(f"{name}: got {value}; accepted is an int of at least {at_least}")


def check_seed(seed: int) -> None:
    """Raise a TypeError unless the seed is an int, and a ValueError if it exceeds 64 bits."""
    check_count("seed", seed)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed: got {seed}; accepted is an int from -2**63 to 2**63 - 1")


def check_quantizer(quantizer: object) -> None:
    """Raise a TypeError unless this is an activation quantizer; an injector is not."""
    if isinstance(quantizer, type) or not callable(getattr(quantizer, "quantize", None)):
        raise TypeError(
            f"quantizer: got {brief(quantizer)}; accepted is an activation quantizer, such as what "
            "brevact.quantizer(StochBackward4bit) returns"
        )


def _seed(*parts: int) -> int:
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


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
