"""Beside compiled graphs: norms that go on with rounded values, others' quantizers, and code around graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact.autograd import BackwardSettings, SaveMode, region
from brevact.quantizers import Layout, NormalizedQuantizer, PackedActivation, PackedSpec, Part, Rounding
from tests.autograd.measuring import settings, watch_saved
from tests.crosses import taking_turns

NEAREST = settings(bit_width=4, rounding=Rounding.NEAREST)
IMAGES, LABELS = torch.randn(6, 3, 20, 20), torch.arange(6)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    assert torch._C._len_torch_function_stack() == 0


def network() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3), *head)


def quantized(source: object = NEAREST, make: Callable[[], nn.Module] = network) -> nn.Module:
    return brevact.quantize_backward(make(), source)


def compiled(function: Callable, backend: object = "aot_eager", **options: object) -> Callable:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def step(model: Callable, images: Tensor = IMAGES) -> int:
    with watch_saved() as saved:
        loss = F.cross_entropy(model(images).float(), LABELS[: len(images)])
    loss.backward()
    return saved.nbytes


ROUNDED = BackwardSettings(NormalizedQuantizer(quantize_forward=True))


@pytest.mark.parametrize("act", [F.silu, lambda x: F.silu(x, inplace=True)])
def test_dynamic_sizes_of_what_is_quantized_on_backward(act):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x):
            return self.last(act(self.first(x)))

    net = brevact.quantize_backward(Net(), brevact.StochBackward4bit.let(save_mode=SaveMode.QUANTIZE_ON_BACKWARD))
    run = compiled(net, dynamic=True)
    for sizes in ((2, 3, 28, 32), (3, 3, 40, 29)):
        x = torch.randn(sizes)
        assert torch.allclose(run(x), net(x), atol=1e-5)
        run(x).square().mean().backward()
    assert all(x.grad.isfinite().all() and x.grad.any() for x in net.parameters())


def norms() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8)),
        *(nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.LayerNorm((18, 18))),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    )


@pytest.mark.parametrize(
    "rounds, dynamic, backend",
    [
        pytest.param(False, False, "aot_eager", marks=pytest.mark.exhaustive),
        (True, False, "aot_eager"),
        pytest.param(True, True, "aot_eager", marks=pytest.mark.exhaustive),
        pytest.param(True, False, "inductor", marks=pytest.mark.exhaustive),
    ],
)
def test_norms_of_normalized_formats_compile(rounds, dynamic, backend):
    chosen = BackwardSettings(NormalizedQuantizer(format="U8", quantize_forward=rounds), min_numel=0)
    model, reference = quantized(chosen, norms), quantized(chosen, norms)
    run = torch.compile(model, backend=backend, fullgraph=not rounds, dynamic=dynamic)  # rounded norms run outside
    step(run), step(reference)  # changes running statistics
    # Inductor fuses the normalization, whose last bit moves one value in some ten thousand to the level beside it.
    eps = torch.finfo(torch.float32).eps if backend == "aot_eager" else 1e-4
    plain = brevact.restore_backward(copy.deepcopy(reference))
    for training in (True, False):
        for net in (model, reference, plain):
            net.train(training)
        with torch.no_grad(), watch_saved() as saved:
            found, expected, exact = run(IMAGES), reference(IMAGES), plain(IMAGES)
        torch.testing.assert_close(found, expected, rtol=0, atol=64 * eps)
        assert torch.allclose(expected, exact, rtol=0, atol=1e-5) != rounds
        assert not saved.tensors


@pytest.mark.parametrize("norm_rounds", [False, True])
def test_norms_that_go_on_with_rounded_values_beside_others(norm_rounds):
    usual, rounded = settings(8, Rounding.NEAREST), BackwardSettings(ROUNDED.quantizer, min_numel=0)
    rules = {nn.LayerNorm: rounded, "*": usual} if norm_rounds else {nn.LayerNorm: usual, "*": rounded}
    model, reference = (brevact.quantize_backward(norms(), rules) for _ in range(2))
    found = torch.compile(lambda x: model(x) + 0, backend="aot_eager")(IMAGES)
    torch.testing.assert_close(found, reference(IMAGES), rtol=0, atol=1e-5)


class InBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = norms()

    def forward(self, x: Tensor) -> Tensor:
        with region(ROUNDED):
            return self.layers(x)


@pytest.mark.parametrize("make, strict", taking_turns([lambda: quantized(ROUNDED, norms), InBlock], [False, True]))
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_exported_programs_refuse_rounded_norms(make, strict):
    with pytest.raises(Exception, match="quantize_forward: norms go on"):
        torch.export.export(make().eval(), (IMAGES,), strict=strict)


def test_a_compiled_checkpoint_of_rounded_norms_is_refused():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = norms()

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)

    with pytest.raises(Exception, match="quantize_forward"):
        step(compiled(quantized(ROUNDED, Model)))


@dataclass(frozen=True)
class FixedPoint:
    """A quantizer of somebody else: eight bits with four behind the point."""

    is_stochastic: bool = False

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        return (Part("codes", torch.uint8, layout.numel),)

    def quantize(self, x: Tensor, seed: object = None) -> PackedActivation:
        layout = Layout.of(x)
        codes = (layout.flatten(x.detach()) * 16 + 128).round().clamp(0, 255)
        return PackedActivation(PackedSpec.of(self, layout), codes.to(torch.uint8))

    def decode(self, buffer: Tensor, spec: PackedSpec, target: Tensor, other: Tensor | None = None) -> None:
        flat, values = ((spec.layout.numel,), (1,)), (buffer.float() - 128) / 16
        target.as_strided(*flat).copy_(values if other is None else values * other.as_strided(*flat))


def test_other_peoples_quantizers_compile_if_they_have_a_text_form():
    assert step(compiled(quantized(FixedPoint()))) < step(network()) / 2


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sinc(x)


@pytest.mark.exhaustive
def test_compiled_autograd_reads_what_a_region_stored():
    """Stored by a Function, by hooks of torch's own layers, and by hooks of an op that has neither."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), Sine(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = quantized(make=lambda: nn.Sequential(*layers))
    step(model)
    expected = [p.grad.clone() for p in model.parameters()]
    loss = F.cross_entropy(model(IMAGES), LABELS)
    model.zero_grad()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=0, atol=1e-5)


