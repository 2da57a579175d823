"""Codes of a forward quantizer's output replace it only until it changes."""

import contextlib

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8WeightPerTensorFloat
from torch import nn

import brevact
from brevact import LosslessBackward
from tests.qat.cases import CHANNELS, activation, activation_layer


def lossless_region():
    return brevact.backward_quant(LosslessBackward, min_numel=0)


def resize(y):
    sizes = y.untyped_storage().nbytes()
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(sizes)
    y.copy_(activation(3))


#: Ways to change a tensor in place, some of which its version counter does not see.
CHANGES = {
    "add_": lambda y: y.add_(0.3),
    "view": lambda y: y.view(-1).mul_(1.3),
    "slice": lambda y: y[:, :3].add_(0.3),
    "setitem": lambda y: y.__setitem__((slice(None), 0), 0.3),
    "alias": lambda y: y.detach().mul_(1.3),
    "out": lambda y: torch.add(y, 1.5, out=y),
    "data": lambda y: y.data.add_(1.0),
    "data_of_a_view": lambda y: y[:, 1:].data.add_(1.0),
    "new_data": lambda y: setattr(y, "data", y * 1.3),
    "numpy": lambda y: y.numpy().__iadd__(1.0),
    "storage": resize,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_outputs_are_not_taken_for_their_codes(change):
    grads = []
    for context in (contextlib.nullcontext, lossless_region):
        layer = activation_layer("uint4", relu=True)
        weight = nn.Parameter(torch.randn(4, CHANNELS, 3, 3, generator=torch.Generator().manual_seed(0)))
        with context():
            y = layer(activation(9)).detach()
            CHANGES[change](y)
            loss = nn.functional.conv2d(y, weight).square().sum()
        grads.append(torch.autograd.grad(loss, weight)[0])
    assert torch.equal(*grads)


def test_a_weight_that_changed_is_not_taken_for_what_its_quantized_form_was_computed_from():
    grads = []
    for context in (contextlib.nullcontext, lossless_region):
        torch.manual_seed(0)
        conv = qnn.QuantConv2d(CHANNELS, 4, 3, weight_quant=Int8WeightPerTensorFloat)
        x = activation(9).requires_grad_()
        with context():
            quantized = conv.quant_weight().value.detach()
            with torch.no_grad():
                conv.weight.mul_(2)
            loss = nn.functional.conv2d(x * 1, quantized).sum()
        grads.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*grads)


def fused(layer):
    return layer.act_quant.fused_activation_quant_proxy


#: Hooks inside a QuantReLU, as (module, hook) of the layer; they see or change tensors there.
HOOKS = {
    "changes_the_relu": lambda layer, seen: fused(layer).activation_impl.register_forward_hook(lambda m, a, y: 1.5 * y),
    "sees_the_relu": lambda layer, seen: fused(layer).activation_impl.register_forward_hook(
        lambda m, a, y: seen.append(y)
    ),
    "changes_the_gradient": lambda layer, seen: fused(layer).activation_impl.register_full_backward_hook(
        lambda m, g, out: (2 * g[0],)
    ),
    "changes_the_input": lambda layer, seen: fused(layer).tensor_quant.register_forward_pre_hook(
        lambda m, a: (1.5 * a[0],)
    ),
    "changes_inside": lambda layer, seen: fused(layer).tensor_quant.int_quant.register_forward_pre_hook(
        lambda m, a: (*a[:3], 1.5 * a[3])
    ),
    "everywhere": lambda layer, seen: nn.modules.module.register_module_forward_hook(
        lambda m, a, y: 1.5 * y if isinstance(m, nn.ReLU) else None
    ),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_inside_a_quant_relu_work_as_in_brevitas(hook):
    results = []
    for context in (contextlib.nullcontext, lossless_region):
        torch.manual_seed(0)
        layer, seen = activation_layer("uint4", relu=True), []
        x = activation(9).requires_grad_()
        handle = HOOKS[hook](layer, seen)
        try:
            with context():
                out = layer(x * 1).square().sum() + sum(y.sum() for y in seen)
        finally:
            handle.remove()
        results.append(torch.autograd.grad(out, (x, *layer.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bit_widths_in_one_storage_are_told_apart():
    """Two quantizers whose widths are views of one tensor."""
    layers = [activation_layer(name) for name in ("int2", "int8")]
    shared = torch.tensor([2.0, 8.0])
    for layer, width in zip(layers, shared, strict=True):
        fused(layer).tensor_quant.msb_clamp_bit_width_impl.bit_width.value = width
    outputs = [layer(activation(9)) for layer in layers]
    with lossless_region():
        assert all(torch.equal(layer(activation(9)), y) for layer, y in zip(layers, outputs, strict=True))
        weight = nn.Parameter(torch.ones(1, CHANNELS, 1, 1))
        for layer, y in zip(layers, outputs, strict=True):
            (grad,) = torch.autograd.grad(nn.functional.conv2d(layer(activation(9)), weight).sum(), weight)
            assert torch.allclose(grad.flatten(), y.sum((0, 2, 3)), rtol=1e-4, atol=1e-3)
