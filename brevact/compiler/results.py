"""Mark the results of compiled graphs that run in an eager region as weights or activations.

A mode sees no op of a graph that the compiler has fused. A walk through the graph, before the compiler gets it, finds
the inputs that each result is computed from; when the graph runs, a result of weights alone is a weight.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from brevact.autograd import storage_report
from brevact.autograd.abandoned_forwards import active
from brevact.autograd.rows import row_of
from brevact.autograd.weights import is_weight
from brevact.private_names.of_graph import COMPILED
from brevact.private_names.of_torch import (
    DisableTorchFunction,
    current_translator,
    function_stack_at,
    is_parameter_or_buffer,
    len_function_stack,
    pop_function_mode,
    push_function_mode,
)

_NO_CONTEXT = nullcontext()
_NUMBERS = int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size


@torch.compiler.assume_constant_result
def watch_graph() -> None:
    """Wrap the compiler of the graph that Dynamo traces (called in traced code)."""
    graph = current_translator().output
    if not (graph.export or graph.compiler_fn is None or getattr(graph.compiler_fn, "is_brevact", False)):
        graph.compiler_fn = _watched(graph.compiler_fn)


def _watched(compiler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiler)
    def compile_watched(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        from brevact.compiler.graphs import packing  # it imports Inductor

        results = _results_of(graph)
        with packing(graph) as rows:
            run = compiler(graph, inputs, **options)
        if run is graph or getattr(run, "__self__", None) is graph:  # op by op: the region's mode sees each
            return run
        return _in_region(run, results, rows)

    compile_watched.is_brevact = True  # type: ignore[attr-defined]
    return compile_watched


def _in_region(run: Callable[..., Any], results: dict[int, frozenset[int]], rows: list[Any]) -> Callable[..., Any]:
    is_of_autograd = (getattr(run, "__module__", None) or "").startswith(COMPILED)

    def run_in_region(*inputs: Any) -> Any:
        if storage_report.recorders:
            storage_report.report_graph(rows)
        if not active.regions:
            return run(*inputs)
        region = active.regions[-1]
        with DisableTorchFunction():
            are_weights = {at: all(is_weight(inputs[i], region.state) for i in made) for at, made in results.items()}
        outputs = _run_unseen(run, inputs, region) if is_of_autograd else run(*inputs)
        with DisableTorchFunction():
            region.state.mark_graph(outputs)
            for at, weight in are_weights.items():
                region.state.mark_weight(outputs[at], weight=weight)
        return outputs

    return run_in_region


def _run_unseen(run: Callable[..., Any], inputs: tuple[Any, ...], region: Any) -> Any:
    """Run a graph, which packs its tensors, without the mode and hooks around; regions inside are outermost ones."""
    depth = len_function_stack()
    if not depth or function_stack_at(depth - 1) is not region.mode:  # another mode is above
        return run(*inputs)
    is_told = bool(storage_report.recorders) or region.has_rules_for_other_code or not region.hooks.are_innermost()
    regions = active.regions
    try:
        active.regions = []
        pop_function_mode()
        try:
            with _NO_CONTEXT if is_told else region.hooks.suspended:
                return run(*inputs)
        finally:
            push_function_mode(region.mode)
    finally:
        active.regions = regions


def _results_of(graph: fx.GraphModule) -> dict[int, frozenset[int]]:
    """Return the results that may be weights, by place, with the places of the inputs that must be weights then."""
    made_of: dict[fx.Node, frozenset[int] | None] = {}  # None for activations
    places = itertools.count()
    outputs: Any = ()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            place = next(places)
            made_of[node] = frozenset() if is_parameter_or_buffer(node) else frozenset((place,))
        elif node.op == "get_attr":
            value = functools.reduce(getattr, node.target.split("."), graph)
            made_of[node] = frozenset() if isinstance(value, nn.Parameter) else None
        elif node.op == "output":
            outputs = node.args[0]
        else:
            made_of[node] = _made_by(node, made_of)
    found = {i: made_of[node] for i, node in enumerate(outputs) if isinstance(node, fx.Node)}
    return {i: made for i, made in found.items() if made is not None and _is_marked(outputs[i])}


def _made_by(node: fx.Node, made_of: dict[fx.Node, frozenset[int] | None]) -> frozenset[int] | None:
    """Return the inputs that a call's result is computed from; None if it is an activation whatever these are."""
    func = _function_of(node)
    row = None if func is None else row_of(func)
    if row is not None and (row.is_layer or row.makes_weight):
        return None if row.is_layer else frozenset()
    operands = [made_of[x] for x in node.all_input_nodes if not _is_number(x.meta.get("example_value"))]
    known = [made for made in operands if made is not None]
    return frozenset().union(*known) if known and len(known) == len(operands) else None


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value.numel()) is int and value.numel() == 1 and not value.requires_grad
    return isinstance(value, _NUMBERS)


def _is_marked(node: fx.Node) -> bool:
    """Whether regions track which tensors of this type are weights."""
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor):
        return False
    return value.is_floating_point() or value.is_complex() or value.dtype is torch.bool


def _function_of(node: fx.Node) -> Any:
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None)
    return Tensor.__getitem__ if node.target is operator.getitem else node.target
