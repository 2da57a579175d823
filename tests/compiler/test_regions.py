"""Regions under `torch.compile`: the forward pass stays, backward reads packed tensors, and graphs do not break."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.fx import traceback as fx_traceback
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import brevact
from brevact import nn as bnn
from brevact.autograd import SaveMode, attach_region, region
from brevact.compiler.graphs import mark_of
from brevact.quantizers import Rounding, UniformQuantizer, from_text
from tests.autograd.measuring import kept_bytes, settings, watch_saved
from tests.crosses import some_of

FINE = settings(24, Rounding.NEAREST)
NEAREST = settings(4, Rounding.NEAREST)
X = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
FINE_LEAF = brevact.NearestBackward8bit.let(bit_width=24, bucket_size=64, min_numel=0)
#: Lossy policies let other compilers than Inductor decompose ops as Inductor does: its last bits.
DECOMPOSED = "aot_eager_decomp_partition"
#: Gradients of some layers by codes of 24 bits, and float32's own rounding of sums in another order.
TOLERANCE = 64 * torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    assert torch._C._len_torch_function_stack() == 0


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in self.qkv(self.norm(x)).unflatten(-1, (3, 2, 32)).unbind(2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(x)))


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), Block(), nn.LayerNorm(64), nn.Linear(64, 8))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 16, 3, groups=4), nn.GroupNorm(4, 16), nn.ReLU(inplace=True)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "transformer": (transformer, X),
    "convolutions": (convolutions, IMAGES),
    "channels_last": (convolutions, IMAGES.to(memory_format=torch.channels_last)),
}


def compiled(model, backend: str = "aot_eager", **options):
    return torch.compile(model, backend=backend, **{"fullgraph": True, **options})


def step(run: Callable, model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor], int]:
    """Output, gradients and kept bytes of a step."""
    model.zero_grad()
    found: list[Tensor] = []
    nbytes = kept_bytes(model, lambda: found.append(run(x)))
    found[0].float().square().mean().backward()
    return found[0].detach(), [p.grad.clone() for p in model.parameters()], nbytes


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float = TOLERANCE) -> None:
    top = max(each.norm() for each in expected)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= tolerance * top


@functools.cache
def plain_step(make, x: Tensor, backend: str, autocast: torch.dtype | None):
    plain = make()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        return step(compiled(plain, backend), plain, x)


def packed_step(make, x: Tensor, policy, way: Callable | None = None, backend: str = DECOMPOSED):
    model = make()
    return step(compiled(brevact.quantize_backward(model, policy), backend) if way is None else way(model), model, x)


def plain_and_packed(make, x: Tensor, policy, way: Callable | None = None, backend: str = DECOMPOSED):
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return plain_step(make, x, backend, autocast), packed_step(make, x, policy, way, backend)


@functools.cache
def least_bytes() -> int:
    return packed_step(transformer, X, NEAREST)[2]


each_model = pytest.mark.parametrize("name", some_of(MODELS, quick=["transformer", "convolutions"]))


@each_model
def test_codes_of_24_bits_give_plain_gradients(name):
    (out, grads, _), (found, near, _) = plain_and_packed(*MODELS[name], FINE)
    assert torch.equal(found, out)
    assert_near(near, grads)


@each_model
def test_lossless_gradients_are_plain_ones(name):
    (out, grads, plain), (found, exact, packed) = plain_and_packed(
        *MODELS[name], brevact.LosslessBackward, backend="aot_eager"
    )
    assert torch.equal(found, out) and packed <= plain
    assert all(map(torch.equal, exact, grads))


@each_model
def test_running_statistics_and_bytes(name):
    make, x = MODELS[name]
    plain, model = make(), brevact.quantize_backward(make(), NEAREST)
    (_, _, full), (_, _, packed) = (step(compiled(net, DECOMPOSED), net, x) for net in (plain, model))
    # The batch itself is an input of the graph, which its caller holds.
    assert packed - x.nbytes < (full - x.nbytes) / 3
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)


def around(model: nn.Module) -> Callable:
    return region(FINE)(compiled(model))


def inside(model: nn.Module) -> Callable:
    def forward(x: Tensor) -> Tensor:
        with brevact.backward_quant(FINE_LEAF):
            return model(x)

    return compiled(forward)


def policy_on_the_compiled_model(model: nn.Module) -> Callable:
    return brevact.quantize_backward(compiled(model), FINE)


def one_block(model: nn.Module) -> Callable:
    brevact.quantize_backward(model, FINE)[1].compile(backend="aot_eager", fullgraph=True)
    return model


def module_compiled(model: nn.Module) -> Callable:
    brevact.quantize_backward(model, FINE).compile(backend="aot_eager", fullgraph=True)
    return model


def breaking(model: nn.Module) -> Callable:
    def forward(x: Tensor) -> Tensor:
        x = model[1](model[0](x))
        torch._dynamo.graph_break()
        return model[2:](x)

    return region(FINE)(compiled(forward, fullgraph=False))


def breaking_inside(model: nn.Module) -> Callable:
    def forward(x: Tensor) -> Tensor:
        with brevact.backward_quant(FINE_LEAF):
            x = model[1](model[0](x))
            torch._dynamo.graph_break()
            return model[2:](x)

    return compiled(forward, fullgraph=False)


def in_checkpoint(model: nn.Module) -> Callable:
    def forward(x: Tensor) -> Tensor:
        return model[2:](checkpoint(model[1], model[0](x), use_reentrant=False))

    brevact.quantize_backward(model, FINE)
    return compiled(forward)


def around_a_compiled_block(model: nn.Module) -> Callable:
    brevact.quantize_backward(model, FINE)
    block = compiled(model[1])
    return lambda x: model[2:](checkpoint(block, model[0](x), use_reentrant=False))


WAYS = [
    *(around, inside, policy_on_the_compiled_model, module_compiled),
    *(one_block, breaking, breaking_inside, in_checkpoint, around_a_compiled_block),
]


@pytest.mark.parametrize(
    "way", some_of(WAYS, quick=[around, inside, breaking, in_checkpoint]), ids=lambda way: way.__name__
)
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_each_way_gives_plain_gradients(way):
    (_, grads, _), (_, near, _) = plain_and_packed(transformer, X, None, way)
    assert_near(near, grads)


@pytest.mark.parametrize("way", [inside, around, breaking, breaking_inside], ids=lambda way: way.__name__)
def test_each_way_packs(way, monkeypatch):
    monkeypatch.setitem(globals(), "FINE", NEAREST)
    (_, _, full), (_, _, packed) = plain_and_packed(transformer, X, None, way)
    assert packed < full * (0.95 if way is inside else 0.6)


RULES = (
    *({"1": None, "*": NEAREST}, {Block: NEAREST}),
    *({F.linear: None, "*": NEAREST}, {nn.LayerNorm: None, "*": NEAREST}),
)


@pytest.mark.parametrize("rules", some_of(RULES, quick=2))
def test_rules_hold_in_graphs(rules):
    (_, grads, full), (_, _, packed) = plain_and_packed(transformer, X, rules)
    assert least_bytes() < packed < full and grads


def test_layers_with_slots_pack():
    def make(quant: object) -> nn.Module:
        return nn.Sequential(
            *(bnn.QuantConv2d(3, 16, 3, act_quant=quant), bnn.BatchNorm2d(16, act_quant=quant)),
            *(bnn.Hardswish(act_quant=quant), bnn.MaxPool2d(2, act_quant=quant)),
            *(bnn.QuantConv2d(16, 8, 3, weight_quant=None, act_quant=quant), bnn.AdaptiveAvgPool2d(1, act_quant=quant)),
            *(nn.Flatten(), bnn.QuantLinear(8, 10, True, act_quant=quant)),
        )

    packed, plain = (make(quant) for quant in (brevact.NearestBackward4bit.let(min_numel=0), None))
    assert step(compiled(packed), packed, IMAGES)[2] < step(compiled(plain), plain, IMAGES)[2] / 2


def test_noise_is_new_in_each_step_and_fixed_by_the_seed():
    model = brevact.quantize_backward(transformer(), settings(2))
    run = compiled(model)

    def draw(seed: int | None = None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        return step(run, model, X)[1][0]

    with torch._dynamo.config.patch(error_on_recompile=True):
        first, second, again = draw(1), draw(), draw(1)
    assert not torch.equal(first, second) and torch.equal(first, again)


@pytest.mark.parametrize(
    "make, x", [(transformer, X), pytest.param(convolutions, IMAGES, marks=pytest.mark.exhaustive)]
)
def test_batches_of_dynamic_size(make, x):
    plain, model = make(), brevact.quantize_backward(make(), FINE)
    run = compiled(model, DECOMPOSED, dynamic=True)
    for batch in (4, 3):
        (_, grads, _), (_, near, _) = step(plain, plain, x[:batch]), step(run, model, x[:batch])
        assert_near(near, grads)


def test_a_batch_as_large_as_a_layer_leaves_sizes_dynamic():
    parts = nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 5)
    run = compiled(model := brevact.quantize_backward(nn.Sequential(*parts), FINE), "aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for x in (torch.randn(5, 8), torch.randn(3, 8)):
            (_, grads, _), (_, near, _) = step(nn.Sequential(*parts), model, x), step(run, model, x)
            assert_near(near, grads)


@pytest.mark.parametrize("dtype", some_of([torch.bfloat16, torch.float16], quick=2))
def test_autocast(dtype):
    with torch.autocast("cpu", dtype):
        (out, grads, full), (found, near, packed) = plain_and_packed(transformer, X, settings(8, Rounding.NEAREST))
    assert torch.equal(found, out) and packed < full
    assert_near(near, grads, 4 * 8 / 255 / 2)  # four tensors, half a step each of a range of 8 deviations


def test_quantize_on_backward_gives_the_gradients_of_save_quantized():
    late = settings(4, Rounding.NEAREST, save_mode=SaveMode.QUANTIZE_ON_BACKWARD)
    first, second = (packed_step(transformer, X, each)[1] for each in (late, NEAREST))
    assert all(map(torch.equal, first, second))


def test_eval_and_no_grad_pack_nothing():
    model = brevact.quantize_backward(transformer(), NEAREST).eval()
    run = compiled(model)
    with watch_saved() as saved:
        run(X)
        with torch.no_grad():
            run(X)
    assert not [each for each in saved.tensors if each.dtype is torch.uint8]
    model.train()
    with torch.no_grad():
        run(X)
    assert step(run, model, X)[2] < step(plain := transformer(), plain, X)[2]


def test_weights_are_not_packed():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.mask = nn.Parameter(torch.rand(64, 64)), nn.Buffer(torch.rand(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            weight = torch.tanh(self.scale) / self.scale.norm()
            return F.linear(x, weight * self.mask)

    model = brevact.quantize_backward(Scaled(), settings(1))
    plain, x = brevact.restore_backward(copy.deepcopy(model)), X.clone().requires_grad_()
    found, expected = (torch.autograd.grad(compiled(net)(x).sum(), x)[0] for net in (model, plain))
    torch.testing.assert_close(found, expected)


def test_a_router_in_a_checkpoint_chooses_the_same_experts():
    gate, experts = nn.Linear(64, 4), nn.Linear(64, 4 * 64)

    def routed(x: Tensor) -> Tensor:
        weights, chosen = gate(x).softmax(-1).topk(2)
        rows = experts(x).unflatten(-1, (4, 64)).gather(-2, chosen[..., None].expand(*chosen.shape, 64))
        return (weights[..., None] * rows).sum(-2)

    def run(x: Tensor) -> Tensor:
        return checkpoint(routed, x * 1, use_reentrant=False)

    grads = []
    for context in (contextlib.nullcontext(), region(settings(8, Rounding.NEAREST))):
        torch._dynamo.reset()
        with context:
            out = compiled(run)(X)
        grads.append(torch.autograd.grad(out.square().sum(), [*gate.parameters(), *experts.parameters()]))
    assert_near(*grads, 4 * 8 / 255 / 2)


def test_two_backward_passes():
    model = brevact.quantize_backward(transformer(), settings(2))
    loss = compiled(model)(X).square().mean()
    first, second = (torch.autograd.grad(loss, [*model.parameters()], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_quantizers_without_text_form_raise():
    class Local(UniformQuantizer):
        pass

    with pytest.raises(Exception, match="has no text form"):
        compiled(brevact.quantize_backward(transformer(), Local()))(X)


def test_exported_programs_hold_no_quantizer():
    for strict in (False, True):
        program = torch.export.export(brevact.quantize_backward(transformer(), NEAREST), (X,), strict=strict)
        assert not [node for node in program.graph.nodes if "brevact" in str(node.target)]


def test_another_threads_compiler_does_not_stop_packing():
    model, sizes, stop = brevact.quantize_backward(convolutions(), NEAREST), set(), threading.Event()

    def train() -> None:
        while not stop.is_set():
            sizes.add(step(model, model, IMAGES)[2])

    thread = threading.Thread(target=train)
    thread.start()
    try:
        step(compiled(net := convolutions()), net, IMAGES)
    finally:
        stop.set()
        thread.join()
    assert len(sizes) == 1


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.sin else found


def marks(run: Callable) -> list[tuple[str, str]]:
    """The names of a graph's ops and their regions: "-" for none, "" for full precision, else the bits."""
    found = []

    def backend(graph, inputs):
        for module in graph.modules():
            for node in getattr(module, "graph", torch.fx.Graph()).nodes:
                name = getattr(node.target, "__name__", str(node.target))
                if node.op in ("call_function", "call_method") and name in ("sin", "cos", "tanh", "checkpoint"):
                    text = mark_of(node)
                    bits = "-" if text is None else text and str(from_text(text).quantizer.bit_width)
                    found.append((name, bits))
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    assert torch.compile(run, backend=backend, fullgraph=True)(torch.ones(4, requires_grad=True)) is not None
    assert "custom" not in fx_traceback.current_meta
    return found


