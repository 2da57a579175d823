"""Each row of the table of ATen ops holds by numbers: linear arguments, curvatures of smooth ones, sizes alone, places.

And by draws: in a compiled graph backward computes the row from packed activations, and the gradient's mean stays.
Calls are those that torch's own database of ops makes, forward and backward, with random values in place of theirs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from brevact import LosslessBackward, StochBackward2bit
from brevact.compiler import aten as table
from brevact.compiler import graphs, integers, joint_graph, saved_values
from brevact.compiler.aten import Use, aten, prims
from brevact.compiler.nodes import closure
from brevact.compiler.recomputation import recomputing
from brevact.private_names.of_compiler import select_decomp_table
from tests.autograd.database_laws import are_same
from tests.autograd.op_database import MISSING, OPS, Sample, Variant, samples, variants
from tests.compiler import compiled_ops
from tests.compiler.compiled_ops import activation, errors_of_mean

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

Call = tuple[Callable[..., Any], Any, dict[str, Any]]
_BY_PLACE = {
    packet: [place for place, use in uses.items() if use is Use.LINEAR] for packet, uses in table.BY_PLACE.items()
}
LINEAR = table.ADDITIVE | table.PRODUCTS | table.OF_SIZES | _BY_PLACE.keys()


def _is_data(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _real(x: Any) -> list[Tensor]:
    """The numbers among some leaves, complex ones as pairs."""
    parts = [each.resolve_conj() for each in tree_flatten(x)[0] if _is_data(each)]
    return [torch.view_as_real(each) if each.is_complex() else each for each in parts]


class _Watch(TorchDispatchMode):
    """Notes the largest small call of each row that reads and returns numbers of 32 bits and more."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, Call] = {}
        self.numel: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func.overloadpacket, kwargs or {}
        copy = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, args)
        found = func(*args, **kwargs)
        is_row = packet in LINEAR | table.SMOOTH or (packet in table.PLACES and isinstance(found, tuple))
        if is_row and kwargs.get("rounding_mode") is None:
            given, made = ([x for x in tree_flatten(each)[0] if isinstance(x, Tensor)] for each in (copy, found))
            is_float = any(_is_data(x) and x.numel() > 1 for x in given) and any(map(_is_data, made))
            is_half = any(x.dtype in (torch.float16, torch.bfloat16) for x in (*given, *made))
            numel, least = sum(x.numel() for x in made), self.numel.get(packet)
            if is_float and not is_half and (least is None or least < numel < 4096):
                self.calls[packet], self.numel[packet] = (func, copy, kwargs), numel
        return found


def _image(*shape: int) -> Tensor:
    return torch.randn(1, 2, *shape)


