"""Partition the graphs of `torch.compile` so that forward hands packed tensors to backward."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx
from torch._dynamo.backends import common
from torch._functorch import config, partitioners
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import CheckpointPolicy

from brevact.autograd.rows import row_of
from brevact.autograd.seeds import rank_seed
from brevact.autograd.settings import BackwardSettings, bits_of
from brevact.compiler.marks import FULL_PRECISION, MARK
from brevact.compiler.partition import Row, pack_saved, recomputed_layers
from brevact.quantizers import from_text, to_text


class _Current(threading.local):
    partitioner: Any = None  # that partitions a joint graph
    for_others: Any = None  # for compilers that are not Inductor


_current = _Current()


class Partitioner(CustomPartitionerFn):
    """PyTorch's partitioner by minimum cut, whose saved tensors are packed."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.key = " ".join((*sorted(texts), str(rank_seed())))
        self.is_exact = all(from_text(text).is_exact for text in texts)
        self.rows: list[Row] = []

    def uuid(self) -> Any:
        return hashlib.sha256(self.key.encode()).hexdigest()

    def __call__(self, joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        before, _current.partitioner = _current.partitioner, self
        self.options = options
        try:
            return partitioners.min_cut_rematerialization_partition(joint, joint_inputs, **options)
        finally:
            _current.partitioner = before


@contextmanager
def packing(graph: fx.GraphModule) -> Iterator[None]:
    """Pack what backward reads of a graph of Dynamo that is compiled in this block, if its nodes are marked."""
    texts = set()
    for each in _graphs(graph):
        for node in each.nodes:
            if mark := mark_of(node):
                node.meta["custom"] = {**node.meta["custom"], MARK: _mark_for(mark, _name_of(node))}
                texts.add(mark)
    if not texts:
        yield
        return
    partitioner = Partitioner(texts)
    with inductor.patch(custom_partitioner_fn=partitioner):
        before, _current.for_others = _current.for_others, partitioner
        try:
            yield
        finally:
            _current.for_others = before


def _name_of(node: fx.Node) -> str:
    """The name that rules call an op of Dynamo's graph by."""
    func: Any = getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target
    return row_of(func).name if callable(func) else ""


@functools.cache
def _mark_for(text: str, name: str) -> str:
    settings = from_text(text)
    found = settings.by_op.get(name, settings)
    if found is None or found.quantizer is None:
        return FULL_PRECISION
    return to_text(dataclasses.replace(found, of_functions=())) if found.of_functions else str(found.text)


def _graphs(module: fx.GraphModule) -> Iterator[fx.Graph]:
    return (each.graph for each in module.modules() if isinstance(each, fx.GraphModule))


def mark_of(node: fx.Node) -> str | None:
    custom = node.meta.get("custom")
    return custom.get(MARK) if isinstance(custom, dict) else None


class _Marks:
    """Settings of the nodes of a joint graph, by their marks."""

    def __init__(self, graph: fx.Graph) -> None:
        forward = {}
        for node in graph.nodes:
            if (number := node.meta.get("seq_nr")) is not None and node.meta.get("partitioner_tag") != "is_backward":
                forward.setdefault(number, mark_of(node))
        self._numbers, self._marks = sorted(forward), forward

    def _of(self, node: fx.Node) -> str | None:
        if (mark := mark_of(node)) is not None or "fwd_source_fn_stack" in node.meta:
            return mark
        # The compiler numbers the op that an operation in place becomes after its node of autograd.
        place = bisect.bisect_left(self._numbers, node.meta["seq_nr"])
        return self._marks[self._numbers[place]] if place < len(self._numbers) else None

    def settings_of(self, readers: Iterable[fx.Node]) -> BackwardSettings | None:
        """Settings of a tensor that some nodes of backward read: the finest; None if one saves full precision."""
        marks = {self._of(node) for node in readers if "custom" in node.meta or "seq_nr" in node.meta}
        if not marks or None in marks or FULL_PRECISION in marks:
            return None
        found = [from_text(mark) for mark in marks]
        return max(found, key=lambda settings: (settings.is_exact, bits_of(settings.quantizer)))


_make = common.aot_module_simplified


@functools.wraps(_make)
def _make_packed(*args: Any, **options: Any) -> Any:
    partitioner = _current.for_others
    if partitioner is not None and options.get("partition_fn") is not compile_fx.partition_fn:
        options["partition_fn"] = partitioner
        if not partitioner.is_exact:  # the table is of ops that Inductor decomposes
            options["decompositions"] = {**select_decomp_table(), **(options.get("decompositions") or {})}
    return _make(*args, **options)


common.aot_module_simplified = _make_packed
_choose = partitioners.choose_saved_values_set


@functools.wraps(_choose)
def _choose_packed(joint_graph: fx.Graph, node_info: Any, memory_budget: float = 1) -> list[fx.Node]:
    partitioner = _current.partitioner
    if partitioner is None:
        return _choose(joint_graph, node_info, memory_budget)
    marks = _Marks(joint_graph)
    again = recomputed_layers(joint_graph, marks.settings_of)
    for node in again:
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    with config.patch({} if partitioner.is_exact else {"ban_recompute_materialized_backward": False}):
        saved = _choose(joint_graph, node_info, memory_budget)
    for node in again:
        del node.meta["recompute"]
    options = partitioner.options
    static = frozenset(options.get("static_lifetime_input_indices") or ())
    saved, rows = pack_saved(joint_graph, saved, options["num_fwd_outputs"], static, marks.settings_of)
    partitioner.rows += rows
    return saved


partitioners.choose_saved_values_set = _choose_packed
