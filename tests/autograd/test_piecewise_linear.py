"""Piecewise linear functions: masks of special numbers, and gradients to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from brevact.autograd import region
from tests.autograd.measuring import SPECIAL, assert_as_torch, run_function, settings


@pytest.mark.parametrize("function", [torch.abs, lambda x: abs(x), F.rrelu, torch.nan_to_num])
def test_masks_of_special_numbers_are_torchs_own(function):
    assert_as_torch(function, SPECIAL, bit_width=1)


def test_hardsigmoid_gradients_of_float64_are_torchs_to_the_last_bit():
    x = torch.randn(40, 30, dtype=torch.float64)
    expected, grads = (run_function(F.hardsigmoid, x, chosen)[1] for chosen in (None, settings(bit_width=32)))
    assert torch.equal(expected[0], grads[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_absolute_value_passes_on_gradients_that_are_no_numbers(value):
    x, grad = torch.tensor([float("nan"), 0.0, 2.0, -3.0]), torch.full((4,), value)
    grads = []
    for chosen in (None, settings()):
        leaf = x.clone().requires_grad_()
        with region(chosen):
            out = (leaf * 1).abs()
        grads += torch.autograd.grad(out, leaf, grad)
    torch.testing.assert_close(grads[1], grads[0], equal_nan=True)