#: Calls of ops that decompositions make, and attention.
MADE: dict[Any, Callable[[], Any]] = {
    aten._fft_r2c: lambda: aten._fft_r2c(_image(8), [2], 0, True),
    aten._fft_c2c: lambda: aten._fft_c2c(_image(8).to(torch.complex64), [2], 0, True),
    aten._fft_c2r: lambda: aten._fft_c2r(_image(8).to(torch.complex64), [2], 0, 14),
    aten._conj: lambda: aten._conj(_image(8).to(torch.complex64)),
    aten._neg_view: lambda: aten._neg_view(_image(8)),
    aten._conj_physical: lambda: aten._conj_physical(_image(8).to(torch.complex64)),
    aten.view_as_real: lambda: aten.view_as_real(_image(8).to(torch.complex64)),
    aten._unsafe_index: lambda: aten._unsafe_index(_image(8), [None, None, torch.tensor([1, 1, 5])]),
    aten._unsafe_index_put: lambda: aten._unsafe_index_put(
        _image(8), [None, None, torch.tensor([1, 1])], _image(2), True
    ),
    aten.copy: lambda: aten.copy(_image(8), _image(8)),
    aten._grouped_mm: lambda: aten._grouped_mm(torch.randn(2, 4, 8), torch.randn(2, 8, 16)),
    aten.reflection_pad2d: lambda: aten.reflection_pad2d(_image(8, 8), [1, 2, 1, 2]),
    aten.reflection_pad3d: lambda: aten.reflection_pad3d(_image(4, 4, 4), [1] * 6),
    aten.replication_pad3d: lambda: aten.replication_pad3d(_image(4, 4, 4), [1] * 6),
    aten.reflection_pad2d_backward: lambda: aten.reflection_pad2d_backward(_image(10, 10), _image(8, 8), [1] * 4),
    aten.reflection_pad3d_backward: lambda: aten.reflection_pad3d_backward(_image(6, 6, 6), _image(4, 4, 4), [1] * 6),
    aten.replication_pad3d_backward: lambda: aten.replication_pad3d_backward(_image(6, 6, 6), _image(4, 4, 4), [1] * 6),
    aten.upsample_nearest2d: lambda: aten.upsample_nearest2d(_image(4, 4), [7, 9]),
    aten.upsample_nearest3d: lambda: aten.upsample_nearest3d(_image(4, 4, 4), [7, 9, 5]),
    aten._scaled_dot_product_flash_attention_for_cpu: lambda: (
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 16, requires_grad=True)).sum().backward()
    ),
    prims.device_put: lambda: prims.device_put(_image(8), torch.device("cpu")),
    prims.convert_element_type: lambda: prims.convert_element_type(_image(8), torch.float64),
    prims.rev: lambda: prims.rev(_image(8), [2]),
    prims.broadcast_in_dim: lambda: prims.broadcast_in_dim(_image(8), [1, 2, 8, 3], [0, 1, 2]),
    prims.split_dim: lambda: prims.split_dim(_image(8), 2, 4),
    prims.collapse_view: lambda: prims.collapse_view(_image(8), 0, 1),
    prims.view_of: lambda: prims.view_of(_image(8)),
    prims.fma: lambda: prims.fma(_image(8), _image(8), _image(8)),
    aten.median: lambda: aten.median(_image(8), 2),
    table.low_memory_max_pool: lambda: table.low_memory_max_pool(_image(8, 8), [3, 2], [2, 2], [1, 0], [1, 1], False),
    prims.inductor_force_stride_order: lambda: prims.inductor_force_stride_order(_image(4, 4), [32, 1, 8, 2]),
    **{packet: lambda packet=packet: packet(3 * _image(8)) for packet in table.SMOOTH},
}


@functools.cache
def calls_made() -> dict[Any, Call]:
    torch.manual_seed(0)
    with _Watch() as watch:
        for make in MADE.values():
            make()
    return watch.calls


@functools.cache
def calls_of_database() -> dict[Any, Call]:
    """Calls of some seconds."""
    torch.manual_seed(0)
    watch = _Watch()
    for op in OPS:
        with contextlib.suppress(Exception), warnings.catch_warnings():  # of a sample that this op refuses
            warnings.simplefilter("ignore")
            for sample in samples(op, most=3):
                with watch:
                    out = variants(op)[0].call(*sample.args, **sample.kwargs)
                    outputs = [x for x in tree_flatten(sample.process(out))[0] if _is_data(x) and x.requires_grad]
                    torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    return watch.calls


def call_of(packet: Any) -> Call:
    return calls_made().get(packet) or calls_of_database()[packet]


def rows(of: Iterable[Any], quick: Container[Any] = MADE) -> Any:
    """Rows, those of the database in the exhaustive tier."""
    marks = {packet: () if packet in quick else pytest.mark.exhaustive for packet in sorted(of, key=str)}
    return pytest.mark.parametrize(
        "packet", [pytest.param(packet, marks=each, id=str(packet)) for packet, each in marks.items()]
    )


