"""Brevitas' activation quantizers as backward quantizers of layers, models and blocks of code."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import brevitas.nn as qnn
import pytest
import torch
from brevitas.graph.calibrate import calibration_mode
from brevitas.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerTensorFloat,
    ShiftedUint8ActPerTensorFloat,
    SignedBinaryActPerTensorConst,
    Uint8ActPerTensorFloat,
)
from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Act, MXInt8Act
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brevact
import brevact.nn as bnn
from brevact.autograd.hooks import regions_of
from brevact.injectors import BrevitasQuantizer, backward_settings_from

SMALL = {"min_numel": 0}
ACT_SMALL = {"act_min_numel": 0}
injectors = pytest.mark.parametrize(
    "injector",
    [
        Int8ActPerTensorFloat,
        ShiftedUint8ActPerTensorFloat,
        SignedBinaryActPerTensorConst,
        MXInt8Act,
        MXFloat8e4m3Act,
    ],
)


def images(seed: int = 0, channels: int = 4) -> Tensor:
    return torch.randn(3, channels, 9, 11, generator=torch.Generator().manual_seed(seed))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(140, 5)
    )


def gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(*inputs).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad]


def counters(quantizer: BrevitasQuantizer) -> list[int]:
    return [m.counter for m in quantizer.modules() if hasattr(m, "counter")]


def first(quantizer: BrevitasQuantizer) -> nn.Module:
    """Brevitas' modules for the first tensor of a forward pass."""
    return quantizer.tensors["0"].tensor_quant


@injectors
def test_layer_keeps_its_forward_and_decodes_for_backward(injector, saved_bytes):
    plain = bnn.QuantConv2d(4, 6, 3, weight_quant=None)
    layer = bnn.QuantConv2d(4, 6, 3, weight_quant=None, act_quant=injector, **ACT_SMALL)
    layer.load_state_dict(plain.state_dict())
    x = images()
    result, kept = saved_bytes(layer, x)
    expected, kept_plain = saved_bytes(plain, x)
    assert torch.equal(result, expected)
    assert kept < kept_plain
    result.sum().backward()
    decoded = brevact.quantizer(injector, **({"group_dim": 1} if "group_size" in injector else {})).quantize(x)
    grad = torch.nn.grad.conv2d_weight(decoded.dequantize(), layer.weight.shape, torch.ones_like(result))
    assert torch.allclose(layer.weight.grad, grad, rtol=1e-4, atol=1e-4)


def test_overrides_take_the_prefix_of_the_slot():
    layer = bnn.SiLU(act_quant=Int8ActPerTensorFloat, act_bit_width=2, act_save_mode="quantize_on_backward")
    assert layer.act_quant.extra_repr() == "Int8ActPerTensorFloat, bit_width=2, save_mode=quantize_on_backward"
    with pytest.raises(TypeError, match=r"bit_widht=2 is not a setting of Int8Act.*; did you mean bit_width"):
        bnn.SiLU(act_quant=Int8ActPerTensorFloat, act_bit_widht=2)
    bnn.SiLU(act_quant=None, act_collect_stats_steps=3)
    with pytest.raises(TypeError, match="act_colect_stats_steps=3 is not an argument"):
        bnn.SiLU(act_quant=None, act_colect_stats_steps=3)


def test_stock_layers_keep_their_meaning():
    layer = qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=2)
    assert len(layer(images()).unique()) <= 4
    both = qnn.QuantReLU(act_quant=brevact.StochBackward2bit, forward_quant=Uint8ActPerTensorFloat)
    assert both.act_quant.backward_quant.settings.quantizer.bit_width == 2


