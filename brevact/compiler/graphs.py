"""Partition the graphs of `torch.compile` so that forward hands packed tensors to backward."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sympy import sympify
from torch import Tensor, fx, nn

from brevact.autograd.region.rows import row_of
from brevact.autograd.region.seeds import seed_of_size
from brevact.autograd.region.settings import BackwardSettings, bits_of
from brevact.compiler import FULL_PRECISION, MARK
from brevact.compiler.bits import WIDTHS, with_bits
from brevact.compiler.joint_graph import JointGraph, Signature
from brevact.compiler.nodes import nbytes_of
from brevact.compiler.packing import Row, pack
from brevact.compiler.recomputation import Plan, Recomputation, recomputing
from brevact.compiler.saved_values import choose_saved_values
from brevact.private_names.of_compiler import (
    CustomPartitionerFn,
    autograd_function_apply,
    backends,
    compile_fx,
    functorch_config,
    get_hash_for_files,
    inductor_config,
    lookup_backend,
    nop,
    partitioners,
    select_decomp_table,
)
from brevact.private_names.of_torch import HigherOrderOperator
from brevact.quantizers import from_text, to_text
from brevact.quantizers.formats.lossless import LosslessQuantizer

_FILES = tuple(sorted(str(file) for file in Path(__file__).parent.glob("*.py")))


class _Input(NamedTuple):
    is_parameter: bool
    is_activation: bool  # of code before the graph, which nobody else need hold


class _Current(threading.local):
    partitioner: Any = None  # that partitions a joint graph
    texts: frozenset[str] = frozenset()  # settings of the graph that is compiled
    rows: list[Row] | None = None
    inputs: Sequence[_Input] = ()
    is_partitioned: bool = False
    is_planned: bool = False  # partitioned, and not compiled
    budget: tuple[str, float] | None = None  # of compilers that are not Inductor


_current = _Current()


@contextmanager
def _with(**values: Any) -> Iterator[None]:
    before = {name: getattr(_current, name) for name in values}
    vars(_current).update(values)
    try:
        yield
    finally:
        vars(_current).update(before)


@dataclasses.dataclass(unsafe_hash=True)  # equal ones for Dynamo, which compiles blocks again whose options differ
class Partitioner(CustomPartitionerFn):
    """PyTorch's partitioner by minimum cut, whose saved tensors are packed."""

    budget: tuple[str, float] | None = None

    def uuid(self) -> Any:
        size = seed_of_size() if any(from_text(text).draws_size for text in _current.texts) else 0
        key = (*sorted(_current.texts), repr(self.budget), torch.__version__, str(size))
        return get_hash_for_files(_FILES, " ".join(key))

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        primals = [node for node in gm.graph.nodes if node.op == "placeholder" and node.name.startswith("primals")]
        known = _current.inputs if len(_current.inputs) == len(primals) else ()  # not of subclasses, which have parts
        static = {*(options.get("static_lifetime_input_indices") or ())}
        static |= {place for place, each in enumerate(known) if each.is_parameter}
        activations = frozenset(place for place, each in enumerate(known) if each.is_activation)
        is_inductor = options.get("compiler") == "inductor"
        layout = is_inductor, is_inductor and compile_fx.GraphLowering.decide_layout_opt(gm, is_inference=False)
        self.signature = Signature(options["num_fwd_outputs"], frozenset(static), activations - static, *layout)
        with _with(partitioner=self):
            return partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **options)


