"""What the functions that a user calls check first."""

from __future__ import annotations

import inspect

from torch import nn

from brevact.quantizers.brief import brief


def check_model(model: object, call: str = "", behind: object = None) -> None:
    """Raise a TypeError for a model that is no module.

    Args:
        model: what was passed as the model.
        call: how the function is called, for swapped arguments.
        behind: the argument behind the model.
    """
    if isinstance(model, nn.Module):
        return
    fix = ""
    if isinstance(behind, nn.Module):
        fix = f"; the arguments are swapped: write {call}"
    elif inspect.isclass(model) and issubclass(model, nn.Module):
        fix = f"; make one of this class first: {model.__name__}(...)"
    raise TypeError(f"model: got {brief(model)} of type {type(model).__name__}; accepted is a torch.nn.Module{fix}")