def _results(call: Call, leaves: Iterable[Any]) -> Tensor:
    func, args, kwargs = call
    found = func(*tree_unflatten(list(leaves), tree_flatten(args)[1]), **kwargs)
    return torch.cat([x.double().flatten() for x in _real(found)])


def affine_error(call: Call, places: Iterable[int]) -> float:
    """How far f(x + y) + f(0) is from f(x) + f(y), of some leaves of the arguments together."""
    leaves, places = tree_flatten(call[1])[0], set(places)

    def results(make: Callable[[int], Tensor]) -> Tensor:
        return _results(call, [make(place) if place in places else x for place, x in enumerate(leaves)])

    first, second = ({place: torch.randn_like(leaves[place]) for place in places} for _ in range(2))
    both = results(lambda place: first[place] + second[place]) + results(lambda place: 0 * first[place])
    one, other = results(first.__getitem__), results(second.__getitem__)
    size = max(1.0, float(one.abs().amax()), float(other.abs().amax())) if one.numel() else 1.0
    return float((both - one - other).abs().max()) / size if one.numel() else 0.0


def places_of(call: Call, packet: Any) -> list[list[int]]:
    """Leaves of the arguments in which an op is linear, together or one by one."""
    data = [place for place, x in enumerate(tree_flatten(call[1])[0]) if _is_data(x)]
    if packet in _BY_PLACE:
        return [[place] for place in _BY_PLACE[packet] if place in data]
    if packet in table.OF_SIZES:
        return [[0]]
    return [data] if packet in table.ADDITIVE else [[place] for place in data]


#: Rows of other devices and of ops that no call on a CPU makes.
ELSEWHERE = (
    *table._packets(aten, "_fused_rms_norm_backward"),
    *(packet for packet in table.OUTPUT if "cpu" not in str(packet)),
    *(packet for packet in table._DROPOUT if "cpu" not in str(packet)),
    *table._packets(prims, "_low_memory_max_pool_offsets_to_indices"),
)


@rows(LINEAR.difference(ELSEWHERE))
def test_linear_arguments_are(packet):
    call = call_of(packet)
    places = places_of(call, packet)
    assert places
    eps = torch.finfo(torch.float32).eps
    for each in places:
        assert affine_error(call, each) < 64 * eps * math.sqrt(max(1, max(x.numel() for x in _tensors(call))))


def _tensors(call: Call) -> list[Tensor]:
    return [x for x in tree_flatten(call[1])[0] if isinstance(x, Tensor)]


#: Rows that functions with a gradient call in graphs by way of decompositions alone, and copies that are left out.
NOT_IN_GRAPHS = (
    *table._packets(aten, "alias detach upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d"),
    *table._packets(prims, "_low_memory_max_pool_with_offsets broadcast_in_dim collapse_view split_dim view_of"),
)


def in_graph(packet: Any, quantizer: Any) -> compiled_ops.Call:
    """A call of a row, which backward computes again from saved activations for gradients of factors of its results.

    Smooth functions and places have gradients of the activations, too.
    """
    func, args, kwargs = call = call_of(packet)
    leaves, spec = tree_flatten(args)
    places = {place for each in places_of(call, packet) for place in each} if packet in LINEAR else {0}

    def activate(x: Tensor) -> Tensor:
        x = torch.view_as_complex(activation(torch.view_as_real(x))) if x.is_complex() else activation(x)
        return x.bfloat16() if packet is aten._grouped_mm else x

    def function(factors: list[Tensor], leaves: list[Any]) -> list[Tensor]:
        leaves = [activate(x) if place in places else x for place, x in enumerate(leaves)]
        found = func(*tree_unflatten(leaves, spec), **kwargs)
        return [x * factor for x, factor in zip(_real(found), factors, strict=True)]

    torch.manual_seed(0)
    factors = [torch.randn(2, *x.shape, dtype=x.dtype).requires_grad_() for x in _real(func(*args, **kwargs))]
    leaves = [x.detach() if _is_data(x) else x for x in leaves]
    if packet not in LINEAR:
        leaves[0] = leaves[0].clone().requires_grad_()
    return compiled_ops.Call(Variant("", function), Sample((factors, leaves), {}), quantizer)


