"""What a compiled graph makes of weights alone is a weight outside of it, as in eager code, and is not packed there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brevact
from brevact.autograd import current_region, region
from tests.autograd.measuring import settings, watch_saved
from tests.crosses import taking_turns

INDUCTOR = pytest.param("inductor", marks=pytest.mark.exhaustive)  # whose compiler takes a second a graph
BACKENDS = ["aot_eager", INDUCTOR]
POLICY = settings(bit_width=4)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    assert torch._C._len_torch_function_stack() == 0


class Net(nn.Module):
    def __init__(self, make: Callable[[Net, Tensor, Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.other, self.table = nn.Linear(64, 64), nn.Linear(64, 64), nn.Embedding(64, 64)
        self.frequencies = nn.Buffer(torch.rand(64, 64))
        self.places = nn.Buffer(torch.arange(64))
        self.mask = nn.Buffer(torch.rand(64, 64) > 0.5)
        self.layer.weight.last_input = torch.rand(64, 64)
        self.make = make

    def forward(self, x: Tensor, at: Tensor) -> object:
        return self.make(self, x, at)


def without_gradients(make: Callable[..., object]) -> Callable[..., object]:
    def function(net: Net, x: Tensor, at: Tensor) -> object:
        y = net.layer(x)
        with torch.no_grad():
            return y, make(net, y, at)

    return function


#: Each with whether its results are weights.
CASES: dict[str, tuple[Callable[[Net, Tensor, Tensor], object], tuple[bool, ...]]] = {
    "without gradients": (without_gradients(lambda net, y, at: net.layer.weight.exp().roll(1, 0)), (False, True)),
    "of an activation, without gradients": (without_gradients(lambda net, y, at: y.exp()), (False, False)),
    "with gradients": (lambda net, x, at: (net.layer(x), net.layer.weight.exp()), (False, True)),
    "a product": (lambda net, x, at: (net.layer.weight @ net.other.weight, x @ net.other.weight), (True, False)),
    "and a number": (lambda net, x, at: net.layer.weight * 2 + 1, (True,)),
    "and a mask": (lambda net, x, at: torch.where(net.mask, net.layer.weight, 0.0), (True,)),
    "and an activation": (lambda net, x, at: net.layer.weight + x, (False,)),
    "and a constant": (lambda net, x, at: net.layer.weight * torch.ones(64, 64), (False,)),
    "a constant": (lambda net, x, at: (torch.zeros(64, 64) + 1, torch.eye(64) * 2), (False, True)),
    "a buffer and positions": (lambda net, x, at: net.frequencies * at[:, None].float(), (False,)),
    "rows at places of a buffer": (lambda net, x, at: net.table.weight[net.places] * 1, (True,)),
    "parts": (lambda net, x, at: (net.layer.weight.exp().chunk(2)[1] * 1, net.layer.weight.exp().t()), (True, True)),
    "and its view": (lambda net, x, at: (both := net.layer.weight.exp() * 2, both.t(), x), (True, True, False)),
    "of the size of an activation": (lambda net, x, at: net.frequencies[0].exp().expand(x.size()) * 1, (True,)),
    "itself": (lambda net, x, at: (net.other.weight.detach(), net.frequencies, x), (True, True, False)),
    "an attribute of it": (lambda net, x, at: net.layer.weight.last_input * 1, (False,)),
    "a checkpoint": (
        lambda net, x, at: checkpoint(lambda at: net.layer(net.table(at)), at, use_reentrant=False),
        (False,),
    ),
    "a layer of weights alone": (lambda net, x, at: net.layer(net.other.weight), (False,)),
}


def weights_among(function: Callable[..., object], *inputs: Tensor) -> tuple[bool, ...]:
    with region(POLICY):
        results = function(*inputs)
        return tuple(map(current_region().is_weight, results if isinstance(results, tuple) else (results,)))


@pytest.mark.parametrize(
    ("case", "compiler", "requires_grad"),
    taking_turns(list(CASES), [("aot_eager", False), ("aot_eager", True)], [False, True]),
)
def test_weights_are_those_of_eager_code(case, compiler, requires_grad):
    make, expected = CASES[case]
    net, at = Net(make), torch.arange(64)
    x = torch.randn(64, 64, requires_grad=requires_grad)
    assert weights_among(net, x, at) == expected
    backend, dynamic = compiler
    assert weights_among(torch.compile(net, backend=backend, dynamic=dynamic), x, at) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_eager_code_where_no_mode_sees_an_op(case):
    make, expected = CASES[case]
    run = torch.compile(Net(make), backend="inductor")
    assert weights_among(run, torch.randn(64, 64), torch.arange(64)) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_makes_activations_and_weights(backend):
    """It was compiled for an activation, and is called with a weight, of the same class, later."""
    scale = torch.compile(lambda x: x.roll(1, 0) * 2, backend=backend)
    layer = nn.Linear(64, 64)
    for _ in range(2):
        with region(POLICY), torch._dynamo.config.patch(error_on_recompile=bool(_)):
            assert not current_region().is_weight(scale(torch.randn(64, 64)))
            assert not current_region().is_weight(scale(layer(torch.randn(64, 64)).detach()))
            with torch.no_grad():
                weight = layer.weight * 1
            assert current_region().is_weight(scale(weight))


def test_graphs_for_some_sizes_are_compiled_twice():
    """Dynamo hands a graph to the compiler again for a size that was asked for."""
    net, x = Net(lambda net, x, at: net.layer(x)), torch.randn(8, 64)
    torch._dynamo.mark_dynamic(x, 0, specialize_on=[lambda size: size == 8])
    with region(POLICY):
        found = torch.compile(net, backend="aot_eager")(x, torch.arange(64))
    assert torch.equal(found, net.layer(x))


class Scaled(nn.Module):
    """It makes a weight without gradients, in a graph or between graphs, and multiplies by that between graphs."""

    def __init__(self, in_graph: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.in_graph = nn.Linear(64, 64), in_graph

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.layer(x), self.scale() if self.in_graph else None)

    def scale(self) -> Tensor:
        with torch.no_grad():
            return self.layer.weight.roll(1, 0) * 2

    @torch.compiler.disable
    def product(self, y: Tensor, scale: Tensor | None) -> Tensor:
        return y * (self.scale() if scale is None else scale)


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_of_a_model_that_makes_weights(backend, in_graph):
    model, plain = brevact.quantize_backward(Scaled(in_graph), POLICY), Scaled(in_graph)
    x, grad = torch.randn(2, 64, 64)
    with watch_saved() as saved:
        out = torch.compile(model, backend=backend)(x)
    out.backward(grad)
    torch.compile(plain, backend=backend)(x).backward(grad)
    assert torch.equal(model.layer.bias.grad, plain.layer.bias.grad)
    assert len([t for t in saved.tensors if t.dtype is torch.uint8]) == 1  # codes of the input


@pytest.mark.parametrize("backend", BACKENDS)
def test_activations_beside_weights_are_packed(backend):
    """The graph's node has parameters alone behind it, and one of its results is an activation."""

    def both(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x), layer.weight.roll(1, 0) * 2

    layer, run = nn.Linear(64, 64), torch.compile(both, backend=backend)
    with watch_saved() as saved, region(POLICY):
        y, scale = run(layer, torch.randn(64, 64))
        y * scale
    assert saved.holds(scale)
    assert not saved.holds(y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_code_of_an_op_in_a_graph_may_enter_a_region(backend):
    """As in a graph that no region is around: there its norm goes on with rounded values."""
    policy = brevact.L4Backward.let(quantize_forward=True, min_numel=0)

    def rounded_norm(x: Tensor) -> Tensor:
        with brevact.backward_quant(policy):
            return torch.layer_norm(x, (64,))

    library = torch.library.Library("brevact_test_graphs", "FRAGMENT")
    library.define("norm(Tensor x) -> Tensor")
    library.impl("norm", rounded_norm, "CPU")
    torch.library.register_fake("brevact_test_graphs::norm", torch.empty_like, lib=library)
    layer, x = nn.Linear(64, 64).requires_grad_(False), torch.randn(64, 64)

    def function(x: Tensor) -> Tensor:
        return torch.ops.brevact_test_graphs.norm(layer(x))

    run = torch.compile(function, backend=backend)
    with region(POLICY):
        found = run(x)
    assert torch.equal(found, function(x))
    assert not torch.equal(found, torch.layer_norm(layer(x), (64,)))
