"""Convolutions: formulas on decoded tensors, and saved weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact import StochBackward2bit
from brevact.autograd import region
from brevact.quantizers import Rounding
from tests.autograd import ops
from tests.autograd.measuring import EXACT_VALUES, NEAREST, decoded, layer_gradients, run_op, settings, watch_saved

aten = torch.ops.aten


def test_conv_backward_is_the_formula_on_the_decoded_input():
    chosen = settings(bit_width=2, rounding=Rounding.NEAREST)
    x, conv = torch.randn(3, 4, 12, 12), nn.Conv2d(4, 6, 3, padding=1)
    op = ops.Op("conv", lambda: conv)
    _, grads = run_op(op, conv, x, chosen)
    _, exact = run_op(op, conv, x, None)
    _, on_decoded = run_op(op, conv, decoded(x, chosen), None)
    torch.testing.assert_close(grads[0], exact[0], rtol=0, atol=0)
    torch.testing.assert_close(grads[1], on_decoded[1])
    torch.testing.assert_close(grads[2], exact[2])
    assert not torch.allclose(grads[1], exact[1], rtol=1e-3)


@pytest.mark.parametrize(("make", "positions"), [(nn.Conv2d, 10 * 10), (nn.ConvTranspose2d, 14 * 14)])
def test_only_the_bias_trains(make, positions):
    layer = make(4, 4, 3)
    layer.weight.requires_grad_(False)
    with watch_saved() as saved, region(settings()):
        out = layer(torch.randn(3, 4, 12, 12))
    assert saved.tensors == []
    out.sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((4,), 3.0 * positions))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolutions_run_in_torchs_dtypes_under_autocast(dims):
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1](4, 6, 3, stride=2)
    layer.forward = torch.autocast("cpu", torch.bfloat16)(layer.forward)
    x = torch.randn(3, 4, *(7,) * dims)
    op = ops.Op("conv_transpose", lambda: layer)
    expected_out, expected = run_op(op, layer, x, None)
    out, grads = run_op(op, layer, x, EXACT_VALUES)
    assert [grad.dtype for grad in grads] == [torch.float32] * 3
    assert out.dtype is torch.bfloat16 and torch.equal(out, expected_out)
    eps = torch.finfo(torch.bfloat16).eps
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=4 * eps, atol=4 * eps * reference.abs().max().item())


def test_generators_that_begin_with_a_transposed_convolution_pack():
    model = nn.Sequential(nn.ConvTranspose2d(64, 64, 4), nn.BatchNorm2d(64), nn.ReLU(), nn.ConvTranspose2d(64, 8, 4, 2))
    brevact.quantize_backward(model, StochBackward2bit)
    report = {row.layer: row for row in brevact.memory_report(model, torch.randn(4, 64, 1, 1)).rows}
    assert report["1"].plain_bytes > 8 * report["1"].saved_bytes
    assert "3" not in report  # its input derives from the norm's codes, and its plain bytes count with ReLU's


@pytest.mark.parametrize("computed", [False, True])
def test_weights_of_the_sizes_of_the_input_are_not_packed(computed):
    layer, x, grad_out = nn.Conv2d(4, 4, 3, bias=False), torch.randn(4, 4, 3, 3), torch.randn(4, 4, 1, 1)
    if computed:  # as a fake-quantized weight is
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())
    grad_input, _ = layer_gradients(layer, x, NEAREST, grad_out)
    geometry = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    expected = aten.convolution_backward(grad_out, x, layer.weight, None, *geometry, [True, False, False])
    assert torch.equal(grad_input, expected[0])


def test_weights_that_are_activations_are_not_packed():
    """Such as in the correlation of two feature maps."""
    x, y = (torch.randn(4, 4, 3, 3, requires_grad=True) for _ in range(2))
    grad_out = torch.randn(4, 4, 3, 3)
    with region(settings()):
        out = F.conv2d(x * 1, y * 1, padding=1)
    (found,) = torch.autograd.grad(out, x, grad_out)
    assert torch.equal(found, torch.autograd.grad(F.conv2d(x, y, padding=1), x, grad_out)[0])


def test_an_input_that_is_its_own_weight_is_kept_for_both():
    x, grad_out = torch.randn(4, 4, 3, 3, requires_grad=True), torch.randn(4, 4, 3, 3)
    with region(NEAREST):
        y = x * 1
        out = F.conv2d(y, y, padding=1)
    geometry = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    by_input = aten.convolution_backward(grad_out, x, x, None, *geometry, [True, False, False])[0]
    decoded = NEAREST.quantizer.quantize(x).dequantize()
    by_weight = aten.convolution_backward(grad_out, decoded, x, None, *geometry, [False, True, False])[1]
    assert torch.equal(torch.autograd.grad(out, x, grad_out)[0], by_input + by_weight)


@pytest.mark.parametrize("number", [np.int64(2), torch.tensor(2), (np.int64(2), 1)])
def test_numbers_may_be_numpy_integers_and_tensors(number):
    x, trained = torch.randn(2, 4, 9, 9, requires_grad=True), torch.randn(6, 4, 2, 2, requires_grad=True)
    frozen = torch.randn(4, 6, 3, 3)  # for which a Function of ours runs
    found = []
    for chosen in (None, EXACT_VALUES):
        with region(chosen):
            y = x.sin()
            out = F.conv2d(y, trained, None, number, number, number).sin().sum()
            out = out + F.conv_transpose2d(y, frozen, None, number, number).cos().sum()
        found.append(torch.autograd.grad(out, (x, trained)))
    torch.testing.assert_close(found[1], found[0])


def test_a_small_view_of_a_parameter_as_input_is_kept_as_it_is():
    model = Rows()
    report = brevact.memory_report(model, torch.randn(2, 2))
    assert report.saved_bytes == 0


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Parameter(torch.randn(100, 3, 8, 8)), nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.rows[3:5]).sum() + x.sum()
