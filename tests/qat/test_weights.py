import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8WeightPerChannelFloat, Int8WeightPerTensorFloat
from torch import nn

import brevact
from brevact import LosslessBackward, StochBackward2bit
from tests.qat.cases import CHANNELS, WEIGHTS, activation, gradients

every_weight = pytest.mark.parametrize("name", WEIGHTS)


def net(name):
    torch.manual_seed(0)
    return nn.Sequential(qnn.QuantConv2d(CHANNELS, CHANNELS, 3, weight_quant=WEIGHTS[name])).train()


def equal(a, b):
    return (a is None and b is None) or torch.equal(a, b)


@every_weight
def test_gradients_are_those_of_brevitas(name):
    plain, packed = net(name), net(name)
    brevact.quantize_backward(packed, LosslessBackward, min_numel=0)
    for seed in range(2):
        expected, found = gradients(plain, activation(seed)), gradients(packed, activation(seed))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert all(equal(found[2][key], expected[2][key]) for key in expected[2])


@pytest.mark.parametrize("name", [name for name in WEIGHTS if not name.startswith(("stochastic", "Fp8", "Signed"))])
def test_nothing_of_the_size_of_a_weight_is_kept(name):
    model = net(name)
    x = torch.randn(1, CHANNELS, 3, 3)
    plain = brevact.memory_report(model, x)
    brevact.quantize_backward(model, StochBackward2bit, min_numel=0)
    saved = brevact.memory_report(model, x)
    weight = model[0].weight.nbytes
    assert plain.plain_bytes >= x.nbytes + weight
    assert saved.saved_bytes < weight / 2


def test_a_weight_that_changes_before_backward_raises():
    model = brevact.quantize_backward(net("Int8WeightPerTensorFloat"), StochBackward2bit, min_numel=0)
    loss = model(activation().requires_grad_()).sum()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_linear_layers_and_transposed_convolutions():
    torch.manual_seed(0)
    for make in (lambda: qnn.QuantLinear(8, 16, bias=True), lambda: qnn.QuantConvTranspose2d(8, 4, 3)):
        torch.manual_seed(0)
        plain = make()
        torch.manual_seed(0)
        packed = brevact.quantize_backward(make(), LosslessBackward, min_numel=0)
        expected, found = gradients(plain, activation()), gradients(packed, activation())
        assert torch.equal(found[1], expected[1])
        assert all(torch.equal(found[2][key], expected[2][key]) for key in expected[2])


@every_weight
def test_gradients_of_a_backward_pass_inside_the_region(name):
    """The weight that a lossy region recomputes is no activation of it."""
    found = []
    for quantize in (False, True):
        layer = net(name)[0]
        if quantize:
            with brevact.backward_quant(StochBackward2bit, min_numel=0):
                weight = layer.quant_weight().value
                weight.backward(weight.detach().sign() + 0.5)
        else:
            weight = layer.quant_weight().value
            weight.backward(weight.detach().sign() + 0.5)
        found.append([p.grad for p in layer.parameters()])
    assert all(equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("value", [0.7, float("nan")])
@pytest.mark.parametrize("name", ["Int8WeightPerTensorFloat", "Int8WeightPerChannelFloat"])
def test_gradients_of_equal_largest_elements_are_those_of_brevitas(name, value):
    """Torch divides that of a maximum among them, or gives it to one of each row."""
    results = []
    for quantize in (False, True):
        model = net(name)
        with torch.no_grad():
            model[0].weight[:, 0, 0, :2] = value
            model[0].weight[:, 1, 0, 0] = -value
        if quantize:
            brevact.quantize_backward(model, LosslessBackward, min_numel=0)
        results.append(gradients(model, activation()))
    (out, grad, grads), (found, found_grad, found_grads) = results
    assert torch.equal(out.nan_to_num(7.7), found.nan_to_num(7.7))
    assert torch.equal(grad.nan_to_num(7.7), found_grad.nan_to_num(7.7))
    assert all(torch.equal(found_grads[key].nan_to_num(7.7), grads[key].nan_to_num(7.7)) for key in grads)


def test_statistics_of_the_weights_of_several_gates_save_no_copies_of_them():
    model = qnn.QuantLSTM(32, 32, batch_first=True)
    brevact.quantize_backward(model, LosslessBackward, min_numel=0)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        model(torch.randn(2, 1, 32))
    weights = {x.untyped_storage().data_ptr() for x in model.parameters()}
    others = {x.untyped_storage().data_ptr(): x.nbytes for x in saved}
    assert (
        sum(nbytes for address, nbytes in others.items() if address not in weights) < 4 * 4 * 32 * 32
    )  # of four gates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_quant", [Int8WeightPerTensorFloat, Int8WeightPerChannelFloat])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-11, 1e-10, float("nan"), float("inf"), 3.0])
def test_scales_of_weights_at_the_bound_of_magnitudes_are_those_of_brevitas(weight_quant, value, dtype):
    results = []
    for quantize in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(qnn.QuantConv2d(3, 8, 3, weight_quant=weight_quant, bias=False)).to(dtype)
        with torch.no_grad():
            rows = slice(0, 2) if weight_quant is Int8WeightPerChannelFloat else slice(None)
            model[0].weight[rows] = value
        if quantize:
            brevact.quantize_backward(model, LosslessBackward, min_numel=0)
        x = torch.randn(2, 3, 6, 6).to(dtype).requires_grad_()
        out = model(x)
        grads = torch.autograd.grad(out, (x, model[0].weight), torch.randn(out.shape).to(dtype))
        results.append((out.detach(), *grads))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(7.7), other.nan_to_num(7.7))
