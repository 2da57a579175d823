"""Wrap the compiler of Dynamo's graphs: a marked graph packs its saved tensors, unseen by the regions around it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import fx

from brevact.autograd import storage_report
from brevact.autograd.running import active
from brevact.compiler import MARK
from brevact.private_names.of_torch import (
    COMPILED,
    CompileContext,
    convert_frame,
    function_stack_at,
    len_function_stack,
    pop_function_mode,
    push_function_mode,
)

_NO_CONTEXT = nullcontext()


class Marked(NamedTuple):
    """A region that Dynamo traces, whose nodes get its mark."""

    text: str
    depth: int  # number of modes around it
    tracer: Any  # of the graph, or of the function of a higher-order op


def marked_regions(translator: Any) -> list[Marked]:
    regions: list[Marked] = translator.output.__dict__.setdefault("brevact_regions", [])
    return regions


def is_recomputed(translator: Any) -> bool:
    """Whether Dynamo traces the function of a higher-order op in a region: a checkpoint recomputes saved tensors."""
    return any(each.tracer is not translator.output.current_tracer for each in marked_regions(translator))


def watch_graph(graph: Any) -> None:
    if not (graph.export or graph.compiler_fn is None or getattr(graph.compiler_fn, "is_brevact", False)):
        graph.compiler_fn = _watched(graph.compiler_fn)


def _watched(compiler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiler)
    def compile_watched(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        from brevact.compiler.graphs import packing  # it imports Inductor

        _policies[CompileContext.current_compile_id()] = _policy_of(graph, compiler)
        with packing(graph, inputs) as rows:
            run = compiler(graph, inputs, **options)
        if run is graph or getattr(run, "__self__", None) is graph:  # op by op: the region's mode sees each
            return run
        return _in_region(run, rows)

    compile_watched.is_brevact = True  # type: ignore[attr-defined]
    return compile_watched


_count = convert_frame.compute_cache_size
_policies: dict[Any, int] = {}  # of compiled functions, by PyTorch's number of them


def _policy_of(graph: fx.GraphModule, compiler: Any) -> int:
    """A hash of the marks of a graph by module, and of the budget of its compiler: without holding either."""
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    nodes = (node.meta for each in graph.modules() if isinstance(each, fx.GraphModule) for node in each.graph.nodes)
    marks = {(*(meta.get("nn_module_stack") or ("",)), (meta.get("custom") or {}).get(MARK)) for meta in nodes}
    budget = getattr(compiler, "budget", None) or getattr(compiler, "config", {}).get("custom_partitioner_fn")
    return hash((frozenset(marks), budget))


@functools.wraps(_count)
def _count_of_one_policy(frame: Any, entries: Any, *others: Any) -> Any:
    """Let Dynamo's limit of compiled graphs of a function hold for each policy, not for all of them together."""
    found, counts, rest = _count(frame, entries, *others), Counter[Any](), entries
    while rest:  # a linked list before PyTorch 2.13
        entry, rest = (rest[0], rest[1:]) if isinstance(rest, list) else (rest, rest.next)
        counts[_policies.get(entry.compile_id)] += 1
    most = max(counts.values(), default=0)
    found.num_cache_entries_with_same_id_matched_objs = min(found.num_cache_entries_with_same_id_matched_objs, most)
    return found


convert_frame.compute_cache_size = _count_of_one_policy


def _in_region(run: Callable[..., Any], rows: list[Any]) -> Callable[..., Any]:
    is_of_autograd = (getattr(run, "__module__", None) or "").startswith(COMPILED)

    def run_in_region(*inputs: Any) -> Any:
        if storage_report.recorders:
            storage_report.report_graph(rows)
        if not (active.regions and is_of_autograd):
            return run(*inputs)
        return _run_unseen(run, inputs, active.regions[-1])

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
