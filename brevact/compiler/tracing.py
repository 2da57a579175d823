"""How Dynamo traces regions: it marks the nodes of its graph, and traces neither our hooks nor our modes.

A module whose hooks are a policy's runs as if without hooks, a function that a region's mode sees as if without the
mode, and methods that enter and leave regions not at all, while Dynamo gives the nodes that it makes the region's text.
Traced code raises where text does not suffice (``marks.refuse``); Dynamo then runs it uncompiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from brevact.compiler import FULL_PRECISION, MARK, marks
from brevact.compiler.results import watch_graph
from brevact.private_names.of_torch import (
    GET_ATTRIBUTE,
    F,
    FrozenDataClassVariable,
    FunctionModeVariable,
    MethodVariable,
    VariableTracker,
    annotate,
    call_module,
    fx_traceback,
    skipped_by_dynamo,
)

_OUTSIDE = "outside"
_HOOKS = "_forward_pre_hooks", "_forward_hooks"
_GLOBAL_HOOKS = tuple(f"_global_{when}_hooks" for when in ("forward_pre", "forward", "backward_pre", "backward"))
_OTHER_HOOKS = "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_backward_pre_hooks", "_backward_hooks"


def _mark() -> str | None:
    """The mark that nodes get."""
    return fx_traceback.current_meta.get("custom", {}).get(MARK)


@contextmanager
def _marking(tx: Any, text: str | None, packs: bool = True) -> Iterator[None]:
    """Mark nodes, where something is packed; code that Dynamo traces raises where a text does not suffice."""
    packs = packs and torch.is_grad_enabled() and not torch.compiler.is_exporting()
    if marks.changes_forward(text) or (packs and text is None):
        VariableTracker.build(tx, marks.refuse).call_function(tx, [VariableTracker.build(tx, text)], {})
    if not packs:
        yield
        return
    watch_graph(tx.output)
    with annotate({MARK: text}), fx_traceback.preserve_node_meta():
        yield


def _attribute(tx: Any, variable: Any, name: str) -> Any:
    return getattr(variable, GET_ATTRIBUTE)(tx, name)


def _read(tx: Any, variable: Any, name: str) -> Any:
    """The value of an attribute, which Dynamo then guards."""
    return _attribute(tx, variable, name).as_python_constant()


def _text_of(tx: Any, owner: Any) -> str | None:
    """The text of the settings of a hook or a block."""
    settings = _attribute(tx, owner, "settings").realize()
    is_none = settings.is_python_constant() and settings.as_python_constant() is None
    return FULL_PRECISION if is_none else _read(tx, settings, "text")


def _around(tx: Any) -> str | None:
    """The text of the innermost region, ``_OUTSIDE`` without one that packs."""
    if (mark := _mark()) is not None:
        return mark
    for mode in reversed([each.realize() for each in tx.symbolic_torch_function_state.mode_stack]):
        if issubclass(mode.python_type(), marks.RegionMode):
            return _OUTSIDE if _read(tx, mode, "norms_only") else _read(tx, mode, "text")
    return _OUTSIDE


def _region_of(tx: Any, module: Any, hook: Any) -> AbstractContextManager[None]:
    """The region that a hook of a module enters."""
    around = _around(tx)
    if around == marks.PLAIN or (_read(tx, hook, "inherits") and around != _OUTSIDE):  # before the settings
        return nullcontext()
    text = _text_of(tx, hook)
    if around == _OUTSIDE:
        return _marking(tx, text, text != FULL_PRECISION and _read(tx, module, "training"))
    return _marking(tx, text, text != around)


def _has_our_hooks_alone(tx: Any, module: Any) -> bool:
    hooks = [hook for name in _HOOKS for hook in getattr(module.value, name).values()]
    if not hooks or not all(getattr(type(hook), "is_of_region", False) for hook in hooks):
        return False
    others = [(module, name) for name in _OTHER_HOOKS] + [(tx.nn_modules_globals_vt, name) for name in _GLOBAL_HOOKS]
    return not any([_attribute(tx, owner, name).realize().len() for owner, name in others])


def _read_hooks(tx: Any, module: Any) -> list[Any]:
    """The hooks that run before a module; Dynamo then guards them and those that run after it."""
    before, _ = (
        [each.realize() for each in hooks.call_method(tx, "values", [], {}).unpack_var_sequence(tx)]
        for hooks in (_attribute(tx, module, name).realize() for name in _HOOKS)
    )
    return before


_call_mode = FunctionModeVariable.call_torch_function


@functools.wraps(_call_mode)
def _call_mode_of_region(mode: Any, tx: Any, fn: Any, types: Any, args: Any, kwargs: Any) -> Any:
    if not issubclass(mode.python_type(), marks.RegionMode):
        return _call_mode(mode, tx, fn, types, args, kwargs)
    if fn.is_python_constant() and fn.as_python_constant() is Tensor.unflatten:
        fn = VariableTracker.build(tx, torch.unflatten)  # the method calls super() in a way that Dynamo cannot trace
    text = _read(tx, mode, "text") if _mark() is None else marks.PLAIN
    with _marking(tx, text, text != marks.PLAIN and not _read(tx, mode, "norms_only")):
        return fn.call_function(tx, list(args), kwargs)


FunctionModeVariable.call_torch_function = _call_mode_of_region

# --- methods that enter and leave regions, and calls of modules whose hooks do nothing else

_in_place_of: dict[Callable[..., Any], Callable[..., Any]] = {}


def traced_as(run: Callable[..., Any]) -> Callable[[F], F]:
    """Let Dynamo call a function with variables of the owner and the arguments, where traced code calls a method."""

    def register(method: F) -> F:
        _in_place_of[method] = run
        return skipped_by_dynamo(method)

    return register


def _call_module(tx: Any, method: Any, args: Any, kwargs: Any) -> Any:
    (module,) = method.self_args()
    if not _has_our_hooks_alone(tx, module):
        return _call_method(method, tx, args, kwargs)
    with ExitStack() as stack:
        for hook in _read_hooks(tx, module):
            stack.enter_context(_region_of(tx, module, hook))
        return _attribute(tx, module, "forward").call_function(tx, args, kwargs)


def _enter(tx: Any, region: AbstractContextManager[None]) -> Any:
    stack = ExitStack()
    stack.enter_context(region)
    tx.output.__dict__.setdefault("brevact_stacks", []).append(stack)
    tx.output.add_cleanup_hook(stack.close)
    return VariableTracker.build(tx, None)


def enter_module(tx: Any, method: Any, args: Any, kwargs: Any) -> Any:
    return _enter(tx, _region_of(tx, args[0], *method.self_args()))


def enter_block(tx: Any, method: Any, args: Any, kwargs: Any) -> Any:
    return _enter(tx, _marking(tx, _text_of(tx, *method.self_args()), _around(tx) != marks.PLAIN))


def leave(tx: Any, *others: Any) -> Any:
    return VariableTracker.build(tx, tx.output.brevact_stacks.pop().close())


_in_place_of[call_module] = _call_module
_call_method = MethodVariable.call_function


@functools.wraps(_call_method)
def _call_method_of_region(method: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    run = _in_place_of.get(method.fn)
    return _call_method(method, tx, args, kwargs) if run is None else run(tx, method, args, kwargs)


MethodVariable.call_function = _call_method_of_region
_constant_of = FrozenDataClassVariable.as_python_constant


@functools.wraps(_constant_of)
def _constant_of_ours(variable: Any) -> Any:
    """Return policies and settings themselves: PyTorch below 2.13 makes no constants of them."""
    is_ours = type(variable.value).__module__.startswith("brevact.")
    return variable.value if is_ours else _constant_of(variable)


if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    FrozenDataClassVariable.as_python_constant = _constant_of_ours
