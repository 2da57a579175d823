"""ReLU, leaky and randomized ones, and PReLU, beyond the laws of all ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact import LosslessBackward
from brevact.autograd import region
from tests.autograd import ops
from tests.autograd.measuring import SPECIAL, assert_as_torch, run_function, run_op, settings, watch_saved


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


@pytest.mark.parametrize("function", [F.leaky_relu_, lambda x: F.leaky_relu(x, 0.3, True), F.relu_, F.relu])
def test_lossless_rectifiers_take_what_is_not_a_number_as_torch_does(function):
    x = SPECIAL.repeat(64)
    expected, grads = (run_function(function, x, chosen)[1] for chosen in (None, LosslessBackward.backward_settings))
    assert torch.equal(expected[0], grads[0])


def test_relu_passes_the_gradient_of_nan_as_torch_does():
    x = torch.tensor([float("nan"), -1.0, 2.0, 0.0, float("inf")])
    op = ops.Op("relu", nn.ReLU)
    assert torch.equal(run_op(op, nn.ReLU(), x, settings())[1][0], run_op(op, nn.ReLU(), x, None)[1][0])
