"""Map calls of ATen operators, as in ``torch.export`` programs, to calls of the torch functions of their names in rows.

C++ functions take the operator's arguments, Python functions take them by their own parameter names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.rows import ROWS
from brevact.private_names.of_torch import argument_names

#: Operators whose function has another name.
_NAMES = {"cross_entropy_loss": "cross_entropy", "nll_loss_nd": "nll_loss", "nll_loss2d": "nll_loss"} | {
    f"adaptive_max_pool{dims}d": f"adaptive_max_pool{dims}d_with_indices" for dims in (1, 2, 3)
}
#: Arguments that no torch function takes.
_OF_OPERATORS = frozenset(("out", "layout", "implicit"))
_REDUCTIONS = ("none", "mean", "sum")

Call = tuple[Callable, tuple, dict[str, Any]]


def _by_name() -> dict[str, Callable]:
    """Return the functions in ``ROWS`` by name; of equal names, torch's C++ function, then a method, then Python's."""
    ranks = {BuiltinFunctionType: 2, FunctionType: 0}
    functions = sorted(ROWS, key=lambda func: ranks.get(type(func), 1))
    of_python = (F.silu.__module__, torch.einsum, torch.norm)  # the rest have other arguments, or do more
    return {
        func.__name__: func
        for func in functions
        if type(func) is not FunctionType or func in of_python or func.__module__ in of_python
    }


_FUNCTIONS = _by_name()


def as_torch_function(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Call:
    """Return the torch function call that is equivalent to an operator call, or the operator call if there is none."""
    name, function, names = _function_of(func)
    if function is None or not _OF_OPERATORS.isdisjoint(kwargs):
        return func, args, kwargs
    if not isinstance(function, FunctionType):
        if function is Tensor.to:
            place = names.index("memory_format")  # keyword-only in Python
            kwargs = dict(zip(("memory_format",), args[place:], strict=False)) | kwargs
            args = args[:place]
        return function, args, kwargs
    given = dict(zip(names, args, strict=False)) | kwargs
    if function is torch.einsum and given.pop("path", None) is None:
        return function, (given["equation"], *given["tensors"]), {}
    if "self" in given:
        given = {"input": given.pop("self")} | given
    if isinstance(given.get("reduction"), int):
        given["reduction"] = _REDUCTIONS[given["reduction"]]
    if name.endswith("_"):
        given["inplace"] = True
    try:
        call = inspect.signature(function).bind(**given)
    except TypeError:
        return func, args, kwargs
    return function, call.args, call.kwargs


@functools.lru_cache(maxsize=1024)
def _function_of(func: Callable) -> tuple[str, Callable | None, tuple[str, ...]]:
    """Return an operator's name, its torch function (None without one), and its argument names."""
    namespace, name = str(func).split(".")[:2]
    known = _FUNCTIONS.get(_NAMES.get(name, name)) or _FUNCTIONS.get(name.removesuffix("_"))
    if namespace != "aten" or known is None:
        return name, None, ()
    return name, known, argument_names(func)
