"""Regions under `torch.compile`: nothing breaks the graph, what it keeps is packed, gradients are those without it."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import brevact
from brevact import nn as bnn
from brevact.autograd import BackwardSettings, SaveMode, attach_region, region
from brevact.quantizers import (
    Layout,
    MixedQuantizer,
    NormalizedQuantizer,
    PackedActivation,
    PackedSpec,
    Part,
    Rounding,
    UniformQuantizer,
)
from tests.autograd import ops
from tests.autograd.measuring import kept_bytes, settings, watch_saved
from tests.crosses import taking_turns

NEAREST = settings(bit_width=4, rounding=Rounding.NEAREST)
#: Functions without a counterpart are the compiler's; stock BatchNorm2d(momentum=None) does not compile either.
#: Nor does the grouped product, which torch 2.13 traces of bfloat16 alone. Graphs keep targets without a gradient as
#: they are, and eager regions pack them.
OTHERWISE = (
    *("batch_norm2d", "conv2d reflect", "grouped_mm"),
    *("cross_entropy to distributions", "bce_with_logits weighted", "kl_div", "kl_div log_target"),
    *("dice loss", "tversky loss"),
)
COUNTERPARTS = [op for op in ops.ALL if op not in ops.FALLBACK and op.name not in OTHERWISE]


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


#: They derive from their packed input in graphs, whereas eager regions pack their output: gradients differ by noise.
DERIVED_IN_GRAPHS = {"sigmoid", "sigmoid method", "tanh", "squeeze-excitation", "squeeze-excitation_"}


@pytest.mark.parametrize("some", [COUNTERPARTS[1::8], pytest.param(COUNTERPARTS, marks=pytest.mark.exhaustive)])
def test_ops_compiled_give_the_gradients_and_bytes_of_eager(some):
    chosen = some
    functions = [op.make() for op in chosen]
    leaves = [torch.randn(op.shape, requires_grad=True) for op in chosen]

    def run(functions: list[Callable], wrap: Callable) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
        def inside(*inputs: Tensor) -> list[Tensor]:
            with region(NEAREST):
                return [function(x) for function, x in zip(functions, inputs, strict=True)]

        torch.manual_seed(0)
        with watch_saved() as saved:
            outs = wrap(inside)(*(leaf.clone() for leaf in leaves))  # in-place functions overwrite inputs of the graph
        results = []
        for function, leaf, out in zip(functions, leaves, outs, strict=True):
            parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
            weights = torch.linspace(-1, 1, out.numel()).sin().view(out.shape)
            grads = torch.autograd.grad((out * weights).sum(), [leaf, *parameters], retain_graph=True)
            results.append((out.detach(), grads))
        return results, saved

    expected, eager = run(copy.deepcopy(functions), lambda f: f)
    found, graph = run(functions, compiled)
    for op, (out, grads), (expected_out, expected_grads) in zip(chosen, found, expected, strict=True):
        torch.testing.assert_close(out, expected_out, msg=lambda text, op=op: f"{op.name}: {text}")
        if op.name not in DERIVED_IN_GRAPHS:
            assert_close(grads, expected_grads, op.name)
    rounded = sum(x.nbytes for x in eager.tensors if x.dtype is torch.bfloat16)  # small ones, which graphs do not round
    wide = [sum(x.nbytes for x in saved.tensors if x.dtype is torch.int64) for saved in (graph, eager)]
    narrowed = (wide[0] - wide[1]) * 7 // 8  # integers that eager regions keep in one byte
    assert graph.nbytes <= eager.nbytes + rounded + narrowed


def test_model_compiled_matches_eager():
    model, reference = quantized(make=deeper), quantized(make=deeper)
    eager, packed = step(reference), step(compiled(model))
    plain = step(compiled(deeper()))
    assert_close(gradients(model), gradients(reference))
    assert packed <= eager < plain / 4
    for key, value in reference.state_dict().items():  # running statistics as well
        torch.testing.assert_close(model.state_dict()[key], value)


def test_graph_keeps_codes_and_no_feature_map():
    kept: list[Tensor] = []

    def forward_compiler(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        kept.extend(node.meta["val"] for node in graph.graph.output_node().args[0] if isinstance(node, torch.fx.Node))
        return make_boxed_func(graph.forward)

    for partition in ({}, {"partition_fn": min_cut_rematerialization_partition}):
        torch._dynamo.reset()
        kept.clear()
        backend = aot_autograd(
            fw_compiler=forward_compiler, bw_compiler=lambda graph, _: make_boxed_func(graph.forward), **partition
        )
        step(compiled(quantized(make=deeper), backend))
        assert not [x.shape for x in kept if x.is_floating_point() and x.dim() == 4 and x.shape[2] > 3]
        # What the first and the last layer and pooling keep; in each of two blocks what a convolution, a norm and the
        # gate read, and a mask. What activations and the last convolution read derives.
        assert sum(x.dtype is torch.uint8 for x in kept) >= 11


@pytest.mark.exhaustive
def test_inductor_keeps_the_same_bytes_and_close_gradients():
    chosen = settings(24, Rounding.NEAREST)
    model, reference = quantized(chosen, deeper), deeper()
    packed = step(compiled(model, "inductor"))
    step(reference)
    assert packed <= step(quantized(chosen, deeper))
    assert_close(gradients(model), gradients(reference))  # half a step of 24 bits is less than float32's own


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


def test_dynamic_batches_match_eager():
    model, reference = quantized(make=normed), quantized(make=normed)
    run = compiled(model, dynamic=True)
    for batch in (6, 3, 5):
        model.zero_grad(), reference.zero_grad()
        packed, eager = step(run, IMAGES[:batch]), step(reference, IMAGES[:batch])
        assert_close(gradients(model), gradients(reference))
        assert packed <= eager


GROUPS_AND_WIDTHS = {
    "channel": UniformQuantizer(bit_width=3, rounding="nearest", granularity="channel"),
    "sample": UniformQuantizer(bit_width=4, rounding="nearest", granularity="sample"),
    "tensor": UniformQuantizer(bit_width=4, rounding="nearest", bucket_size=None),
    "32 bits": UniformQuantizer(bit_width=32),
    "12 bits": UniformQuantizer(bit_width=12, rounding="nearest", bucket_size=100, scale_dtype=torch.float32),
}


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


@pytest.mark.parametrize("name, dynamic", taking_turns(list(GROUPS_AND_WIDTHS), [True, False]))
def test_groups_and_widths_compile(name, dynamic):
    quantizer = GROUPS_AND_WIDTHS[name]
    model, reference = quantized(quantizer, small), quantized(quantizer, small)
    packed, eager = step(compiled(model, dynamic=dynamic)), step(reference)
    assert_close(gradients(model), gradients(reference))
    assert packed <= eager


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
    run = compiled(model, backend, dynamic=dynamic)
    packed, eager = step(run), step(reference)
    # Inductor fuses the normalization, whose last bit moves one value in some ten thousand to the level beside it.
    eps = torch.finfo(torch.float32).eps if backend == "aot_eager" else 1e-4
    assert_close(gradients(model), gradients(reference), eps=eps)
    assert packed <= eager
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
def test_exported_programs_round_what_the_model_rounds(make, strict):
    model = make().eval()
    program = torch.export.export(model, (IMAGES,), strict=strict).module()
    torch.testing.assert_close(program(IMAGES), model(IMAGES))


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
    quant = brevact.StochBackward2bit
    model = nn.Sequential(
        bnn.QuantConv2d(3, 8, 3, act_quant=quant),
        bnn.BatchNorm2d(8, act_quant=quant),
        bnn.Hardswish(act_quant=quant),
        bnn.MaxPool2d(2, act_quant=quant),
        bnn.QuantConv2d(8, 8, 3, weight_quant=None, act_quant=quant),
        bnn.AdaptiveAvgPool2d(1, act_quant=quant),
        nn.Flatten(),
        bnn.QuantLinear(8, 10, True, act_quant=quant),
    )
    eager, packed = step(model), step(compiled(model))
    assert packed <= eager


def test_rules_hold_inside_graphs():
    rules = {"1": None, nn.MaxPool2d: None, "*": NEAREST}
    model, reference = quantized(rules, deeper), quantized(rules, deeper)
    packed, eager = step(compiled(model)), step(reference)
    assert_close(gradients(model), gradients(reference))
    assert step(quantized(make=deeper)) < packed < step(deeper())
    assert packed <= eager


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(20, 16), nn.Linear(16, 10)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1, 2)).relu()
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.last(F.silu(x)).mean(1)


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (network, {F.conv2d: None, F.silu: settings(bit_width=2, rounding=Rounding.NEAREST), "*": NEAREST}),
        (Attending, {F.silu: None, F.scaled_dot_product_attention: NEAREST}),
        (Attending, {F.linear: None, F.scaled_dot_product_attention: None, F.cross_entropy: NEAREST, "*": NEAREST}),
    ],
)
def test_rules_for_ops_hold_inside_graphs(make, rules):
    model, reference = quantized(rules, make), quantized(rules, make)
    run, sizes, kept = compiled(model), [], []
    for net, twin in ((run, model), (reference, reference)):
        weights = {p.data_ptr() for p in twin.parameters()}
        with watch_saved() as saved:
            loss = F.cross_entropy(net(IMAGES), LABELS)
        loss.backward()
        saved.tensors = [x for x in saved.tensors if x.data_ptr() not in weights]
        sizes.append(saved.nbytes)
        kept.append(sorted({x.data_ptr(): x.numel() for x in saved.tensors if x.dtype is torch.uint8}.values()))
    assert_close(gradients(model), gradients(reference))
    assert kept[0] == kept[1] != [] or make is network
    assert sizes[0] <= sizes[1]


def with_region_outside(model: nn.Module) -> Callable:
    run = compiled(model)

    def forward(x: Tensor) -> Tensor:
        with brevact.backward_quant(brevact.NearestBackward4bit, min_numel=0, bucket_size=64):
            return run(x)

    return forward


def with_region_inside(model: nn.Module) -> Callable:
    def forward(x: Tensor) -> Tensor:
        with brevact.backward_quant(brevact.NearestBackward4bit, min_numel=0, bucket_size=64):
            return model(x)

    return compiled(forward)


def policy_on_the_compiled_model(model: nn.Module) -> Callable:
    return brevact.quantize_backward(torch.compile(model, backend="aot_eager", fullgraph=True), NEAREST)


def one_block_compiled(model: nn.Module) -> Callable:
    brevact.quantize_backward(model, NEAREST)
    model[1].compile(backend="aot_eager", fullgraph=True)
    return model


def module_compiled(model: nn.Module) -> Callable:
    brevact.quantize_backward(model, NEAREST).compile(backend="aot_eager", fullgraph=True)
    return model


WAYS = [with_region_outside, with_region_inside, policy_on_the_compiled_model, one_block_compiled, module_compiled]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_regions_meet_the_compiler_in_every_way(way):
    make = network if way is one_block_compiled else normed  # whose blocks are layers
    model, reference = make(), quantized(make=make)
    packed, eager = step(way(model)), step(reference)
    assert_close(gradients(model), gradients(reference))
    assert packed <= eager


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
    model, reference = quantized(make=Broken), quantized(make=Broken)
    packed, eager = step(torch.compile(model, backend="aot_eager")), step(reference)
    assert_close(gradients(model), gradients(reference))
    assert packed <= eager


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = torch.utils.checkpoint.checkpoint(self.layers[1], x, use_reentrant=False)
        return self.layers[2:](x)


@pytest.mark.parametrize("around", [True, False])
def test_logits_of_a_loss_that_a_forward_makes_are_packed(around):
    """Dynamo has a way of its own for `nn.CrossEntropyLoss()` in traced code."""
    layer, images, labels = nn.Linear(64, 256), torch.randn(64, 64), torch.randint(256, (64,))
    make: Callable[[], nn.Module] = lambda: nn.CrossEntropyLoss(reduction="sum", ignore_index=3)  # noqa: E731

    def forward(x: Tensor) -> Tensor:
        if around:
            return make()(layer(x), labels)
        with brevact.backward_quant(NEAREST):
            return make()(layer(x), labels)

    def step(run: Callable[[Tensor], Tensor]) -> tuple[int, Tensor]:
        with watch_saved() as saved, brevact.backward_quant(NEAREST) if around else contextlib.nullcontext():
            loss = run(images)
        (grad,) = torch.autograd.grad(loss, layer.weight)
        return saved.nbytes, grad

    (packed, grad), (eager, expected) = step(compiled(forward)), step(forward)
    assert_close([grad], [expected])
    assert packed <= eager + 7 * labels.numel()  # a class is one byte in an eager region, and eight in a graph


def test_checkpoint_inside_a_compiled_region():
    exact = UniformQuantizer(bit_width=32)
    model, reference = quantized(exact, Checkpointed), network()
    step(compiled(model)), step(reference)
    assert_close(gradients(model), gradients(reference))


class CompiledInCheckpoint(nn.Module):
    """A compiled function in a checkpoint, which recomputes it where the region of the model is gone."""

    def __init__(self, name: str, compile: Callable = lambda function: function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).train(name != "in eval mode"))
        self.inside = compile(getattr(self, name, self.modules_and_ops))
        self.is_after = name == "after a module"

    def ops(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.layers[1].weight, self.layers[1].bias)) * x.sigmoid()

    def modules_and_ops(self, x: Tensor) -> Tensor:
        return F.gelu(self.layers[1](x)) * x.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        run = (lambda y: self.inside(self.layers[1](y))) if self.is_after else self.inside
        x = self.inside(torch.utils.checkpoint.checkpoint(run, self.layers[0](x), use_reentrant=False))
        return x.square().mean()


@pytest.mark.parametrize("source", [NEAREST, brevact.LosslessBackward])
@pytest.mark.parametrize("name", ["ops", "modules_and_ops", "after a module", "in eval mode"])
def test_compiled_functions_in_checkpoints_are_recomputed_as_they_ran(name, source):
    x, kept = torch.randn(256, 64), []
    make = functools.partial(CompiledInCheckpoint, name)
    models = [brevact.quantize_backward(make(compile), source) for compile in (compiled, lambda function: function)]
    for model in models:
        with watch_saved() as saved:
            loss = model(x)
        loss.backward()
        kept.append(saved.nbytes)
    assert_close(gradients(models[0]), gradients(models[1]))
    assert kept[0] <= kept[1]


def test_autocast_keeps_weights_and_gradients():
    model, reference = quantized(make=normed), quantized(make=normed)

    def run(function: Callable) -> Callable:
        return lambda x: torch.autocast("cpu", torch.bfloat16)(function)(x)

    packed, eager = step(run(compiled(model))), step(run(reference))
    assert_close(gradients(model), gradients(reference), eps=torch.finfo(torch.bfloat16).eps)
    assert packed <= eager


def test_quantize_on_backward_gives_the_gradients_of_save_quantized():
    late = settings(bit_width=4, rounding=Rounding.NEAREST, save_mode=SaveMode.QUANTIZE_ON_BACKWARD)
    model, reference = quantized(late, normed), quantized(make=normed)
    step(compiled(model)), step(reference)
    assert_close(gradients(model), gradients(reference))


def test_mixtures_compile_with_a_size_drawn_once():
    mix = MixedQuantizer(bit_width=2, mix_bit_width=8, bucket_size=64)
    run, eager = compiled(quantized(mix)), step(quantized(settings(bit_width=8, derive_min_bits=0)))
    sizes = {step(run) for _ in range(3)}
    assert len(sizes) == 1
    assert step(quantized(settings(bit_width=2))) < sizes.pop() < eager


def test_eval_and_no_grad_pack_nothing():
    model = quantized(make=normed).eval()
    run = compiled(model)
    with watch_saved() as saved:
        run(IMAGES)
    assert not [x for x in saved.tensors if x.dtype is torch.uint8]
    model.train()
    with torch.no_grad():
        run(IMAGES)
    assert step(run) <= step(quantized(make=normed))


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
    model, reference = quantized(FixedPoint()), quantized(FixedPoint())
    packed, eager = step(compiled(model)), step(reference)
    assert_close(gradients(model), gradients(reference))
    assert packed <= eager < step(network()) / 2


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
    """By a Function, by hooks of torch's own layers, and by hooks of an op that has neither."""
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


