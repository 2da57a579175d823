"""Losses of pairs of elements: one packed derivative, or a sign, in the place of input and target."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd import BackwardSettings, region
from tests.autograd.measuring import EXACT_VALUES, settings, watch_saved

OF_DIFFERENCES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda x, t, **options: F.smooth_l1_loss(x, t, beta=0.3, **options),
    "huber": lambda x, t, **options: F.huber_loss(x, t, delta=0.3, **options),
}
OTHERS = {
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "bce_with_logits weighted": lambda x, t, **options: F.binary_cross_entropy_with_logits(
        x, t, torch.linspace(0, 2, 9).to(x), pos_weight=torch.linspace(1, 9, 9).to(x), **options
    ),
    "soft_margin": lambda x, t, **options: F.soft_margin_loss(x, 2 * t - 1, **options),
    "kl_div": F.kl_div,
    "kl_div log_target": lambda x, t, **options: F.kl_div(x, t, log_target=True, **options),
    "bce": lambda x, t, **options: F.binary_cross_entropy(x.sigmoid(), t, **options),
}


def gradients(function: Callable[..., Tensor], tensors: tuple[Tensor, ...], chosen: BackwardSettings | None):
    inner = [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]
    torch.manual_seed(0)
    with region(chosen), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes that broadcast
        out = function(*(x * 1 if x.requires_grad else x for x in inner))
    weights = torch.arange(1.0, out.numel() + 1).sin().view(out.shape).to(out.dtype)
    return out.detach(), torch.autograd.grad((out * weights).sum(), [x for x in inner if x.requires_grad])


def assert_as_torch(function: Callable[..., Tensor], *tensors: Tensor) -> None:
    expected_out, expected = gradients(function, tensors, None)
    out, grads = gradients(function, tensors, EXACT_VALUES)
    assert out.dtype == expected_out.dtype and torch.equal(out.nan_to_num(), expected_out.nan_to_num())
    for grad, reference in zip(grads, expected, strict=True):
        assert grad.dtype == reference.dtype and grad.shape == reference.shape
        eps = 32 * torch.finfo(grad.dtype).eps  # some roundings, relative to the largest entry
        top = reference[reference.isfinite()].abs().max().item()
        torch.testing.assert_close(grad, reference, rtol=eps, atol=eps * top, equal_nan=True)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loss", OF_DIFFERENCES)
def test_both_gradients_are_torchs(loss, dtype, reduction):
    x, t = (torch.randn(6, 9).to(dtype).requires_grad_() for _ in range(2))
    function = OF_DIFFERENCES[loss]
    assert_as_torch(lambda x, t: function(x, t, reduction=reduction), x, t)
    assert_as_torch(lambda x, t: function(x, t, reduction=reduction), x, t.detach())
    assert_as_torch(lambda x, t: function(x, t, reduction=reduction), x.detach(), t)
    assert_as_torch(lambda x, t: function(x, t, reduction=reduction), x, x.detach())  # at the corner


@pytest.mark.parametrize("loss", OF_DIFFERENCES)
def test_sizes_that_broadcast(loss):
    for a, b in (((6, 9), (9,)), ((1, 9), (6, 1)), ((9,), (4, 9))):
        x, t = torch.randn(a, requires_grad=True), torch.randn(b, requires_grad=True)
        assert_as_torch(OF_DIFFERENCES[loss], x, t)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", OTHERS)
def test_the_gradient_is_torchs(loss, dtype, reduction):
    x, t = torch.randn(6, 9).to(dtype).requires_grad_(), torch.rand(6, 9).to(dtype)
    assert_as_torch(lambda x, t: OTHERS[loss](x, t, reduction=reduction), x, t)
    assert_as_torch(lambda x, t: OTHERS[loss](x, t, reduction=reduction), x, t.round())


def test_arguments_of_earlier_versions_are_torchs():
    x, t = torch.randn(6, 9, requires_grad=True), torch.rand(6, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_as_torch(lambda x, t: F.mse_loss(x, t, size_average=False), x, t)
        assert_as_torch(lambda x, t: F.l1_loss(x, t, reduce=False), x, t)


def test_a_target_that_trains_is_torchs_where_its_gradient_is_another():
    x, t = torch.randn(6, 9, requires_grad=True), torch.rand(6, 9, requires_grad=True)
    assert_as_torch(F.binary_cross_entropy_with_logits, x, t)
    assert_as_torch(F.kl_div, x, t)


@pytest.mark.parametrize("loss", [*OF_DIFFERENCES, "bce_with_logits", "kl_div"])
def test_neither_input_nor_target_is_kept(loss):
    function = {**OF_DIFFERENCES, **OTHERS}[loss]
    x, t = torch.randn(64, 64, requires_grad=True) * 1, torch.rand(64, 64)
    with watch_saved() as saved, region(settings()):
        function(x, t, reduction="sum")
    assert saved.nbytes <= 64 * 64 * (2 + 48 / 64) / 8  # codes and, of a bucket of 64, its range; or two masks


def test_autocast_computes_in_its_type():
    x, t = torch.randn(64, 64, requires_grad=True), torch.rand(64, 64)
    for function in (F.mse_loss, F.binary_cross_entropy_with_logits):
        with torch.autocast("cpu", torch.bfloat16):
            assert_as_torch(lambda x, t, function=function: function(x.bfloat16(), t), x, t)


def test_distributions_as_targets_are_packed_once_for_two_losses():
    """The Dice loss of a segmentation reads the same target."""
    x = torch.randn(2, 4, 32, 32, requires_grad=True) * 1
    target = F.one_hot(torch.randint(4, (2, 32, 32)), 4).permute(0, 3, 1, 2).float()
    with watch_saved() as saved, region(settings()):
        p = x.softmax(1)
        ((p * target).sum((2, 3)) / p.sum((2, 3))).mean() + F.cross_entropy(x, target)
    assert not saved.holds(target)
    codes = {y.data_ptr() for y in saved.tensors if y.dtype is torch.uint8}
    # the output of softmax, squares of its errors, the largest class; probabilities of the cross-entropy; the target
    assert len(codes) == 5