def test_state_is_saved_with_the_layer():
    layer = bnn.QuantConv2d(4, 6, 3, act_quant=Int8ActPerTensorFloat, act_collect_stats_steps=2, **ACT_SMALL)
    name = "act_quant.quantizer.tensors.0.tensor_quant.scaling_impl.value"
    plain_keys = bnn.QuantConv2d(4, 6, 3).state_dict().keys()
    assert layer.state_dict().keys() == plain_keys  # nothing was collected
    for seed in range(4):
        layer(images(seed) * (seed + 1))
    assert layer.state_dict().keys() == plain_keys | {name}
    twin = bnn.QuantConv2d(4, 6, 3, act_quant=Int8ActPerTensorFloat, **ACT_SMALL)
    twin.load_state_dict(layer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(gradients(layer, images()), gradients(twin, images()), strict=True))
    assert twin.state_dict()[name] == layer.state_dict()[name]


def test_state_dict_of_the_plain_layer_loads():
    layer = bnn.QuantConv2d(4, 6, 3, act_quant=Int8ActPerTensorFloat, **ACT_SMALL)
    layer(images())
    layer.load_state_dict(bnn.QuantConv2d(4, 6, 3).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({"bias": layer.bias})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@injectors
def test_copied_layers_have_statistics_of_their_own(copied, injector):
    layer = bnn.QuantConv2d(4, 6, 3, act_quant=injector, **ACT_SMALL)
    layer(images())
    twin = copied(layer)
    assert twin.act_quant.settings.quantizer is twin.act_quant.quantizer
    assert regions_of(twin)[0].settings.quantizer is twin.act_quant.quantizer
    assert twin.act_quant.quantizer is not layer.act_quant.quantizer
    assert counters(twin.act_quant.quantizer) == counters(layer.act_quant.quantizer)
    assert all(torch.equal(a, b) for a, b in zip(gradients(layer, images(1)), gradients(twin, images(1)), strict=True))


def test_state_moves_with_the_layer():
    layer = bnn.QuantConv2d(4, 6, 3, act_quant=Int8ActPerTensorFloat, **ACT_SMALL).bfloat16()
    assert {x.dtype for x in layer.act_quant.buffers()} == {torch.bfloat16}
    layer(images().bfloat16()).sum().backward()
    assert layer.weight.grad.isfinite().all()
    assert layer.eval().act_quant.quantizer.training is False
    assert first(layer.train().act_quant.quantizer).training


def test_no_gradient_reaches_a_learned_scale():
    layer = bnn.QuantLinear(9, 5, act_quant=Int8ActPerTensorFloat, act_collect_stats_steps=1, **ACT_SMALL)
    x = torch.randn(6, 9)
    for _ in range(3):
        layer(x).sum().backward()
    scale = first(layer.act_quant.quantizer).scaling_impl.value
    assert scale.grad is None and not scale.requires_grad
    assert {name for name, _ in layer.named_parameters()} == {"weight", "bias"}
    torch.optim.SGD(layer.parameters(), lr=1.0, weight_decay=0.1).step()
    assert scale.item() == pytest.approx(x.abs().flatten().sort().values[-1].item(), rel=1e-6)


def test_a_frozen_layer_keeps_its_statistics():
    layer = bnn.QuantConv2d(4, 4, 3, padding=1, act_quant=Int8ActPerTensorFloat, **ACT_SMALL)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), layer)
    model(images())
    assert counters(layer.act_quant.quantizer) == [1]
    layer.eval()
    brevact.quantize_backward(model, Int8ActPerTensorFloat, **SMALL)
    model(images(1)).sum().backward()
    assert counters(layer.act_quant.quantizer) == [1]


@injectors
def test_quantizing_on_backward_gives_the_same_gradients_and_statistics(injector):
    modes = list(brevact.SaveMode)
    layers = [bnn.QuantConv2d(4, 6, 3, act_quant=injector, act_save_mode=mode, **ACT_SMALL) for mode in modes]
    layers[1].load_state_dict(layers[0].state_dict())
    for seed in range(3):
        x = images(seed) * (seed + 1)
        outputs = [layer(x).square().sum() for layer in layers]
        for layer, output in zip(layers, outputs, strict=True):
            layer.zero_grad()
            output.backward(retain_graph=True)
            output.backward()
        assert torch.equal(layers[0].weight.grad, layers[1].weight.grad)
        states = [layer.act_quant.quantizer for layer in layers]
        assert counters(states[0]) == counters(states[1])
        assert set(counters(states[0])) <= {seed + 1}
        values = [list(state.state_dict().values()) for state in states]
        assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))


