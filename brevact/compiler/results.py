"""Wrap the compiler of Dynamo's graphs: a marked graph packs its saved tensors, unseen by the regions around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import fx

from brevact.autograd.region.running import active
from brevact.autograd.saving import storage_report
from brevact.private_names.of_torch import (
    COMPILED,
    DYNAMO,
    function_stack_at,
    len_function_stack,
    pop_function_mode,
    push_function_mode,
)


def watch_graph(graph: Any) -> None:
    compiler = graph.compiler_fn
    is_explained = getattr(compiler, "__module__", None) == DYNAMO  # by torch._dynamo.explain, which compiles nothing
    if not (graph.export or compiler is None or is_explained or getattr(compiler, "is_brevact", False)):
        graph.compiler_fn = _watched(compiler)


def _watched(compiler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiler)
    def compile_watched(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        from brevact.compiler.graphs import packing, rows_at  # it imports Inductor

        with packing(graph) as rows:
            run = compiler(graph, inputs, **options)

        def run_reported(*values: Any) -> Any:
            if not storage_report.recorders or rows is None:
                return run(*values)
            with storage_report.running_graph(rows_at(compiler, graph, rows, values), values):
                return run(*values)

        return _in_region(run, run_reported)

    compile_watched.is_brevact = True  # type: ignore[attr-defined]
    return compile_watched


def _in_region(graph: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Run a graph, which packs its tensors, without the mode and hooks around; regions inside are outermost ones."""
    is_of_autograd = (getattr(graph, "__module__", None) or "").startswith(COMPILED)

    def run_in_region(*inputs: Any) -> Any:
        regions, depth = active.regions, len_function_stack()
        region = regions[-1] if regions and is_of_autograd and depth else None
        if region is None or function_stack_at(depth - 1) is not region.mode:  # another mode is above
            return run(*inputs)
        is_told = region.has_rules_for_other_code or not region.hooks.are_innermost()
        active.regions = []
        pop_function_mode()
        try:
            with nullcontext() if is_told else region.hooks.suspended:
                return run(*inputs)
        finally:
            push_function_mode(region.mode)
            active.regions = regions

    return run_in_region
