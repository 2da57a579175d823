"""Mark the results of compiled graphs that run in an eager region as weights or activations.

A mode sees no op of a graph that the compiler has fused. A walk through the graph, before the compiler gets it, finds
the inputs that each result is computed from; when the graph runs, a result of weights alone is a weight, as
:meth:`brevact.autograd.regions.Region.are_weights` decides for eager ops.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from brevact.autograd import storage_report
from brevact.autograd.active_regions import active
from brevact.autograd.call_arguments import fills_storage
from brevact.autograd.compiled.nodes import call_in_graph, function_of
from brevact.autograd.ops.base import is_inplace
from brevact.autograd.rows import row_of
from brevact.autograd.weights import ModelState, is_weight
from brevact.private_names.of_graph import COMPILED
from brevact.private_names.of_torch import (
    ClassInGraph,
    DisableTorchFunction,
    current_translator,
    function_stack_at,
    is_parameter_or_buffer,
    len_function_stack,
    pop_function_mode,
    push_function_mode,
    variable_of,
)

#: Conjunctive normal form over a graph's input positions: a tensor is a weight if each inner set has an input that is a
#: weight. The rules of the ops on the tensor's way combine to this form.
Alternatives = frozenset[frozenset[int]]

_ALWAYS: Alternatives = frozenset()
_NEVER: Alternatives = frozenset((frozenset(),))
#: Limit on alternatives; no function of weights has as many.
_MOST = 1 << 12
_NO_CONTEXT = nullcontext()


class _Result(NamedTuple):
    """A tensor that a graph returns, or an input that it overwrites, which may be a weight after a run."""

    position: int
    is_input: bool
    made_of: Alternatives

    def is_weight(self, inputs: tuple[Any, ...], state: ModelState) -> bool:
        return all(any(is_weight(inputs[i], state) for i in some) for some in self.made_of)


@functools.cache
def show_losses() -> None:
    """Let Dynamo pass ``F.cross_entropy`` to modes, for an `nn.CrossEntropyLoss` that traced code makes in a region.

    By itself Dynamo puts the function straight into the graph, where no region would pack its logits.
    """
    unseen = ClassInGraph._call_cross_entropy_loss

    def call(self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        made = unseen(self, translator, args, kwargs)

        def loss(input: Any, target: Any) -> Any:
            return variable_of(translator, F.cross_entropy).call_function(translator, [input, target, *args], kwargs)

        return type(made)(loss) if _traces_region(translator) else made

    ClassInGraph._call_cross_entropy_loss = call


def _traces_region(translator: Any) -> bool:
    """Whether Dynamo traces code inside a region."""
    if getattr(translator.output.compiler_fn, "is_brevact", False):
        return True
    modes = translator.symbolic_torch_function_state.mode_stack
    return any(getattr(getattr(mode, "value", None), "is_region", False) for mode in modes)


@torch.compiler.assume_constant_result
def watch_graph() -> None:
    """Wrap the compiler of the graph that Dynamo traces (called in traced code)."""
    show_losses()
    graph = current_translator().output
    if not (graph.export or graph.compiler_fn is None or getattr(graph.compiler_fn, "is_brevact", False)):
        graph.compiler_fn = _watched(graph.compiler_fn)


def _watched(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiler, so that its graphs mark their results in the region that they run in."""

    @functools.wraps(compiler)
    def compile_watched(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        results = _results_of(graph)
        run = compiler(graph, inputs, **options)
        if run is graph or getattr(run, "__self__", None) is graph:  # op by op: the region's mode sees each
            return run
        return _in_region(run, results)

    compile_watched.is_brevact = True  # type: ignore[attr-defined]
    return compile_watched


def _in_region(run: Callable[..., Any], results: list[_Result]) -> Callable[..., Any]:
    """Wrap a compiled graph to mark its results as weights or activations in the region that it runs in."""
    is_of_autograd = (getattr(run, "__module__", None) or "").startswith(COMPILED)

    def run_in_region(*inputs: Any) -> Any:
        if not active.regions:
            return run(*inputs)
        region = active.regions[-1]
        with DisableTorchFunction():
            weights = [result for result in results if result.is_weight(inputs, region.state)]
        outputs = _run_unseen(run, inputs, region) if is_of_autograd else run(*inputs)
        with DisableTorchFunction():
            region.state.mark_graph(outputs)
            for result in results:
                x = (inputs if result.is_input else outputs)[result.position]
                region.state.mark_weight(x, weight=result in weights)
        return outputs

    return run_in_region


def _run_unseen(run: Callable[..., Any], inputs: tuple[Any, ...], region: Any) -> Any:
    """Run a graph without the mode and hooks of the region around it: the graph packs its tensors itself.

    If an op in the graph enters a region, that is an outermost one.
    """
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


# --- the walk through a graph


def _results_of(graph: fx.GraphModule) -> list[_Result]:
    """Return a graph's results that can be weights, and the inputs that it overwrites."""
    made_of = _MadeOf()
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for i, node in enumerate(inputs):
        if is_parameter_or_buffer(node):
            made_of.keep_weight(node)
        else:
            made_of.set(node, frozenset((frozenset((i,)),)))
    overwritten: set[Any] = set()
    outputs: Any = ()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            value = functools.reduce(getattr, node.target.split("."), graph)
            made_of.set(node, _ALWAYS if isinstance(value, nn.Parameter) else _NEVER)
        elif node.op.startswith("call_"):
            func, args, kwargs = _call_of(node)
            made = _made_by(func, node, args, kwargs, made_of)
            made_of.set(node, made)
            changed = kwargs.get("out")
            if changed is None and func is not None and args and (func in _INPLACE or _is_inplace(func, args, kwargs)):
                changed = args[0]
            if isinstance(changed, fx.Node):
                made_of.set(changed, made)
                overwritten.add(made_of.key(changed))
        elif node.op == "output":
            outputs = node.args[0]
    return [
        *_results(inputs, made_of, is_input=True, of=lambda node: made_of.key(node) in overwritten),
        *_results(outputs, made_of, is_input=False, of=lambda node: made_of.get(node) != _NEVER),
    ]


def _results(nodes: Iterable[Any], made_of: _MadeOf, *, is_input: bool, of: Callable[[fx.Node], bool]) -> list[_Result]:
    return [
        _Result(i, is_input, made_of.get(node))
        for i, node in enumerate(nodes)
        if isinstance(node, fx.Node) and _is_marked(_value_of(node)) and of(node)
    ]


def _is_marked(value: Any) -> bool:
    """Whether regions track which tensors of this type are weights."""
    return isinstance(value, Tensor) and (_is_floating(value) or value.dtype is torch.bool)


class _MadeOf:
    """The inputs that a graph's tensors are computed from, by storage (shared by views), or by node without one."""

    def __init__(self) -> None:
        self._known: dict[Any, Alternatives] = {}
        self._weights: set[Any] = set()

    def keep_weight(self, node: fx.Node) -> None:
        """Record a parameter or buffer, which stays a weight whatever overwrites it."""
        self.set(node, _ALWAYS)
        self._weights.add(self.key(node))

    def get(self, node: fx.Node) -> Alternatives:
        return self._known.get(self.key(node), _NEVER)

    def set(self, node: fx.Node, made_of: Alternatives) -> None:
        key = self.key(node)
        if key not in self._weights:
            self._known[key] = made_of

    @staticmethod
    def key(node: fx.Node) -> Any:
        value = _value_of(node)
        if isinstance(value, Tensor):
            try:
                return value.untyped_storage()._cdata
            except (NotImplementedError, RuntimeError):  # another layout, or a class without storage
                pass
        return node


def _value_of(node: fx.Node) -> Any:
    """Return the fake tensor of a node's result, or another result's value."""
    return node.meta.get("example_value")


def _is_floating(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


_NAMED: dict[Any, Any] = {operator.getitem: Tensor.__getitem__, operator.setitem: Tensor.__setitem__}
#: Operators that overwrite their first argument.
_INPLACE = frozenset(
    (
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
        *(operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift),
        *(operator.irshift, Tensor.__setitem__),
    )
)


def _call_of(node: fx.Node) -> tuple[Any, Any, dict[str, Any]]:
    """Return a call node's function, arguments and keywords; the function is None if torch lacks it."""
    if node.target is call_in_graph:
        name, _, _, args, kwargs = cast(tuple[Any, ...], node.args)
        return function_of(name), args, kwargs
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None), node.args, node.kwargs
    if node.op == "call_module":
        return None, node.args, node.kwargs
    target: Any = node.target
    return _NAMED.get(target, target), node.args, node.kwargs


def _is_inplace(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return hasattr(func, "__name__") and is_inplace(func, args, kwargs)


def _has_layers(graph: fx.GraphModule) -> bool:
    """Whether a higher-order op's body has layers or lookups, which compute activations from weights."""
    return any(
        (row := row_of(func)).is_layer or row.looks_up
        for body in graph.modules()
        if isinstance(body, fx.GraphModule)
        for node in body.graph.nodes
        if node.op in ("call_function", "call_method") and (func := _call_of(node)[0]) is not None
    )


def _replaced(args: Any, kwargs: dict[str, Any], *, is_first: bool) -> Any:
    """Return the argument that the call overwrites completely, or None (``operands_beside``)."""
    out = args[0] if is_first else kwargs.get("out")
    if not isinstance(out, fx.Node) or not isinstance(_value_of(out), Tensor):
        return None
    others: list[fx.Node] = []
    beside = args[1:] if is_first else (args, {name: x for name, x in kwargs.items() if name != "out"})
    fx.map_arg(beside, others.append)
    return out if out not in others and fills_storage(_value_of(out)) else None


def _made_by(func: Any, node: fx.Node, args: Any, kwargs: dict[str, Any], made_of: _MadeOf) -> Alternatives:
    """Return the inputs that a call's result is computed from, by the rule of ``Region.makes_weight``."""
    row = None if func is None else row_of(func)
    if row is not None and (row.is_layer or row.makes_weight):
        return _NEVER if row.is_layer else _ALWAYS
    counted, others, indices = [], [], []
    trains = False
    replaced = _replaced(args, kwargs, is_first=row is not None and row.replaces)
    for x in node.all_input_nodes:
        value = _value_of(x)
        if x is replaced:
            continue
        if x.op == "get_attr" and not isinstance(value, Tensor):
            body = functools.reduce(getattr, str(x.target).split("."), node.graph.owning_module)
            if isinstance(body, fx.GraphModule) and _has_layers(body):
                return _NEVER
        if not isinstance(value, Tensor):
            if isinstance(value, tuple | list) and any(isinstance(each, Tensor) for each in value):
                counted.append(x)
            continue
        is_one = type(value.numel()) is int and value.numel() == 1
        if _is_floating(value) and (value.requires_grad or not is_one):
            counted.append(x)
            trains = trains or value.requires_grad
        else:
            others.append(x)
            if value.dtype is not torch.bool and not is_one:
                indices.append(x)
    if counted:
        if row is not None and row.looks_up and trains:
            counted += indices
        return _limited(frozenset().union(*map(made_of.get, counted)))
    found = [made_of.get(x) for x in others]
    if not found:
        return _NEVER
    return functools.reduce(lambda a, b: _limited(frozenset(x | y for x in a for y in b)), found)


def _limited(made_of: Alternatives) -> Alternatives:
    return _NEVER if len(made_of) > _MOST or frozenset() in made_of else made_of
