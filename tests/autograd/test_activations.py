"""Activation functions and dropout: what the laws over all ops do not ask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact import LosslessBackward
from brevact.autograd import SaveMode, region
from tests.autograd.measuring import (
    assert_graph_is_kept_and_refuses_a_second_derivative,
    settings,
    watch_saved,
)

EXACT_VALUES = settings(bit_width=32)


def run(function, x, chosen, parameters=()):
    """Output and gradients of a weighted sum of function(x)."""
    leaf = x.clone().requires_grad_()
    torch.manual_seed(0)
    with region(chosen):
        out = function(leaf.clone())
    weights = torch.arange(1.0, out.numel() + 1).sin().view(out.shape).to(out.dtype)
    return out.detach(), torch.autograd.grad((out * weights).sum(), [leaf, *parameters])


def assert_as_torch(function, x: Tensor, parameters=(), bit_width: int = 32) -> None:
    expected_out, expected = run(function, x, None, parameters)
    out, grads = run(function, x, settings(bit_width=bit_width), parameters)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=0, equal_nan=True)
    assert out.stride() == expected_out.stride()
    eps = 16 * torch.finfo(x.dtype).eps  # some roundings
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=eps, atol=eps, equal_nan=True)


SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 0.5, -0.5, 2.0, -3.0])


@pytest.mark.parametrize(
    "function",
    [torch.abs, F.softshrink, F.hardshrink, lambda x: x.hardshrink(0.0), lambda x: abs(x), F.rrelu, torch.nan_to_num],
)
def test_masks_of_special_numbers_are_torchs_own(function):
    assert_as_torch(function, SPECIAL, bit_width=1)


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
    expected_out, _ = run(lambda x: F.rrelu(x, training=True), x, None)
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
    """Of a gradient that is infinite or NaN, dropped elements included, and the signs of zeros."""
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


@pytest.mark.parametrize("drop", [F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d])
@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_wrong_probabilities_get_torchs_own_error(drop, p):
    with pytest.raises(ValueError, match="dropout probability"), region(settings()):
        drop(torch.randn(3, 4, 5, requires_grad=True) * 1, p, True)


def test_channel_dropout_stores_a_bit_a_channel():
    x = torch.randn(16, 32, 9, 9, requires_grad=True)
    for drop in (F.dropout2d, lambda x: F.feature_alpha_dropout(x, training=True)):
        with watch_saved() as saved, region(settings()):
            drop(x * 1)
        assert saved.nbytes == 16 * 32 // 8


def test_dropout_in_half_precision_scales_as_torch_does():
    for dtype in (torch.float16, torch.bfloat16):
        assert_as_torch(lambda x: F.alpha_dropout(x, 0.3, True), torch.randn(40, 30).to(dtype))
        assert_as_torch(lambda x: F.dropout1d(x, 0.3, True), torch.randn(40, 30, 2).to(dtype))


@pytest.mark.parametrize(
    "function", [F.leaky_relu_, lambda x: F.leaky_relu(x, 0.3, True), lambda x: F.rrelu_(x, 0.1, 0.3), F.relu_, F.relu]
)
def test_lossless_rectifiers_take_what_is_not_a_number_as_torch_does(function):
    x = SPECIAL.repeat(64)
    expected, grads = (run(function, x, chosen)[1] for chosen in (None, LosslessBackward.backward_settings))
    assert torch.equal(expected[0], grads[0])


def test_hardsigmoid_gradients_of_float64_are_torchs_to_the_last_bit():
    x = torch.randn(40, 30, dtype=torch.float64)
    expected, grads = (run(F.hardsigmoid, x, chosen)[1] for chosen in (None, settings(bit_width=32)))
    assert torch.equal(expected[0], grads[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("drop", [F.dropout, F.dropout1d, F.alpha_dropout, F.feature_alpha_dropout])
def test_dropout_gradients_are_torchs_to_the_last_bit(drop, dtype):
    x = torch.randn(40, 30, 2).to(dtype)
    for p in (0.1, 0.3, 0.429, 0.7):  # whose factors are between two numbers of the dtype
        for inplace in (False, True):
            expected, grads = (
                run(lambda x, p=p, inplace=inplace: drop(x, p, True, inplace), x, chosen)[1]
                for chosen in (None, settings(bit_width=32))
            )
            assert torch.equal(expected[0], grads[0])


@pytest.mark.parametrize(
    "function",
    [nn.GLU(), nn.PReLU(), torch.abs, nn.Softsign(), lambda x: F.rrelu(x, training=True), nn.AlphaDropout(0.2)],
)
@pytest.mark.parametrize("mode", SaveMode)
def test_graphs_are_kept_and_refuse_a_second_derivative(function, mode):
    assert_graph_is_kept_and_refuses_a_second_derivative(function, torch.randn(8, 6, requires_grad=True), mode)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.prelu(x, torch.ones(5)),
        lambda x: F.prelu(x, torch.ones(1, dtype=torch.float64)),
        lambda x: F.glu(x, 1),
        lambda x: F.glu(x, 4),
        lambda x: F.rrelu(x, 0.5, 0.1, training=True),
        lambda x: F.softshrink(x, -1.0),
        lambda x: F.softsign(x, 3),
    ],
)
def test_wrong_arguments_get_torchs_own_error(call):
    x = torch.randn(4, 3, 6, requires_grad=True)
    with pytest.raises(Exception) as expected:
        call(x)
    with pytest.raises(type(expected.value)) as raised, region(settings()):
        call(x)
    assert str(raised.value).split("\n")[0] == str(expected.value).split("\n")[0]


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


@pytest.mark.parametrize("function", [torch.sigmoid, Tensor.sigmoid, torch.tanh])
def test_bounded_functions_of_small_tensors_are_torchs_own(function):
    """Too small to pack: the output is kept, whose changes are refused, and second derivatives are there."""
    x, chosen = torch.randn(4, 8, requires_grad=True), settings(bit_width=4, min_numel=64)
    with watch_saved() as saved, region(chosen):
        watched = function(x * 1)
    assert any(kept.data_ptr() == watched.data_ptr() for kept in saved.tensors)
    with region(chosen):
        out = function(x * 1)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert torch.equal(grad, torch.autograd.grad(function(x).sum(), x)[0])
    assert grad.requires_grad
    out.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x)


@pytest.mark.parametrize("min_numel", [0, 64])
def test_a_sigmoid_does_not_lose_where_its_result_is_to_go(min_numel):
    x = torch.randn(4, 8, requires_grad=True)
    with (
        region(settings(bit_width=4, min_numel=min_numel)),
        pytest.raises(RuntimeError, match="automatic differentiation"),
    ):
        torch.sigmoid(x * 1, out=torch.zeros(4, 8))


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh])
def test_bounded_functions_of_small_parts_of_what_is_packed_store_nothing(function):
    norm, x = nn.BatchNorm2d(16), torch.randn(4, 16, 8, 8, requires_grad=True)
    kept = []
    for reads in (False, True):
        with watch_saved() as saved, region(settings(bit_width=4, min_numel=1024)):
            parts = norm(x * 1).chunk(16, 1)
            torch.cat([function(part) if reads else part for part in parts], 1).sum().backward()
        kept.append(sum({each.untyped_storage().data_ptr(): each.nbytes for each in saved.tensors}.values()))
    assert kept[1] <= kept[0] + norm.bias.nbytes
