"""Integers of few bits in compiled graphs, such as those of fake quantizers: kept as codes, exactly."""

from __future__ import annotations

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8ActPerTensorFloatMinMaxInit, Int8WeightPerTensorFloat, Uint8ActPerTensorFloatMaxInit
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import brevact
from brevact.compiler import constants
from brevact.compiler.integers import Codes, Integers
from tests.autograd.measuring import watch_saved
from tests.crosses import some_of, taking_turns

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="guards on constants: from PyTorch 2.13 on"
)
X = torch.randn(8, 8, 16, 16, generator=torch.Generator().manual_seed(0))
X[0, 0, 0, :4] = torch.tensor([1e9, -1e9, 0.49999997, -0.5])  # saturated, and ties
NUMEL = X.numel()


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def relu(bits: int = 8, **options) -> nn.Module:
    return qnn.QuantReLU(act_quant=Uint8ActPerTensorFloatMaxInit, max_val=3.0, bit_width=bits, **options)


def signed(bits: int = 8, **options) -> nn.Module:
    ends = {"min_val": -3.0, "max_val": 3.0}
    return qnn.QuantIdentity(act_quant=Int8ActPerTensorFloatMinMaxInit, **ends, bit_width=bits, **options)


CONSTANT = {"scaling_impl_type": "const"}
CHANNELS = {"scaling_per_output_channel": True, "per_channel_broadcastable_shape": (1, 8, 1, 1)}
QUANTIZERS = {
    "unsigned": (relu, 8),
    "four_bits": (lambda: relu(4), 4),
    "constant_scale": (lambda: relu(4, **CONSTANT), 4),
    "ceil": (lambda: relu(4, float_to_int_impl_type="ceil", **CONSTANT), 4),
    "floor": (lambda: relu(2, float_to_int_impl_type="floor", **CONSTANT), 2),
    "signed": (signed, 8),
    "narrow": (lambda: signed(4, narrow_range=True, **CONSTANT), 4),
    "channels": (lambda: signed(4, **CHANNELS), 4),
}


def network(quantizer: nn.Module, weights=Int8WeightPerTensorFloat) -> nn.Module:
    torch.manual_seed(0)
    layers = [qnn.QuantConv2d(8, 8, 3, padding=1, weight_quant=weights, weight_bit_width=4) for _ in range(2)]
    return nn.Sequential(layers[0], nn.BatchNorm2d(8), quantizer, layers[1], nn.Flatten(), nn.Tanh())


def step(model: nn.Module, x: Tensor = X, **options) -> tuple[list[Tensor], int]:
    """Output and gradients of a compiled model, and bytes it keeps from forward to backward."""
    torch.manual_seed(0)
    model.zero_grad()
    with watch_saved() as saved:
        y = torch.compile(model, backend="aot_eager", fullgraph=True, **options)(x)
    own = {each.untyped_storage().data_ptr() for each in (x, *model.parameters(), *model.buffers())}
    nbytes = sum(each.nbytes for each in saved.tensors if each.untyped_storage().data_ptr() not in own)
    y.square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)], nbytes


@pytest.mark.parametrize("name", some_of(QUANTIZERS, quick=["channels"]))
def test_lossless_graphs_keep_codes_and_the_gradients_of_plain_ones(name):
    make, bits = QUANTIZERS[name]
    plain, plain_bytes = step(network(make()))
    found, nbytes = step(brevact.quantize_backward(network(make()), brevact.LosslessBackward))
    assert all(map(torch.equal, found, plain))
    # The norm's input, the last output and, where the scale learns, the quantizer's input; a mask for each
    floats = 8 + 4 * (name in ("unsigned", "four_bits", "signed", "channels"))
    assert nbytes < NUMEL * (floats + bits / 8 + 0.5) + 8192 < plain_bytes


@pytest.mark.parametrize("name", some_of(QUANTIZERS, quick=["four_bits"]))
def test_lossy_graphs_keep_codes_that_products_read(name):
    make, bits = QUANTIZERS[name]
    model = brevact.quantize_backward(network(make()), brevact.StochBackward2bit.let(min_numel=0))
    report = brevact.memory_report(torch.compile(model, backend="aot_eager", fullgraph=True), X)
    kept = [row for row in report.ops if row.layer.startswith("2.") and row.bit_width == bits]
    assert [row.tensor_bytes for row in kept if row.how != "mask"] == [4 * NUMEL]