def test_a_second_forward_before_backward_leaves_the_first_alone():
    layer = bnn.SiLU(act_quant=Int8ActPerTensorFloat, act_save_mode="quantize_on_backward", **ACT_SMALL)
    alone = bnn.SiLU(act_quant=Int8ActPerTensorFloat, **ACT_SMALL)
    x, expected = images().requires_grad_(), images().requires_grad_()
    first = layer(x)
    layer(images(1) * 100)
    first.sum().backward()
    alone(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_counts_statistics_once(reentrant):
    layer = bnn.QuantConv2d(4, 4, 3, padding=1, act_quant=Int8ActPerTensorFloat, **ACT_SMALL)
    plain = copy.deepcopy(layer)
    for seed in range(3):
        x, y = (images(seed).requires_grad_() for _ in range(2))
        layer.zero_grad(), plain.zero_grad()
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        plain(y).sum().backward()
        assert torch.equal(layer.weight.grad, plain.weight.grad)
        assert counters(layer.act_quant.quantizer) == [seed + 1]
    scales = [first(module.act_quant.quantizer).scaling_impl.buffer for module in (layer, plain)]
    assert torch.equal(*scales)


class SoftAndLoud(bnn.QuantConv2d):
    """A layer that keeps two tensors of different scale."""

    def forward(self, x):
        return super().forward(x) + super().forward(100_000 * x)


def test_each_tensor_of_a_layer_has_statistics_of_its_own():
    layer = SoftAndLoud(4, 4, 3, act_quant=Int8ActPerTensorFloat, **ACT_SMALL)
    for _ in range(2):
        layer(images() / 100).sum().backward()
    statistics = layer.act_quant.quantizer.tensors
    scales = [one.tensor_quant.scaling_impl.buffer.item() for one in statistics.values()]
    assert len(scales) == 2 and set(counters(layer.act_quant.quantizer)) == {2}
    assert min(scales) < 0.1 and max(scales) > 10


def test_a_layer_collects_for_a_bounded_number_of_tensors():
    layer = bnn.QuantLSTM(4, 8, act_quant=Int8ActPerTensorFloat, **ACT_SMALL)
    layer(torch.randn(3, 2, 4))[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.requires_grad)
    quantizer = layer.act_quant.quantizer
    assert len(quantizer.tensors) > 1
    for place in (0, 1000, 1001):
        quantizer.with_statistics_of(torch.randn(8) * place, place)
    assert len(quantizer.tensors) <= 65
    assert quantizer.tensors["-1"].tensor_quant.scaling_impl.counter == 0


def test_calibration_of_forward_quantizers_ends_no_collection():
    learned = {"input_quant": Int8ActPerTensorFloat, "input_bit_width_impl_type": "PARAMETER"}  # plain ops, all of them
    model = nn.Sequential(bnn.QuantConv2d(4, 4, 3, **learned, act_quant=Int8ActPerTensorFloat, **ACT_SMALL))
    with torch.no_grad(), calibration_mode(model.eval()):
        model(images() * 50)
    quantizer = model[0].act_quant.quantizer
    assert counters(quantizer) == [0]
    model.train()(images() * 50)
    assert set(counters(quantizer)) == {1}
    assert first(quantizer).scaling_impl.buffer > 10


def test_policy_gives_each_module_statistics_of_its_own(saved_bytes):
    model, plain = network(), network()
    brevact.quantize_backward(model, Int8ActPerTensorFloat, bit_width=2, **SMALL)
    result, kept = saved_bytes(model, images())
    expected, kept_plain = saved_bytes(plain, images())
    assert torch.equal(result, expected)
    assert kept < kept_plain / 4
    result.sum().backward()
    assert model.state_dict().keys() == plain.state_dict().keys()
    quantizers = [regions_of(module)[0].settings.quantizer for module in model.modules()]
    assert len(set(quantizers)) == len(quantizers)
    seen = [q for q in quantizers if q.tensors]  # built for modules that store something
    assert len(seen) == 6
    assert {count for q in seen for count in counters(q)} == {1}
    scales = {first(q).scaling_impl.buffer.item() for q in seen}
    assert len(scales) == len(seen)
    brevact.restore_backward(model)
    assert not any(regions_of(module) for module in model.modules())


@injectors
def test_policy_gives_the_gradients_of_layers_with_the_quantizer(injector):
    torch.manual_seed(0)
    layers = nn.Sequential(
        bnn.QuantConv2d(4, 8, 3, weight_quant=None, act_quant=injector, **ACT_SMALL),
        bnn.SiLU(act_quant=injector, **ACT_SMALL),
        nn.Flatten(),
        bnn.QuantLinear(504, 5, weight_quant=None, act_quant=injector, **ACT_SMALL),
    )
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.SiLU(), nn.Flatten(), nn.Linear(504, 5))
    model.load_state_dict({key: value for key, value in layers.state_dict().items() if "act_quant" not in key})
    brevact.quantize_backward(model, injector, **SMALL)
    for seed in range(2):
        pairs = zip(gradients(layers, images(seed)), gradients(model, images(seed)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_copies_of_a_model_keep_the_statistics_of_its_policy():
    model = brevact.quantize_backward(network(), Int8ActPerTensorFloat, **SMALL)
    gradients(model, images())
    twin = copy.deepcopy(model)
    mine, its = (regions_of(m[0])[0].settings.quantizer for m in (model, twin))
    assert mine is not its and counters(mine) == counters(its) == [1]
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, images(1)), gradients(twin, images(1)), strict=True))