@contextmanager
def packing(graph: fx.GraphModule) -> Iterator[list[Row] | None]:
    """Pack the saved tensors of a Dynamo graph that is compiled in this block, if its nodes are marked.

    The list, None without marks, gets a row for each tensor that is saved, unless the graph is in the compiler's cache.

    Raises:
        ValueError: the compiler has no partitioner, which packs.
    """
    texts, last = set(), FULL_PRECISION
    _unmark_recomputed(graph)
    for each in _graphs(graph):
        for node in each.nodes:
            if (mark := mark_of(node)) is not None:
                last = mark
                if mark:
                    node.meta["custom"] = {**node.meta["custom"], MARK: _mark_for(mark, _name_of(node))}
                    texts.add(mark)
            elif node.target is autograd_function_apply and last:  # which Dynamo traces beside the regions
                bodies = (getattr(each.owning_module, x.target) for x in node.all_input_nodes if x.op == "get_attr")
                for inner in (inner for body in bodies for inner in body.graph.nodes if mark_of(inner) is None):
                    inner.meta["custom"] = {**inner.meta.get("custom", {}), MARK: _exact(last)}
    if not texts:
        yield None
        return
    of_graph = _with(texts=frozenset(texts), rows=(rows := list[Row]()), is_partitioned=False)
    with of_graph, inductor_config.patch(custom_partitioner_fn=Partitioner()), ExitStack() as stack:
        young, middle, full = gc.get_threshold()
        stack.callback(gc.set_threshold, young, middle, full)
        gc.set_threshold(young, middle, 1 << 30)  # full collections would walk a compiler's nodes, which are in use
        yield rows
        if not _current.is_partitioned:
            raise ValueError(
                'backend: it has no partitioner, which packs saved tensors; accepted are "inductor", "aot_eager" and '
                "others that compile by AOTAutograd. Without packing, call brevact.restore_backward(model)"
            )


def rows_at(compiler: Callable[..., Any], graph: fx.GraphModule, rows: list[Row], inputs: Sequence[Any]) -> list[Row]:
    """Rows of a graph at inputs of some sizes; one that the compiler had in its cache is partitioned again."""
    fakes = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
    if not rows:
        with functorch_config.patch(enable_autograd_cache=False), _with(is_planned=True), packing(graph) as found:
            compiler(graph, fakes)
        rows += found or []
    symbols = {fake.node.expr: x for fake, x in zip(fakes, inputs, strict=True) if isinstance(fake, torch.SymInt)}
    return [Row(*row[:-2], *(int(sympify(size).subs(symbols)) for size in row[-2:])) for row in rows]