@contextlib.contextmanager
def _computing_again(graph: Any, *args: Any, **options: Any) -> Iterator[None]:
    """Let backward compute again all that forward computes from activations."""
    sources = [node for node in graph.nodes if node.target is torch.ops.brevact_tests.activation.default]
    tangents = [node for node in graph.nodes if node.name.startswith("tangents")]
    made, gradients = (closure(nodes, lambda node: node.users) for nodes in (sources, tangents))
    for node in made.keys() - gradients.keys() - {*sources, graph.output_node()}:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    with recomputing(graph, *args, **options):
        yield


_ROWS = (LINEAR | table.SMOOTH | table.PLACES.keys()).difference(ELSEWHERE, NOT_IN_GRAPHS)


@rows(_ROWS, quick=(aten.copy, prims.fma, aten.tanh, aten.median))
def test_rows_in_graphs(packet, monkeypatch):
    """Gradients from lossless codes are plain ones; the mean of draws is the gradient, for smooth rows but for 2 %."""
    others = {op: of for op, of in select_decomp_table().items() if getattr(op, "overloadpacket", None) is not packet}
    monkeypatch.setattr(graphs, "select_decomp_table", lambda: others)
    monkeypatch.setattr(graphs, "recomputing", _computing_again)
    monkeypatch.setattr(integers, "_LEAST_NUMEL", 0)
    monkeypatch.setattr(joint_graph, "BROADCAST", math.inf)
    for find in ("_slope", "_saturated"):  # saved in place of arguments
        monkeypatch.setattr(saved_values, find, lambda *args: ())
    plain, lossless = (in_graph(packet, each)() for each in (None, LosslessBackward))
    assert all(map(are_same, (*lossless.outputs, *lossless.grads), (*plain.outputs, *plain.grads)))
    packed = in_graph(packet, StochBackward2bit)
    for error, standard in errors_of_mean(packed, plain, draws=512):
        assert error <= 5 * standard + 64 * torch.finfo(torch.float32).eps + 0.02 * (packet in table.SMOOTH)
    if packet in table.PLACES:
        assert [row for row in packed.rows if row.op == str(packet) and row.bits and not row.use]
    else:
        assert packet in packed.packets and [row for row in packed.rows if row.bits and "activation" in row.op]


@rows(table.OF_SIZES)
def test_values_of_arguments_that_give_sizes_are_not_read(packet):
    call = call_of(packet)
    leaves = tree_flatten(call[1])[0]
    others = [torch.full_like(x, math.nan) if place == 1 else x for place, x in enumerate(leaves)]
    assert torch.equal(_results(call, leaves), _results(call, others))


@rows(table.PLACES)
def test_places_lie_in_their_range(packet):
    func, args, kwargs = call_of(packet)
    count = table.PLACES[packet]((SimpleNamespace(meta={"val": args[0]}), *args[1:]))
    places = func(*args, **kwargs)[1]
    assert places.min() >= 0 and places.max() < count


@pytest.mark.parametrize("packet", sorted(table.SMOOTH, key=str), ids=str)
def test_smooth_functions_have_a_bounded_curvature(packet):
    """Rounding by a deviation d biases these by at most d^2 / 2 times the largest curvature, 2."""
    x, step = torch.linspace(-40, 40, 20001, dtype=torch.float64), 0.01
    sign = x.sign() if packet in (aten.var, aten.var_mean) else 1  # functions of all elements
    low, value, high = (tree_flatten(packet(each))[0][0] for each in (x - step * sign, x, x + step * sign))
    assert float((low + high - 2 * value).abs().max()) <= 2 * step**2 * len(x) / (len(x) - 1)
