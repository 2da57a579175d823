"""How Dynamo traces regions: it marks the nodes of its graph, and traces neither our hooks nor our modes.

A module whose hooks are a policy's runs as if without hooks, and a function that a region's mode sees as if without
the mode, while Dynamo gives the nodes that it makes the region's text. Hooks and modes of other regions are traced as
any code: see ``marks``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.compiler import FULL_PRECISION, MARK, marks
from brevact.compiler.results import Marked, is_recomputed, marked_regions, watch_graph
from brevact.private_names.of_torch import (
    DictVariable,
    FrozenDataClassVariable,
    FunctionModeVariable,
    ModuleVariable,
    VariableTracker,
    annotate,
    fx_traceback,
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
)

_GLOBAL_HOOKS = global_forward_pre_hooks, global_forward_hooks, global_backward_pre_hooks, global_backward_hooks
_HOOKS = "_forward_pre_hooks", "_forward_hooks"
_OTHER_HOOKS = "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_backward_pre_hooks", "_backward_hooks"


class _Around(NamedTuple):
    """The innermost region; ``is_usual`` unless marks do not suffice for it."""

    text: str | None
    is_usual: bool
    owner: Any


@contextmanager
def _marking(tx: Any, region: Marked) -> Iterator[None]:
    watch_graph(tx.output)
    regions = marked_regions(tx)
    regions.append(region)
    try:
        with annotate({MARK: region.text}), fx_traceback.preserve_node_meta():
            yield
    finally:
        regions.pop()


def _read(tx: Any, variable: Any, name: str) -> Any:
    """The value of an attribute, which Dynamo then guards."""
    return variable.var_getattr(tx, name).as_python_constant()


def _is_usual(text: str | None) -> bool:
    return text is not None and not marks.changes_forward(text)


def _around(tx: Any) -> _Around | None:
    regions, modes = marked_regions(tx), tx.symbolic_torch_function_state.mode_stack
    for place in reversed(range(len(modes))):
        if regions and regions[-1].depth > place:
            break
        mode = modes[place].realize()
        if not issubclass(kind := mode.python_type(), marks.RegionMode):
            continue
        if kind is marks.PlainMode:
            return _Around(None, True, None)
        text = _read(tx, mode, "text")
        return _Around(text, _is_usual(text) and not _read(tx, mode, "norms_only"), None)
    return _Around(regions[-1].text, _is_usual(regions[-1].text), regions[-1].owner) if regions else None


def _entered(tx: Any, module: Any, hook: Any) -> str | None:
    """The text of the region that a hook of a module enters; None if it enters none."""
    around, inherits = _around(tx), _read(tx, hook, "inherits")
    if around is not None:
        if not around.is_usual:
            raise _Unusual
        if around.text is None or (inherits and around.owner is not module.value):
            return None
    settings = hook.var_getattr(tx, "settings").realize()
    is_none = settings.is_python_constant() and settings.as_python_constant() is None
    text = FULL_PRECISION if is_none else _read(tx, settings, "text")
    if not _is_usual(text):
        raise _Unusual
    if not torch.is_grad_enabled() or is_recomputed(tx):
        return None
    if around is None:
        return text if text != FULL_PRECISION and _read(tx, module, "training") else None
    return text if around.text != text or around.owner is module.value else None


class _Unusual(Exception):
    """Marks do not suffice for a region."""


def _has_our_hooks_alone(module: Any) -> bool:
    hooks = [hook for name in _HOOKS for hook in getattr(module, name).values()]
    return bool(hooks) and all(map(_is_ours, hooks)) and not any(getattr(module, name) for name in _OTHER_HOOKS)


def _is_ours(hook: Any) -> bool:
    return getattr(type(hook), "is_of_region", False)


def _read_hooks(tx: Any, module: Any) -> list[Any]:
    """The hooks that run before a module; Dynamo then guards them and those that run after it."""
    before, _ = (
        [each.realize() for each in hooks.call_method(tx, "values", [], {}).unpack_var_sequence(tx)]
        for hooks in (module.var_getattr(tx, name).realize() for name in _HOOKS)
    )
    return before


def _hide_hooks(module: Any) -> None:
    """Let Dynamo, when it looks for hooks of a module next, find none."""
    names = set(_HOOKS)

    def var_getattr(tx: Any, name: str) -> Any:
        if name not in names:
            return type(module).var_getattr(module, tx, name)
        names.remove(name)
        if not names:
            del module.var_getattr
        return DictVariable({})

    module.var_getattr = var_getattr


_call_module = ModuleVariable.call_function


@functools.wraps(_call_module)
def _call_module_of_region(module: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if marks.is_exporting() or any(_GLOBAL_HOOKS) or not _has_our_hooks_alone(module.value):
        return _call_module(module, tx, args, kwargs)
    with ExitStack() as stack:
        try:
            for hook in _read_hooks(tx, module):
                if (text := _entered(tx, module, hook)) is not None:
                    depth = len(tx.symbolic_torch_function_state.mode_stack)
                    region = Marked(text, depth, tx.output.current_tracer, module.value)
                    stack.enter_context(_marking(tx, region))
        except _Unusual:
            stack.close()
            return _call_module(module, tx, args, kwargs)
        _hide_hooks(module)
        return _call_module(module, tx, args, kwargs)


ModuleVariable.call_function = _call_module_of_region
_call_mode = FunctionModeVariable.call_torch_function


@functools.wraps(_call_mode)
def _call_mode_of_region(mode: Any, tx: Any, fn: Any, types: Any, args: Any, kwargs: Any) -> Any:
    kind = mode.python_type()
    if not issubclass(kind, marks.RegionMode) or marks.is_exporting():
        return _call_mode(mode, tx, fn, types, args, kwargs)
    if any(not issubclass(each.as_python_constant(), Tensor) for each in types.items):
        return _call_mode(mode, tx, fn, types, args, kwargs)
    func = fn.as_python_constant() if fn.is_python_constant() else None
    if func is Tensor.unflatten:  # it calls super() in a way that Dynamo cannot trace in a mode
        fn = VariableTracker.build(tx, torch.unflatten)
    if kind is marks.PlainMode:
        return fn.call_function(tx, list(args), kwargs)
    text = _read(tx, mode, "text")
    if not _is_usual(text):
        return _call_mode(mode, tx, fn, types, args, kwargs)
    regions, depth = marked_regions(tx), len(tx.symbolic_torch_function_state.mode_stack)
    is_marked = bool(regions) and regions[-1].depth > depth  # by a region inside this one
    if is_marked or not torch.is_grad_enabled() or _read(tx, mode, "norms_only"):
        return fn.call_function(tx, list(args), kwargs)
    with _marking(tx, Marked(text, depth + 1, tx.output.current_tracer)):
        return fn.call_function(tx, list(args), kwargs)


FunctionModeVariable.call_torch_function = _call_mode_of_region
_constant_of = FrozenDataClassVariable.as_python_constant


@functools.wraps(_constant_of)
def _constant_of_ours(variable: Any) -> Any:
    """Return policies and settings themselves: PyTorch below 2.13 makes no constants of them."""
    is_ours = type(variable.value).__module__.startswith("brevact.")
    return variable.value if is_ours else _constant_of(variable)


if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    FrozenDataClassVariable.as_python_constant = _constant_of_ours
