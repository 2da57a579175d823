"""Argument checks of the public functions."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping

from torch import nn

from brevact.quantizers.brief import brief


def check_model(model: object, call: str = "", behind: object = None) -> None:
    """Raise a TypeError unless `model` is a module; `call` and its next argument `behind` detect swapped arguments."""
    if isinstance(model, nn.Module):
        return
    fix = ""
    if isinstance(behind, nn.Module):
        fix = f"; the arguments are swapped: write {call}"
    elif inspect.isclass(model) and issubclass(model, nn.Module):
        fix = f"; make one of this class first: {model.__name__}(...)"
    raise TypeError(f"model: got {brief(model)} of type {type(model).__name__}; accepted is a torch.nn.Module{fix}")


def check_state(state: object, keys: Collection[str]) -> None:
    """Raise a TypeError unless `state` is a mapping, a ValueError unless it has exactly these keys."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state: got {brief(state)} of type {type(state).__name__}; accepted is a state_dict()")
    if set(state) != set(keys):
        raise ValueError(f"state: got the keys {sorted(map(str, state))}; accepted are {sorted(keys)}")
