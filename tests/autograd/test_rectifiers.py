"""ReLU, leaky and randomized ones, and PReLU, beyond the laws of all ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact import LosslessBackward
from brevact.autograd import region
from tests.autograd import ops
from tests.autograd.measuring import EXACT_VALUES, SPECIAL, assert_as_torch, run_function, run_op, settings, watch_saved


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (2, 3, 4)])
@pytest.mark.parametrize("channels", [1, 3])
def test_prelu_gradients_are_torchs_own(shape, channels):
    if channels == 3 and len(shape) < 2:
        return
    x, weight = torch.randn(shape), torch.rand(channels, requires_grad=True)
    assert_as_torch(lambda x: F.prelu(x, weight), x, [weight])


def test_prelu_of_special_numbers_is_torchs_own():
    weight = torch.tensor([0.25], requires_grad=True)
    assert_as_torch(lambda x: F.prelu(x, weight.detach()), SPECIAL, bit_width=1)
    assert_as_torch(lambda x: F.prelu(x, weight), SPECIAL[3:], [weight])


def test_prelu_with_a_frozen_weight_stores_one_bit():
    layer, x = nn.PReLU().requires_grad_(False), torch.randn(4096, requires_grad=True)
    with watch_saved() as saved, region(settings()):
        layer(x * 1)
    assert saved.nbytes == 4096 // 8 + layer.weight.untyped_storage().nbytes()


def test_prelu_runs_in_torchs_dtypes_under_autocast():
    layer = nn.PReLU(6)

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    assert_as_torch(function, torch.randn(5, 6, 3), [layer.weight])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rrelu_draws_torchs_slopes(inplace, dtype):
    x = torch.randn(3, 4, 12, 12).to(dtype)
    assert_as_torch(lambda x: F.rrelu(x, 0.1, 0.6, training=True, inplace=inplace), x)


def test_rrelu_slopes_belong_to_their_elements_in_channels_last():
    x = torch.randn(3, 4, 12, 12).to(memory_format=torch.channels_last)
    expected_out, _ = run_function(lambda x: F.rrelu(x, training=True), x, None)
    leaf = x.clone().requires_grad_()
    torch.manual_seed(0)
    with region(EXACT_VALUES):
        out = F.rrelu(leaf.clone(), training=True)
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(out, expected_out)
    torch.testing.assert_close(out, grad * x)


def test_rrelu_gradients_are_unbiased():
    # Each row is a draw of the noise; the slopes are those of one row, seen by linearity of the gradient in them.
    x = torch.randn(500, 64, requires_grad=True)
    torch.manual_seed(0)
    with region(settings(bit_width=2)):
        out = F.rrelu(x * 1, training=True)
    error = torch.autograd.grad(out.sum(), x)[0] - (out / x).detach()
    assert error.abs().max() > 0.01
    assert (error.mean(0).abs() <= 5 * error.std(0) / len(x) ** 0.5 + 1e-3).all()  # and 16-bit metadata


@pytest.mark.parametrize(
    "function", [F.leaky_relu_, lambda x: F.leaky_relu(x, 0.3, True), lambda x: F.rrelu_(x, 0.1, 0.3), F.relu_, F.relu]
)
def test_lossless_rectifiers_take_what_is_not_a_number_as_torch_does(function):
    x = SPECIAL.repeat(64)
    expected, grads = (run_function(function, x, chosen)[1] for chosen in (None, LosslessBackward.backward_settings))
    assert torch.equal(expected[0], grads[0])


def test_relu_passes_the_gradient_of_nan_as_torch_does():
    x = torch.tensor([float("nan"), -1.0, 2.0, 0.0, float("inf")])
    op = ops.Op("relu", nn.ReLU)
    assert torch.equal(run_op(op, nn.ReLU(), x, settings())[1][0], run_op(op, nn.ReLU(), x, None)[1][0])
