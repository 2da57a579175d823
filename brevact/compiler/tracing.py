"""How Dynamo traces regions: it marks the nodes of its graph.

A torch function that a region's mode sees runs as if without the mode, while Dynamo gives the nodes that it makes the
region's text. Hooks of modules are traced as any code, which enters a mode: see ``marks``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from brevact.compiler import MARK, marks
from brevact.compiler.results import Marked, marked_regions, watch_graph
from brevact.private_names.of_torch import (
    FrozenDataClassVariable,
    FunctionModeVariable,
    VariableTracker,
    annotate,
    fx_traceback,
)


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
    if text is None or marks.changes_forward(text):  # marks do not suffice
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