class Branches(nn.Module):
    """Three projections of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.v(x)


def test_policy_without_statistics_packs_a_shared_tensor_once(saved_bytes):
    x = torch.randn(4, 10, 32, requires_grad=True)
    weights = 3 * 32 * 32 * 4  # for the gradient of x
    _, kept = saved_bytes(brevact.quantize_backward(Branches(), MXInt8Act, **SMALL), x)
    assert kept == x.numel() + x.numel() // 32 + weights
    _, kept = saved_bytes(brevact.quantize_backward(Branches(), Int8ActPerTensorFloat, **SMALL), x)
    assert kept == 3 * (x.numel() + 4) + weights  # each projection has a scale of its own


def test_rules_may_mix_brevitas_and_backward_quantizers():
    model = network()
    rules = {nn.BatchNorm2d: None, nn.Conv2d: MXFloat8e4m3Act.let(min_numel=0), "*": brevact.StochBackward4bit}
    brevact.quantize_backward(model, rules)
    conv, conv2 = (regions_of(model[i])[0].settings.quantizer for i in (0, 3))
    assert conv is conv2
    assert conv.format.group == (1, 32)
    assert regions_of(model[6])[0].settings.quantizer.bit_width == 4
    gradients(model, images())


def test_a_block_quantizes_each_tensor_by_its_own_statistics():
    small, large = images() / 100, images(1) * 100
    block = brevact.backward_quant(Int8ActPerTensorFloat, collect_stats_steps=1, **SMALL)
    for _ in range(2):  # the second time as the first
        x, y = small.clone().requires_grad_(), large.clone().requires_grad_()
        with block:
            result = torch.nn.functional.silu(x).sum() + torch.nn.functional.gelu(y).sum()
        result.backward()
        expected = [t.clone().requires_grad_() for t in (small, large)]
        for t, function in zip(expected, (bnn.SiLU, bnn.GELU), strict=True):
            function(act_quant=Int8ActPerTensorFloat, **ACT_SMALL)(t).sum().backward()
        assert torch.equal(x.grad, expected[0].grad)
        assert torch.equal(y.grad, expected[1].grad)


def test_a_quantizer_object_is_shared_by_the_layers_that_get_it():
    quantizer = brevact.quantizer(Int8ActPerTensorFloat)
    a, b = bnn.SiLU(act_quant=quantizer, **ACT_SMALL), bnn.SiLU(act_quant=quantizer)
    assert a.act_quant.quantizer is not quantizer  # an override makes another one
    assert b.act_quant.quantizer is quantizer
    c = bnn.SiLU(act_quant=b.act_quant)
    assert c.act_quant is b.act_quant
    settings = backward_settings_from(b.act_quant)
    assert settings.quantizer is quantizer


def test_weight_quantizers_are_refused_everywhere():
    for use in (
        lambda: bnn.SiLU(act_quant=Int8WeightPerTensorFloat),
        lambda: brevact.quantize_backward(network(), Int8WeightPerTensorFloat),
        lambda: brevact.backward_quant(Int8WeightPerTensorFloat),
        lambda: brevact.quantizer(Int8WeightPerTensorFloat),
    ):
        with pytest.raises(TypeError, match="Int8WeightPerTensorFloat, which quantizes a weight or a bias"):
            use()


def test_memory_report_leaves_the_statistics_alone():
    model = brevact.quantize_backward(network(), Int8ActPerTensorFloat, bit_width=2, **SMALL)
    gradients(model, images())
    report = brevact.memory_report(model, images())
    assert report.ratio > 6
    assert counters(regions_of(model[0])[0].settings.quantizer) == [1]


def test_compiled_models_run_it_without_a_compiler(saved_bytes):
    model = brevact.quantize_backward(network(), Int8ActPerTensorFloat, bit_width=2, **SMALL)
    twin = copy.deepcopy(model)
    expected = gradients(twin, images())
    assert all(
        torch.equal(a, b)
        for a, b in zip(gradients(torch.compile(model, backend="eager"), images()), expected, strict=True)
    )
    torch.compiler.reset()
    with pytest.raises(Exception, match="without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(images())
    torch.compiler.reset()


SCRIPT = """
import brevitas.config, torch
from brevitas.quant import Int8ActPerTensorFloat, ShiftedUint8ActPerTensorFloat
from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Act
import brevact, brevact.nn as bnn