def written_out_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.797884560 * (x + 0.044715 * torch.pow(x, 3.0))))


def attending(x: Tensor) -> Tensor:
    scores = F.softmax(x / 8.0, dim=-1, dtype=torch.float32).to(x.dtype)
    return F.dropout(scores, 0.0, training=True) @ x


def overwritten(x: Tensor) -> Tensor:
    x = F.layer_norm(x, (64,))
    rows = x.view(-1, 64)
    x += 1.0
    x *= 0.5
    return rows.view(x.shape)


def overwritten_through_a_view(x: Tensor) -> Tensor:
    x = F.layer_norm(x, (64,))
    x.view(-1, 64)[:9].mul_(0.5)
    return x


#: Functions of (8, 64, 64) behind which a layer reads a tensor that derives from a packed one.
DERIVING: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU written out": written_out_gelu,
    "sum": lambda x: F.layer_norm(x, (64,)) + 1.0,
    "difference": lambda x: 2.0 - F.layer_norm(x, (64,)),
    "in place": lambda x: F.layer_norm(x, (64,)).add_(1.0),
    "scaled": lambda x: F.layer_norm(x, (64,)) / 3.0,
    "cat": lambda x: torch.cat([F.layer_norm(x, (64,)), F.layer_norm(x, (64,)).flip(1)]),
    "pad": lambda x: F.pad(F.layer_norm(x, (64,)), (0, 0, 1, 1)),
    "slice": lambda x: F.layer_norm(x, (64,))[:, 1:],
    "first token": lambda x: F.layer_norm(x, (64,))[:, 0],
    "transposed": lambda x: F.layer_norm(x, (64,)).transpose(0, 1),
    "expanded": lambda x: F.layer_norm(x, (64,))[:1].expand(4, -1, -1),
    "windows": lambda x: F.layer_norm(x, (64,)).view(8, 8, 8, 64).permute(0, 2, 1, 3).reshape(64, 8, 64),
    "unflattened": lambda x: F.layer_norm(x, (64,)).transpose(0, 1).unflatten(1, (2, 4)).squeeze(),
    "attention": attending,
}


