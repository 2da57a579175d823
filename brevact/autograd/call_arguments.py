"""The arguments of a call: bound to places, and the tensors among them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import get_testing_overrides

#: Types of tensors that are no subclass which could mean something else.
PLAIN_TYPES = frozenset((Tensor, nn.Parameter))

#: Types of arguments that are no tensors and hold none.
CONSTANT_TYPES = frozenset(
    (
        *(bool, int, float, complex, str, type(None), slice, type(Ellipsis)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)


def tensors_of_call(args: Sequence[Any], kwargs: dict[Any, Any]) -> list[Tensor]:
    """Return the tensors among arguments, and in the tuples, lists and dictionaries among them, in their order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind in PLAIN_TYPES:
            found.append(value)
        elif kind in CONSTANT_TYPES:
            continue
        elif isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_of_call(value, {})
        elif isinstance(value, dict):
            found += tensors_of_call((), value)
    return found


#: Names of NumPy's that torch's compiled functions take for their own.
_NUMPY_NAMES = {"x": "input", "a": "input", "x1": "input", "x2": "other", "axis": "dim", "keepdims": "keepdim"}


@functools.cache
def _parameters_of(func: Callable) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the names of the arguments that a torch function requires, in their order, and those of all."""
    overrides, name = get_testing_overrides(), func.__name__
    known = overrides.get(func)
    if known is None:  # in-place variants, but for those of Python
        known = overrides.get(getattr(torch, name.removesuffix("_"), func), func)
    try:
        parameters = inspect.signature(known).parameters.values()
    except (TypeError, ValueError):
        return ("input",), frozenset(("input",))
    required = tuple(each.name for each in parameters if each.default is each.empty and each.kind <= 1)
    return required, frozenset(each.name for each in parameters)


#: Types that tell overloads apart, some of which have them in other places: of `Tensor.to`.
_OF_OVERLOADS = (torch.dtype, torch.device, torch.layout, torch.memory_format, str)


def bound(func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of a torch function with those at their places that it requires.

    Names of NumPy's become torch's. Counterparts and rules that look at a place find an operand there, however it was
    given.
    """
    required, names = _parameters_of(func)
    found = dict(kwargs)
    if type(func) is not FunctionType:
        for name in _NUMPY_NAMES.keys() & found.keys() - names:
            found[_NUMPY_NAMES[name]] = found.pop(name)
    places = list(args)
    for name in required[len(args) :]:
        if name not in found or type(found[name]) in _OF_OVERLOADS:
            break
        places.append(found.pop(name))
    return tuple(places), found