assert brevitas.config.JIT_ENABLED and brevitas.NATIVE_STE_BACKEND_LOADED <= NATIVE
x = torch.randn(4, 8, 6, 9)
for injector in (Int8ActPerTensorFloat, ShiftedUint8ActPerTensorFloat, MXFloat8e4m3Act):
    q = brevact.quantizer(injector)
    assert (q.quantize(x).dequantize() - x).abs().max() < 0.6
    layer = bnn.QuantConv2d(8, 8, 3, weight_quant=None, act_quant=injector, act_min_numel=0)
    layer(x).sum().backward()
    assert layer.weight.grad.isfinite().all()
try:
    brevact.quantizer(Int8ActPerTensorFloat, float_to_int_impl_type="stochastic_round")
except ValueError as error:
    assert "BREVITAS_JIT" in str(error)
else:
    raise AssertionError("stochastic rounding cannot be scripted")
"""


#: Without a compiler Brevitas goes on with Python's estimators; its extension takes half a minute to compile.
WITHOUT_COMPILER = """
from torch.utils import cpp_extension

def load(**arguments):
    raise RuntimeError("Ninja is required to load C++ extensions")

cpp_extension.load = load
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("native", [False, True])
def test_quantizers_work_where_brevitas_scripts_them(native: bool):
    script = f"NATIVE = {native}{'' if native else WITHOUT_COMPILER}{SCRIPT}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "BREVITAS_JIT": "1", "PYTHONPATH": str(Path(brevact.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
