"""Names of the torch functions that a module's forward calls, read from its code without running it.

They come from the code of ``forward``, of the methods and functions that it calls by name, and of functions that the
module holds as attributes. Class names and tensor values do not count. A function that the code calls under no name,
such as out of a dictionary, is not seen.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from brevact.autograd.rows import is_torch_function
from brevact.injectors.proxies import activations_of, is_quant_proxy

_of_classes: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def called_in(module: nn.Module) -> frozenset[str]:
    """Return the names of the functions that the forwards of a module and of the modules inside call.

    Of a Brevitas quantizer, only the activation function that it quantizes counts.

    >>> sorted(called_in(nn.Sequential(nn.ReLU(), nn.SiLU())) & {"gelu", "relu", "silu"})
    ['relu', 'silu']
    """
    return frozenset().union(*map(called_by, _modules_of(module)))


def _modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those inside; of a quantizer, which also computes scales, only its activation function."""
    if not is_quant_proxy(module):
        yield module
    for child in activations_of(module) if is_quant_proxy(module) else module.children():
        yield from _modules_of(child)


def called_by(module: nn.Module) -> frozenset[str]:
    """Return the names that a module's own forward calls, without the ``_`` of in-place functions.

    They include names of attributes and global variables; ``matmul`` also means ``@``.

    >>> "relu" in called_by(nn.ReLU(inplace=True)), "relu" in called_by(nn.Sequential(nn.ReLU()))
    (True, False)
    """
    kind: type = type(module)
    names = _of_classes.get(kind)
    if names is None:
        seen: set[Any] = set()
        _of_classes[kind] = names = frozenset(_called(_methods(kind, "forward"), kind, seen))
    held = [each for each in vars(module).values() if callable(each) and not isinstance(each, nn.Module)]
    return names | _called(held, kind, set()) if held else names


def _called(functions: Iterable[Any], owner: type, seen: set[Any]) -> set[str]:
    """Return the names of torch functions; of other functions, the names in their code and in code they call."""
    names: set[str] = set()
    for function in map(_inner, functions):
        if is_torch_function(function):
            names.add(_bare(getattr(function, "__name__", "")))
        if isinstance(function, types.FunctionType) and function not in seen:
            seen.add(function)
            own = _names_in_code(function.__code__)
            names |= {_bare(name) for name in own}
            names |= _called(_followed(function, own, owner), owner, seen)
    return names


def _followed(function: types.FunctionType, names: set[str], owner: type) -> Iterator[Any]:
    """Yield the functions that a function may call by these names: torch's public ones, and all others' functions."""
    found = [each for name in names if name in function.__globals__ for each in _functions(function.__globals__[name])]
    found += [method for name in names for method in _methods(owner, name)]
    found += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    for each in map(_inner, found):
        is_own = str(getattr(each, "__module__", "")).partition(".")[0] != "torch"
        if is_torch_function(each) or is_own:
            yield each


def _functions(target: Any) -> list[Any]:
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        return [inspect.getattr_static(target, "forward", None)]
    return [target]


def _methods(owner: type, name: str) -> list[Any]:
    """Return a class's method, and, as long as it names ``super``, those that it overrides."""
    found: list[Any] = []
    for kind in owner.__mro__:
        if name in vars(kind):
            found.append(_inner(vars(kind)[name]))
            if "super" not in _names_in_code(getattr(found[-1], "__code__", None)):
                break
    return found


def _inner(function: Any) -> Any:
    while True:
        if isinstance(function, staticmethod | classmethod | types.MethodType):
            function = function.__func__
        elif isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def _names_in_code(code: types.CodeType | None) -> set[str]:
    if code is None:
        return set()
    names = {*code.co_names}
    if any("MATRIX_MULTIPLY" in each.opname or each.argrepr in ("@", "@=") for each in dis.get_instructions(code)):
        names.add("matmul")
    return names.union(*(_names_in_code(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _bare(name: str) -> str:
    return name.rstrip("_")


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