class Call(nn.Module):
    def __init__(self, function: Callable, *children: nn.Module) -> None:
        super().__init__()
        self.function, self.children_ = function, nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.children_)


def of(bits: int | None, function: Callable, *children: nn.Module) -> nn.Module:
    module = Call(function, *children)
    attach_region(module, None if bits is None else settings(bits))
    return module


def in_block(bits: int, function: Callable) -> Callable:
    def run(x: Tensor, *others: nn.Module) -> Tensor:
        with brevact.backward_quant(brevact.NearestBackward8bit.let(bit_width=bits)):
            x = function(x, *others)
        return torch.tanh(x)

    return run


def counted(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: torch.cos(output))
    return module


def doubled(x: Tensor) -> Tensor:
    with Doubling():
        return torch.sin(x)


def then_tanh(x: Tensor, module: nn.Module) -> Tensor:
    return torch.tanh(module(x))


def without_grad(x: Tensor, module: nn.Module) -> Tensor:
    with torch.no_grad():
        return module(x)


def in_checkpoint_of(x: Tensor, module: nn.Module) -> Tensor:
    return torch.tanh(checkpoint(module, x, use_reentrant=False))


CASES: dict[str, tuple[Callable, list[tuple[str, str]]]] = {
    "module": (Call(then_tanh, of(4, torch.sin)), [("sin", "4"), ("tanh", "-")]),
    "inner_module": (of(4, then_tanh, of(None, torch.sin)), [("sin", ""), ("tanh", "4")]),
    "block_in_module": (of(4, in_block(2, torch.sin)), [("sin", "2"), ("tanh", "4")]),
    "module_in_block": (Call(in_block(2, then_tanh), of(4, torch.sin)), [("sin", "4"), ("tanh", "2"), ("tanh", "-")]),
    "block_in_block": (in_block(2, in_block(8, torch.sin)), [("sin", "8"), ("tanh", "2"), ("tanh", "-")]),
    "another_hook": (Call(then_tanh, counted(of(4, torch.sin))), [("sin", "4"), ("cos", "-"), ("tanh", "-")]),
    "another_mode": (of(4, doubled), [("sin", "4")]),
    "checkpoint": (of(4, in_checkpoint_of, of(2, torch.sin)), [("tanh", "4"), ("sin", "-")]),
    "inside_checkpoint": (
        Call(in_checkpoint_of, of(4, then_tanh, of(2, torch.sin))),
        [("tanh", "-"), ("sin", "2"), ("tanh", "4")],
    ),
    "block_in_checkpoint": (
        Call(in_checkpoint_of, Call(in_block(2, torch.sin))),
        [("tanh", "-"), ("sin", "2"), ("tanh", "-")],
    ),
    "no_grad": (Call(without_grad, of(4, torch.sin)), [("sin", "-")]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_innermost_region_marks_ops(name):
    run, expected = CASES[name]
    assert marks(run) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["transformer", "channels_last"])
def test_inductor(name):
    (out, grads, full), (found, near, packed) = plain_and_packed(*MODELS[name], FINE, backend="inductor")
    assert_near([found], [out])
    assert_near(near, grads)
    assert packed <= full


@pytest.mark.parametrize("has_policy", some_of([True, False], quick=2))
def test_a_region_around_a_compiled_module_does_not_warn_of_global_hooks(has_policy: bool):
    model = transformer()
    step = compiled(brevact.quantize_backward(model, FINE_LEAF) if has_policy else model)
    with warnings.catch_warnings(record=True) as caught, brevact.backward_quant(model if has_policy else FINE_LEAF):
        warnings.simplefilter("always")
        step(X)
        assert not [each for each in caught if "global hooks" in str(each.message)]
        handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
        with contextlib.closing(contextlib.ExitStack()) as stack:
            stack.callback(handle.remove)
            step(X)
    assert [each for each in caught if "global hooks" in str(each.message)]
