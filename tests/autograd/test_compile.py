"""Regions under `torch.compile`: whole graphs, packed saved tensors, and the gradients of eager regions."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import brevact
from brevact import nn as bnn
from brevact.autograd import BackwardSettings, SaveMode, attach_region, region
from brevact.quantizers import (
    Layout,
    NormalizedQuantizer,
    PackedActivation,
    PackedSpec,
    Part,
    Rounding,
    UniformQuantizer,
)
from tests.autograd.measuring import settings, watch_saved
from tests.crosses import taking_turns

NEAREST = settings(bit_width=4, rounding=Rounding.NEAREST)
#: Half a step of 24 bits is less than the error of float32.
FINE = settings(bit_width=24, rounding=Rounding.NEAREST)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    assert torch._C._len_torch_function_stack() == 0


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.act = nn.SiLU(inplace=True)
        self.gate = nn.Conv2d(channels, channels, 1)
        self.last = nn.Conv2d(channels, channels, 3, padding=1)
        self.out = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.first(x)))
        y = y * F.hardsigmoid(self.gate(F.adaptive_avg_pool2d(y, 1)))
        y = self.last(y)
        y += x
        return self.out(y)


def network(blocks: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    later = (Block(8) for _ in range(blocks - 1))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(8), nn.MaxPool2d(2), *later, *head)


def deeper() -> nn.Sequential:
    return network(2)


def small(*norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    return nn.Sequential(nn.Conv2d(3, 8, 3), *norm, nn.SiLU(), *head)


def normed() -> nn.Sequential:
    return small(nn.BatchNorm2d(8))


def quantized(source: object = NEAREST, make: Callable[[], nn.Module] = network) -> nn.Module:
    return brevact.quantize_backward(make(), source)


def compiled(function: Callable, backend: object = "aot_eager", **options: object) -> Callable:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


IMAGES, LABELS = torch.randn(6, 3, 20, 20), torch.arange(6)


def step(model: Callable, images: Tensor = IMAGES) -> int:
    with watch_saved() as saved:
        loss = F.cross_entropy(model(images).float(), LABELS[: len(images)])
    loss.backward()
    return saved.nbytes


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def assert_close(
    found: Sequence[Tensor], expected: Sequence[Tensor], name: str = "", eps: float = torch.finfo(torch.float32).eps
) -> None:
    # Sums of some thousand products in another order, relative to the largest gradient.
    top = max(grad.abs().max() for grad in expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=64 * eps * top.item(), msg=lambda text: f"{name} {text}")


def test_noise_is_new_in_each_step_and_fixed_by_the_seed():
    model = quantized(settings(bit_width=2), normed)
    run = compiled(model)

    def draw(seed: int | None = None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        model.zero_grad()
        step(run)
        return model[0].weight.grad.clone()

    first, second, again = draw(1), draw(), draw(1)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_compiled_gradients_are_unbiased():
    draws = 200
    x, layer = torch.randn(64, 32), nn.Linear(32, 8)
    attach_region(layer, settings(bit_width=2))
    run = compiled(layer)
    weights = torch.randn(64, 8)
    samples = []
    for _ in range(draws):
        samples.append(torch.autograd.grad((run(x) * weights).sum(), layer.weight)[0])
    values = torch.stack(samples).double()
    expected = weights.double().t() @ x.double()
    # 5 standard errors of 256 entries, each a sum of 64 independent errors.
    assert ((values.mean(0) - expected).abs() <= 5 * values.std(0) / draws**0.5 + 1e-5).all()


def test_training_does_not_recompile():
    model = quantized(settings(bit_width=2), normed)
    run = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch._dynamo.config.patch(error_on_recompile=True):
        sizes = set()
        for _ in range(4):
            optimizer.zero_grad()
            sizes.add(step(run))
            optimizer.step()
    assert len(sizes) == 1


def test_dynamic_batches_match_the_model():
    model, reference = quantized(FINE, normed), normed()
    run = compiled(model, dynamic=True)
    for batch in (6, 3, 5):
        model.zero_grad(), reference.zero_grad()
        assert step(run, IMAGES[:batch]) < step(reference, IMAGES[:batch])
        assert_close(gradients(model), gradients(reference))


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
        (False, False, "aot_eager"),
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


class InBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = norms()

    def forward(self, x: Tensor) -> Tensor:
        with region(ROUNDED):
            return self.layers(x)


ROUNDED = BackwardSettings(NormalizedQuantizer(quantize_forward=True))


@pytest.mark.parametrize("make, strict", taking_turns([lambda: quantized(ROUNDED, norms), InBlock], [False, True]))
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_exported_programs_refuse_rounded_norms(make, strict):
    with pytest.raises(Exception, match="quantize_forward: a program"):
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


def test_layers_with_slots_compile():
    def make(quant: object) -> nn.Module:
        return nn.Sequential(
            bnn.QuantConv2d(3, 8, 3, act_quant=quant),
            bnn.BatchNorm2d(8, act_quant=quant),
            bnn.Hardswish(act_quant=quant),
            bnn.MaxPool2d(2, act_quant=quant),
            bnn.QuantConv2d(8, 8, 3, weight_quant=None, act_quant=quant),
            bnn.AdaptiveAvgPool2d(1, act_quant=quant),
            nn.Flatten(),
            bnn.QuantLinear(8, 10, True, act_quant=quant),
        )

    assert step(compiled(make(brevact.StochBackward2bit))) < step(compiled(make(None)))


def test_rules_hold_inside_graphs():
    rules = {"1": None, nn.MaxPool2d: None, "*": NEAREST}
    packed = step(compiled(quantized(rules, deeper)))
    assert step(compiled(quantized(make=deeper))) < packed < step(compiled(deeper()))


def with_region_outside(model: nn.Module) -> Callable:
    run = compiled(model)

    def forward(x: Tensor) -> Tensor:
        with brevact.backward_quant(FINE):
            return run(x)

    return forward


def with_region_inside(model: nn.Module) -> Callable:
    def forward(x: Tensor) -> Tensor:
        with brevact.backward_quant(FINE):
            return model(x)

    return compiled(forward)


def policy_on_the_compiled_model(model: nn.Module) -> Callable:
    return brevact.quantize_backward(torch.compile(model, backend="aot_eager", fullgraph=True), FINE)


def one_block_compiled(model: nn.Module) -> Callable:
    brevact.quantize_backward(model, FINE)
    model[1].compile(backend="aot_eager", fullgraph=True)
    return model


def module_compiled(model: nn.Module) -> Callable:
    brevact.quantize_backward(model, FINE).compile(backend="aot_eager", fullgraph=True)
    return model


WAYS = [with_region_outside, with_region_inside, policy_on_the_compiled_model, one_block_compiled, module_compiled]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_regions_meet_the_compiler_in_every_way(way):
    make = network if way is one_block_compiled else normed  # whose blocks are layers
    model, reference = make(), make()
    assert step(way(model)) < step(reference)
    assert_close(gradients(model), gradients(reference))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        x = self.layers[1](F.silu(x))
        torch._dynamo.graph_break()
        return self.layers[2:](x)


def test_graph_breaks_keep_the_region():
    model, reference = quantized(FINE, Broken), Broken()
    assert step(torch.compile(model, backend="aot_eager")) < step(reference)
    assert_close(gradients(model), gradients(reference))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = torch.utils.checkpoint.checkpoint(self.layers[1], x, use_reentrant=False)
        return self.layers[2:](x)


def test_checkpoint_inside_a_compiled_region():
    exact = UniformQuantizer(bit_width=32)
    model, reference = quantized(exact, Checkpointed), network()
    step(compiled(model)), step(reference)
    assert_close(gradients(model), gradients(reference))


def test_autocast_keeps_weights_and_gradients():
    model, reference = quantized(settings(bit_width=12, rounding=Rounding.NEAREST), normed), normed()

    def run(function: Callable) -> Callable:
        return lambda x: torch.autocast("cpu", torch.bfloat16)(function)(x)

    assert step(run(compiled(model))) < step(run(reference))
    assert_close(gradients(model), gradients(reference), eps=torch.finfo(torch.bfloat16).eps)


def test_eval_and_no_grad_pack_nothing():
    model = quantized(make=normed).eval()
    run = compiled(model)
    with watch_saved() as saved:
        run(IMAGES)
    assert not [x for x in saved.tensors if x.dtype is torch.uint8]
    model.train()
    with torch.no_grad():
        run(IMAGES)
    assert step(run) < step(normed())


def test_weights_are_never_packed_in_a_graph():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(64, 64))
            self.mask = nn.Buffer(torch.rand(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.scale) * (self.scale * 2) * F.linear(x, self.scale * self.mask)

    model = brevact.quantize_backward(Frozen(), settings(bit_width=1))
    reference = copy.deepcopy(model)
    brevact.restore_backward(reference)
    x = torch.randn(64, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(compiled(model)(x).sum(), x)
    (expected,) = torch.autograd.grad(reference(x).sum(), x)
    assert_close([grad], [expected])


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

    def decode(self, buffer: Tensor, spec: PackedSpec, target: Tensor) -> None:
        target.as_strided((spec.layout.numel,), (1,)).copy_((buffer.float() - 128) / 16)

    def decode_multiply(self, buffer: Tensor, spec: PackedSpec, other: Tensor, target: Tensor) -> None:
        flat = (spec.layout.numel,), (1,)
        target.as_strided(*flat).copy_((buffer.float() - 128) / 16 * other.as_strided(*flat))


def test_other_peoples_quantizers_compile_if_they_have_a_text_form():
    assert step(compiled(quantized(FixedPoint()))) < step(network()) / 2


def test_quantizers_without_text_form_raise_when_compiled():
    class Local(UniformQuantizer):
        pass

    with pytest.raises(Exception, match="has no text form"):
        step(compiled(quantized(Local())))


def test_a_region_around_a_compiled_model_does_not_recompile():
    run = compiled(normed())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            with brevact.backward_quant(brevact.StochBackward2bit):
                loss = F.cross_entropy(run(IMAGES), LABELS)
            loss.backward()


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
    expected = gradients(model)
    loss = F.cross_entropy(model(IMAGES), LABELS)
    model.zero_grad()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    assert_close(gradients(model), expected)


def test_exported_programs_hold_no_quantizer():
    model, images = quantized(settings(bit_width=2)), (IMAGES,)
    for strict in (False, True):
        program = torch.export.export(model, images, strict=strict)
        assert not [node for node in program.graph.nodes if "brevact" in str(node.target)]


def test_fake_tensors_run_as_they_did():
    with FakeTensorMode():
        model = brevact.quantize_backward(nn.Sequential(nn.Linear(64, 64), nn.SiLU()), settings(bit_width=2))
        x = torch.randn(64, 64, requires_grad=True)
        (model(x) * torch.sigmoid(x)).sum().backward()
        assert x.grad.shape == x.shape


def test_another_threads_compiler_does_not_stop_packing():
    model, sizes, stop = quantized(), set(), threading.Event()

    def train() -> None:
        while not stop.is_set():
            sizes.add(step(model))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        step(compiled(network()))
    finally:
        stop.set()
        thread.join()
    assert len(sizes) == 1


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
