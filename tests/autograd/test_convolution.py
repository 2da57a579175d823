"""Convolutions: formulas on what is stored, and what is kept of weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact import StochBackward2bit
from brevact.autograd import region
from brevact.autograd.ops import convolution
from brevact.autograd.settings import BackwardSettings
from brevact.quantizers import Rounding, UniformQuantizer
from tests.autograd import ops
from tests.autograd.measuring import EXACT_VALUES, NEAREST, decoded, layer_gradients, run_op, settings, watch_saved

aten = torch.ops.aten

#: With scales of float32 levels are even in buckets of little but padding, too.
INTEGERS = BackwardSettings(
    UniformQuantizer(bit_width=8, rounding=Rounding.NEAREST, bucket_size=64, scale_dtype=torch.float32), min_numel=0
)


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


@pytest.mark.parametrize("channels", [(2, 2), (1, 17)])  # of the second, one side is more than a block
@pytest.mark.parametrize("make", [nn.Conv3d, nn.ConvTranspose3d])
def test_gradients_of_few_channels_are_those_of_all_samples_at_once(make, channels):
    """Eight bits hold integers up to 255 where each bucket has 0 and 255, and sums of few of them have no rounding."""
    layer = make(*channels, 3)
    x = torch.randint(0, 256, (2, channels[0], 64, 64, 64)).float()
    x[..., 0], x[..., 1] = 0.0, 255.0
    with torch.no_grad():
        layer.weight.copy_(torch.randint_like(layer.weight, -3, 4))
    found = []
    for chosen in (INTEGERS, None):
        layer.zero_grad()
        input = x.clone().requires_grad_()
        with region(chosen):
            out = layer(input)
        grad = torch.zeros_like(out)
        grad.view(-1)[::999] = 1.0
        out.backward(grad)
        found.append([input.grad, layer.weight.grad, layer.bias.grad])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert got.stride() == expected.stride()


#: Layers of few channels with the sizes of an input that is large, once padded to sixteen channels.
FEW_CHANNELS = {
    "3-D": (lambda: nn.Conv3d(2, 2, 3, padding=1), (1, 2, 72, 96, 96)),
    "3-D, of channels in groups": (lambda: nn.Conv3d(4, 2, 3, padding=1, groups=2), (1, 4, 96, 96, 64)),
    "2-D, samples": (lambda: nn.Conv2d(3, 2, 3, padding=1), (3, 3, 640, 512)),
    "2-D, no padding": (lambda: nn.Conv2d(2, 3, (5, 1)), (1, 2, 1031, 512)),
    "2-D, more padding than a kernel reads": (lambda: nn.Conv2d(2, 3, 3, padding=150), (1, 2, 520, 800)),
    "2-D, dilated": (lambda: nn.Conv2d(2, 3, (3, 2), padding=(9, 1), dilation=(7, 2)), (1, 2, 1030, 512)),
    "2-D, columns with a stride": (lambda: nn.Conv2d(2, 3, 3, stride=(1, 2), padding=1), (1, 2, 1025, 513)),
    "2-D, rows with a stride": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 2, 513, 1025)),
    "2-D, same padding of an even kernel": (lambda: nn.Conv2d(2, 3, 4, padding="same"), (1, 2, 1025, 513)),
    "2-D, one row": (lambda: nn.Conv2d(2, 3, 1), (1, 2, 1, 600_001)),
    "1-D": (lambda: nn.Conv1d(2, 2, 9, padding=4, bias=False), (1, 2, 700_001)),
}


def check_gradients_of_integers(layer: nn.Module, shape: tuple[int, ...], order: torch.memory_format) -> None:
    """Eight bits hold integers from 0 to 255 where each bucket has both, and sums of few of them have no rounding."""
    x = torch.randint(0, 256, shape).float().contiguous(memory_format=order)
    for i, value in enumerate((0.0, 255.0)):
        x.as_strided((x.numel(),), (1,))[i::32] = value
    with torch.no_grad():
        layer.weight.copy_(torch.randint_like(layer.weight, -3, 4))
    found = []
    for chosen in (INTEGERS, None):
        layer.zero_grad()
        input = x.clone(memory_format=torch.preserve_format).requires_grad_()
        with region(chosen):
            out = layer(input)
        grad = torch.zeros_like(out)
        grad.as_strided((grad.numel(),), (1,))[::97] = 1.0  # sums are integers below 2**24
        out.backward(grad)
        found.append([input.grad, *(parameter.grad for parameter in layer.parameters())])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert got is expected is None or got.stride() == expected.stride()


@pytest.mark.parametrize("order", [torch.contiguous_format, "channels_last"])
@pytest.mark.parametrize("case", FEW_CHANNELS)
def test_gradients_of_few_channels_are_those_of_all_rows_at_once(case, order):
    make, shape = FEW_CHANNELS[case]
    layer = make()
    if order == "channels_last":
        order = {5: torch.channels_last_3d, 4: torch.channels_last}.get(len(shape), torch.contiguous_format)
    check_gradients_of_integers(layer, shape, order)


def test_dilated_layers_in_groups_are_computed_of_all_rows_at_once(monkeypatch):
    """Of some rows, oneDNN's gradient of such a bfloat16 weight is NaN, or the process ends by a segmentation fault."""
    layer = nn.Conv2d(2, 2, 3, padding=2, dilation=2, groups=2).to(torch.bfloat16)
    x = torch.randn(2, 2, 600, 512, dtype=torch.bfloat16, requires_grad=True)
    rows, original = set(), convolution._convolution_backward

    def watch(grad: Tensor, *args: object) -> object:
        rows.add(grad.shape[2])
        return original(grad, *args)

    monkeypatch.setattr(convolution, "_convolution_backward", watch)
    monkeypatch.setattr(convolution, "_PADDED_OF_PART", 1 << 20)
    with region(settings(bit_width=2)):
        out = layer(x)
    out.backward(torch.ones_like(out))
    assert rows == {600}


@pytest.mark.parametrize("trained", [("weight",), ("bias",), (), ("weight", "bias")])
@pytest.mark.parametrize("case", ["2-D, samples", "2-D, rows with a stride", "3-D"])
def test_layers_of_few_channels_train_in_part(case, trained):
    make, shape = FEW_CHANNELS[case]
    layer = make()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in trained)
    check_gradients_of_integers(layer, shape, torch.contiguous_format)


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
    assert "3" not in report  # its input derives from what the norm stores, and its plain bytes count with ReLU's


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
    """As in the correlation of two feature maps."""
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


def test_a_small_view_of_a_parameter_as_input_is_kept_as_it_is():
    model = Rows()
    report = brevact.memory_report(model, torch.randn(2, 2))
    assert report.saved_bytes == 0


class Rows(nn.Module):
    """A convolution of rows of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Parameter(torch.randn(100, 3, 8, 8)), nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.rows[3:5]).sum() + x.sum()