def test_graphs_for_some_sizes_are_compiled_twice():
    """Dynamo hands a graph to the compiler again for a size that was asked for."""
    layer, x = nn.Linear(64, 64), torch.randn(8, 64)
    torch._dynamo.mark_dynamic(x, 0, specialize_on=[lambda size: size == 8])
    with region(NEAREST):
        found = torch.compile(lambda x: layer(x), backend="aot_eager")(x)
    assert torch.equal(found, layer(x))


def test_results_of_a_graph_are_activations_around_it():
    """The graph's node has parameters alone behind it."""
    layer = nn.Linear(64, 64)
    with watch_saved() as saved, region(NEAREST):
        y = compiled(layer)(torch.randn(64, 64))
        y * layer.weight
    assert saved.holds(layer.weight) and not saved.holds(y)


def test_code_of_an_op_in_a_graph_may_enter_a_region():
    """Its norm goes on with rounded values there, as in a graph without a region around it."""
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

    run = torch.compile(function, backend="aot_eager")
    with region(NEAREST):
        found = run(x)
    assert torch.equal(found, function(x))
    assert not torch.equal(found, torch.layer_norm(layer(x), (64,)))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("source", [brevact.LosslessBackward, brevact.StochBackward8bit.let(bit_width=24)])
def test_backward_reads_buffers_as_they_were_before_a_graph_overwrote_them(source: object, view: bool):
    """Backward looks up a codebook again that moves in each forward, as in vector quantization."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(16, 64)
            self.register_buffer("codes", torch.randn(64, 32) if view else torch.randn(32, 64))

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            found = self.layer(x) * (self.codes.t() if view else self.codes)[index]
            with torch.no_grad():
                self.codes.mul_(0.5)
            return found

    x, index = torch.randn(512, 16), torch.randint(0, 32, (512,))
    gradients = []
    for model in (Codebook(), brevact.compile(Codebook(), source, backend="aot_eager", fullgraph=True)):
        model(x, index).square().sum().backward()
        gradients.append(model.layer.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