@dataclasses.dataclass(frozen=True)
class _WithinBudget:
    compiler: Callable[..., Any]
    budget: tuple[str, float]

    def __call__(self, graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        with _with(budget=self.budget):
            return self.compiler(graph, inputs, **options)


def with_budget(backend: Any, budget: tuple[str, float]) -> Callable[..., Any]:
    return _WithinBudget(backend if callable(backend) else lookup_backend(backend), budget)


def _name_of(node: fx.Node) -> str:
    """The name that rules call an op of Dynamo's graph by."""
    func: Any = getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target
    return (row_of(func).name or "") if callable(func) else ""


@functools.cache
def _mark_for(text: str, name: str) -> str:
    settings = from_text(text)
    found = settings.by_op.get(name, settings)
    if found is None or found.quantizer is None:
        return FULL_PRECISION
    return to_text(dataclasses.replace(found, of_functions=())) if found.of_functions else str(found.text)


@functools.cache
def _exact(text: str) -> str:
    """Settings that pack only exactly, and are else as the text says."""
    return str(dataclasses.replace(from_text(text), quantizer=LosslessQuantizer(), recompute=0, of_functions=()).text)


def _graphs(module: fx.GraphModule) -> Iterator[fx.Graph]:
    return (each.graph for each in module.modules() if isinstance(each, fx.GraphModule))


def _unmark_recomputed(module: fx.GraphModule) -> None:
    """Take the marks off higher-order ops and off the functions that they call: a checkpoint recomputes these."""
    for owner in module.modules():
        for node in owner.graph.nodes if isinstance(owner, fx.GraphModule) else ():
            if not isinstance(node.target, HigherOrderOperator) or mark_of(node) is None:
                continue
            called = [getattr(owner, each.target, None) for each in node.all_input_nodes if each.op == "get_attr"]
            graphs = [graph for each in called if isinstance(each, fx.GraphModule) for graph in _graphs(each)]
            for each in (node, *(inner for graph in graphs for inner in graph.nodes)):
                if mark_of(each) is not None:
                    each.meta["custom"] = {key: value for key, value in each.meta["custom"].items() if key != MARK}


def mark_of(node: fx.Node) -> str | None:
    custom = node.meta.get("custom")
    return custom.get(MARK) if isinstance(custom, dict) else None


class _Marks:
    def __init__(self, graph: fx.Graph, least_bits: int = 0) -> None:
        self.least_bits = least_bits
        forward: dict[int, str | None] = {}
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
        finest = max(found, key=lambda settings: (settings.is_exact, bits_of(settings.quantizer)))
        return with_bits(finest, max(self.least_bits, bits_of(finest.quantizer))) if self.least_bits else finest


def _is_exact() -> bool:
    """Whether all settings of the graph pack exactly: the compiler's other choices then stay its own."""
    return all(from_text(text).is_exact for text in _current.texts)


#: Ops whose decompositions compute in types that the CPU's own kernels lack.
_NOT_ON_CPU = torch.ops.aten.eye.default, torch.ops.aten.eye.m
_make = backends.aot_module_simplified


@functools.wraps(_make)
def _make_packed(mod: Any, args: Sequence[Any], *others: Any, **options: Any) -> Any:
    if not _current.texts:
        return _make(mod, args, *others, **options)
    _current.is_partitioned = True
    if _current.is_planned:
        options |= dict.fromkeys(("fw_compiler", "bw_compiler", "inference_compiler"), nop)
    if options.get("partition_fn") is not compile_fx.partition_fn:
        options["partition_fn"] = Partitioner(_current.budget)
        if not _is_exact():  # the table is of ops that Inductor decomposes
            table = {op: of for op, of in select_decomp_table().items() if op not in _NOT_ON_CPU}
            options["decompositions"] = {**table, **(options.get("decompositions") or {})}
    known = [  # parts of a Dynamo graph, such as DDP's buckets, have inputs of their own
        _Input(isinstance(x, nn.Parameter), isinstance(x, Tensor) and x.requires_grad and not x.is_leaf) for x in args
    ]
    with _with(inputs=known):
        return _make(mod, args, *others, **options)


backends.aot_module_simplified = _make_packed
_choose = partitioners.choose_saved_values_set


@functools.wraps(_choose)
def _choose_packed(joint_graph: fx.Graph, node_info: Any, memory_budget: float = 1) -> list[fx.Node]:
    partitioner = _current.partitioner
    if partitioner is None or not _current.texts:
        return _choose(joint_graph, node_info, memory_budget)
    kind, size = partitioner.budget or ("part", memory_budget)
    marks = _Marks(joint_graph, 0 if kind == "part" else WIDTHS[0])
    if kind == "ratio":
        saved = _choose(joint_graph, node_info, 1.0)
        plain = JointGraph(joint_graph, saved, partitioner.signature, marks.settings_of)
        kind, size = "bytes", sum(map(nbytes_of, filter(plain.adds, saved))) / size
    with recomputing(joint_graph, marks.settings_of, is_exact=_is_exact()):
        saved, widths = _saved(kind, size, joint_graph, node_info, partitioner.signature, marks)
    joint = JointGraph(joint_graph, saved, partitioner.signature, marks.settings_of, widths)
    saved, rows = pack(choose_saved_values(joint))
    if _current.rows is not None:
        _current.rows += rows
    return saved


def _saved(
    kind: str, size: float, graph: fx.Graph, node_info: Any, signature: Signature, marks: _Marks
) -> tuple[list[fx.Node], dict[str, int]]:
    """Nodes to save within a part or bytes, and bit widths by name within bytes."""
    if kind == "part" and (_is_exact() or size == 1):
        return _choose(graph, node_info, size or 1e-9), {}  # at 0, PyTorch draws random numbers again

    def plan(saved: Iterable[fx.Node]) -> Plan:
        new, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        new.output(new.graph_copy(graph, copies))
        of_copy = _Marks(new, marks.least_bits)
        joint = JointGraph(new, [copies[node] for node in saved], signature, of_copy.settings_of)
        return choose_saved_values(joint), copies

    found = Recomputation(graph, node_info, plan)
    if kind == "part":
        return found.within(size * found.most), {}
    return found.least_noise(_choose(graph, node_info, 1.0), size)


partitioners.choose_saved_values_set = _choose_packed
