"""Dropout: torch's numbers, its factors, and a bit for each that is stored."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from brevact import LosslessBackward
from brevact.autograd import region
from tests.autograd.measuring import assert_as_torch, run_function, settings


@pytest.mark.parametrize("name", ["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"])
@pytest.mark.parametrize("suffix", ["", "_"])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("train", [False, True])
def test_dropout_in_torch_draws_torchs_numbers(name, suffix, p, train):
    drop = getattr(torch, name + suffix)
    x = torch.randn(8, 6, 5)
    assert_as_torch(lambda x: drop(drop(x, p, train), p, train), x, bit_width=1 if p < 1 else 32)


@pytest.mark.parametrize("drop", [F.dropout, F.alpha_dropout, F.dropout1d])
def test_lossless_dropout_gives_what_is_not_a_number_where_torch_does(drop):
    """For infinite and NaN gradients, of dropped elements, too; and the signs of zeros."""
    x, grad = torch.randn(64, 32, 2, requires_grad=True), torch.randn(64, 32, 2)
    grad[::3], grad[1::3] = float("inf"), float("nan")
    found = []
    for policy in (LosslessBackward.let(min_numel=0), None):
        torch.manual_seed(0)
        with region(None if policy is None else policy.backward_settings):
            out = drop(x * 1, 0.5, True)
        found += torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(*(each.nan_to_num().signbit() for each in found))


@pytest.mark.filterwarnings("ignore:dropout")
@pytest.mark.parametrize("drop", [F.dropout1d, F.dropout2d, F.dropout3d])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dims", [2, 3, 4, 5])
def test_channel_dropout_takes_the_inputs_that_torch_takes(drop, inplace, dims):
    x = torch.randn((6, 5, 4, 3, 2)[:dims])
    if drop is F.dropout1d and dims > 3:
        with pytest.raises(RuntimeError, match="dropout1d: Expected 2D or 3D input"), region(settings()):
            drop(x.requires_grad_() * 1)
        return
    assert_as_torch(lambda x: drop(x, 0.4, inplace=inplace), x)


def test_dropout_in_half_precision_scales_as_torch_does():
    for dtype in (torch.float16, torch.bfloat16):
        assert_as_torch(lambda x: F.alpha_dropout(x, 0.3, True), torch.randn(40, 30).to(dtype))
        assert_as_torch(lambda x: F.dropout1d(x, 0.3, True), torch.randn(40, 30, 2).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("drop", [F.dropout, F.dropout1d, F.alpha_dropout, F.feature_alpha_dropout])
def test_dropout_gradients_are_torchs_to_the_last_bit(drop, dtype):
    x = torch.randn(40, 30, 2).to(dtype)
    for p in (0.1, 0.3, 0.429, 0.7):  # whose factors are between two numbers of the dtype
        for inplace in (False, True):
            expected, grads = (
                run_function(lambda x, p=p, inplace=inplace: drop(x, p, True, inplace), x, chosen)[1]
                for chosen in (None, settings(bit_width=32))
            )
            assert torch.equal(expected[0], grads[0])