class Deriving(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.function = nn.Linear(64, 64), nn.Linear(64, 64), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def bytes_and_gradients(
    function: Callable[[Tensor], Tensor], *, dynamic: bool = False, min_numel: int = 0
) -> list[tuple[int, list[Tensor]]]:
    x, found = torch.randn(8, 64, 64), []
    for wrap in (lambda model: model, lambda model: compiled(model, dynamic=dynamic)):
        model = quantized(settings(8, Rounding.NEAREST, min_numel=min_numel), lambda: Deriving(function))
        run = wrap(model)
        nbytes = kept_bytes(model, lambda run=run: run(x).square().sum().backward())
        found.append((nbytes, gradients(model)))
    return found


@pytest.mark.parametrize("name, dynamic", taking_turns(list(DERIVING), [False, True]))
def test_tensors_that_derive_from_packed_ones_take_no_byte_in_graphs(name, dynamic):
    (eager, expected), (graph, grads) = bytes_and_gradients(DERIVING[name], dynamic=dynamic)
    assert graph <= eager
    assert_close(grads, expected)


@pytest.mark.parametrize("function", [overwritten, overwritten_through_a_view, lambda x: x[torch.arange(4)]])
def test_what_is_overwritten_or_picked_is_packed_anew_in_graphs(function):
    (_, expected), (_, grads) = bytes_and_gradients(function)
    assert_close(grads, expected)


@pytest.mark.parametrize("function", [lambda x: x[:, 0], lambda x: F.layer_norm(x, (64,))[:, 0]])
def test_small_views_are_kept_as_they_are_without_the_rest_of_their_storage_in_graphs(function):
    (eager, expected), (graph, grads) = bytes_and_gradients(function, min_numel=1024)
    assert graph <= eager
    assert_close(grads, expected)