def test_blocks_with_different_bit_widths_share_no_graph():
    found = []
    for policy in (None, brevact.LosslessBackward):
        for bits in (2, 8, 2):
            torch.manual_seed(0)
            layer = nn.Sequential(relu(bits, **CONSTANT), nn.Conv2d(8, 8, 1))
            if policy is not None:
                brevact.quantize_backward(layer, policy)
            found.append(step(layer)[0][1])
    assert all(map(torch.equal, found[:3], found[3:]))
    layer[0].act_quant.fused_activation_quant_proxy.tensor_quant.msb_clamp_bit_width_impl.bit_width.value.fill_(8.0)
    assert torch.equal(step(layer)[0][1], found[1])


@pytest.mark.parametrize("name", some_of(["narrow", "signed", "unsigned"], quick=2))
def test_nan_stays_nan(name):
    x = X.clone()
    x[0, 0, 5, 5] = torch.nan
    layer = nn.Sequential(QUANTIZERS[name][0](), nn.Conv2d(8, 8, 1))
    expected = step(layer, x)[0][1:]
    found = step(brevact.quantize_backward(layer, brevact.LosslessBackward), x)[0][1:]
    assert sum(int(each.isnan().sum()) for each in expected)
    assert all(not (each.isnan() & ~other.isnan()).any() for each, other in zip(expected, found, strict=True))


def codes(function, *args: Tensor) -> Codes | None:
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    result = next(node for node in reversed(graph.nodes) if node.op == "call_function")
    return Integers(graph, {}).codes_of(result)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.round().clamp(-8, 7), Codes(-8, 4, False)),
        (lambda x: x.floor().clamp(-7, 7), Codes(-7, 4, True)),
        (lambda x: x.ceil().clamp_min(0).clamp_max(255).to(torch.bfloat16), Codes(0, 8, False)),
        (lambda x: torch.where(x > 0, 1.0, -1.0), Codes(-1, 2, True)),
        (lambda x: x.sign() * 2, Codes(-2, 3, True)),
        (lambda x: x.clamp(-8, 7).trunc() + 8, None),  # which would be integers
        (lambda x: x.round().clamp(-8, 7.5), None),
        (lambda x: x.round().clamp(0, 256), None),
        (lambda x: x.round(decimals=1).clamp(-8, 7), None),
        (lambda x: x.round().clamp_min(0), None),
        (lambda x: torch.sub(x.round().clamp(0, 3), x.sign(), alpha=2), None),
        (lambda x: x.round().clamp(0, 3) * 0.5, None),
        (lambda x: x.round().clamp(0, 200).to(torch.int8), None),
    ],
)
def test_ranges(function, expected):
    assert codes(function, X) == expected


KEPT = {
    "int8": (lambda x: x.sign().to(torch.int8), torch.float32),
    "int16": (lambda x: (3 * x).round().clamp(-8, 7).to(torch.int16), torch.float32),
    "uint8": (lambda x: (3 * x).round().clamp(0, 7).to(torch.uint8) + 5, torch.float32),
    "indices": (lambda x: x.sort(-1).indices - 64, torch.float32),
    "float16": (lambda x: (3 * x).round().clamp(-8, 7), torch.float16),
    "eighths": (lambda x: (3 * x).round().clamp(-8, 7) / 8, torch.bfloat16),
}


@pytest.mark.parametrize(
    "name, policy", taking_turns(list(KEPT), [brevact.LosslessBackward, brevact.StochBackward4bit])
)
def test_integers_of_all_types_and_ranges_are_kept_exactly(name, policy):
    """The gradient of the factor is them; the sum of half of them exceeds float16."""
    integers, dtype = KEPT[name]
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for chosen in (None, policy.let(min_numel=0)):
        torch._dynamo.reset()
        factor = torch.ones(256, 128, dtype=dtype, requires_grad=True)
        with brevact.backward_quant(chosen):
            out = torch.compile(lambda x, factor: (factor * 1.0) * integers(x), backend="aot_eager")(x, factor)
        found.append(torch.autograd.grad(out.float().sum(), factor)[0])
    assert torch.equal(*found)


def test_versions_without_guards_warn_once(monkeypatch):
    monkeypatch.setattr(constants, "HAS_GUARDS", False)
    constants._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="no guards on the bit widths of Brevitas' quantizers") as found:
        for bits in (4, 8):
            torch.compile(brevact.quantize_backward(relu(bits)), backend="aot_eager")(
                X.requires_grad_()
            ).sum().backward()
    assert len([each for each in found if "no guards" in str(each.message)]) == 1
    constants._warn_once.cache_clear()
