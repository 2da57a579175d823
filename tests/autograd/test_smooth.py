"""Smooth activation functions, beyond the laws of all ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import brevact
from brevact import DitherBackward4bit
from brevact.autograd import BackwardSettings, region
from brevact.quantizers import Rounding, UniformQuantizer
from tests.autograd import ops
from tests.autograd.database_laws import Outcome, bias_of
from tests.autograd.measuring import decoded, run_op, settings, watch_saved


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


@pytest.mark.parametrize(
    "spread, rows, casts",
    [*((each, 64, False) for each in (1.0, 3.5, 11.7, 30.0)), (11.7, 64, True), (11.7, 2304, False)],
)
@pytest.mark.parametrize(
    "function",
    [
        *(torch.sigmoid, torch.tanh, Tensor.sigmoid_, nn.functional.glu),
        *(nn.functional.gelu, nn.functional.silu, nn.functional.mish, nn.functional.softplus, nn.functional.elu),
    ],
)
def test_saturated_functions_are_biased_by_less_than_2_percent(function, spread, rows, casts):
    x = torch.randn(rows, 128) * spread
    chosen = BackwardSettings(brevact.quantizer(DitherBackward4bit))

    def gradients(seed: int, chosen: BackwardSettings | None = chosen) -> Outcome:
        leaf = x.clone().requires_grad_()
        torch.manual_seed(seed)
        with region(chosen), torch.autocast("cpu", enabled=casts):
            out = function(leaf * 1)
        out.sum().backward()
        return Outcome([], [leaf.grad], 1.0)

    assert bias_of(gradients, gradients(0, None), [None]) < 0.02


def test_sums_over_saturated_sigmoids_are_unbiased():
    """The last bias of a network whose Dice loss is small: derivatives near 1 were off by the scale's error, alike."""
    x = torch.randn(2048, 10) * 20
    expected = torch.ops.aten.sigmoid_backward(torch.ones_like(x), x.sigmoid()).sum(0)
    draws = []
    for seed in range(64):
        torch.manual_seed(seed)
        bias = torch.zeros(10, requires_grad=True)
        with region(BackwardSettings(brevact.quantizer(DitherBackward4bit))):
            out = torch.sigmoid(x + bias)
        draws += torch.autograd.grad(out.sum(), bias)
    grads = torch.stack(draws)
    assert grads.std(0).min() > 0
    assert ((grads.mean(0) - expected).abs() <= 5 * grads.std(0) / len(draws) ** 0.5).all()


@pytest.mark.parametrize("square", [lambda p: p * p, lambda p: p**2, torch.square])
def test_a_squared_dice_loss_of_sure_sigmoids_has_little_noise_and_no_bias(square):
    """Its gradient is of the size of 1 - p; a step of p was the noise, three times the gradient."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(256, 64, generator=generator) < 0.2).float()
    x = (2 * mask - 1) * 6 + torch.randn(256, 64, generator=generator)

    def gradient(seed: int, chosen: BackwardSettings | None) -> Tensor:
        torch.manual_seed(seed)
        leaf = x.clone().requires_grad_()
        with region(chosen):
            p = torch.sigmoid(leaf * 1)
            loss = 1 - 2 * (p * mask).sum() / (square(p).sum() + mask.sum())
        return torch.autograd.grad(loss, leaf)[0]

    expected, chosen = gradient(0, None), BackwardSettings(brevact.quantizer(DitherBackward4bit))
    errors = torch.stack([gradient(seed, chosen) for seed in range(32)]) - expected
    assert errors.norm(dim=(1, 2)).mean() < 0.5 * expected.norm()
    sums = errors.sum((1, 2)).double()
    assert sums.mean().abs() <= 5 * sums.std() / 32**0.5


def test_smooth_backward_is_the_decoded_derivative_times_the_gradient():
    chosen = settings(bit_width=3, rounding=Rounding.NEAREST)
    x = torch.randn(5, 300)
    _, (grad,) = run_op(ops.Op("silu", nn.SiLU), nn.SiLU(), x, chosen)
    slope = torch.ops.aten.silu_backward(torch.ones_like(x), x)
    weights = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).sin().view(x.shape).float()
    torch.testing.assert_close(grad, decoded(slope, chosen) * weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    "scaled",
    [
        lambda x, s, weight: x * torch.exp(s / 4),
        lambda x, s, weight: x / torch.exp(weight),
        lambda x, s, weight: torch.div(x, weight + 2),
        lambda x, s, weight: x * torch.exp(weight),
        lambda x, s, weight: weight.exp().mul(x),
    ],
)
def test_squares_of_products_are_unbiased(scaled):
    """A Gaussian's log-likelihood: factors are multiplied by their product, whose errors must not be theirs."""
    x = torch.randn(2, 128, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = nn.Parameter(torch.zeros(32))

    def gradient(chosen) -> Tensor:
        with region(chosen):
            z = scaled(x[0] - 1, x[1], weight)
            loss = (z * z / 2).sum()
        found = torch.autograd.grad(loss, (x, weight), materialize_grads=True)
        return torch.cat([found[0][1].flatten(), found[1]]).double()

    want = gradient(None)
    torch.manual_seed(0)
    along = torch.stack([gradient(settings(bit_width=3, derive_min_bits=3)) @ want for _ in range(64)])
    assert abs(along.mean() - want @ want) < 5 * along.std() / 64**0.5


def test_the_largest_half_precision_decodes_to_finite_numbers():
    """Stretched by 50 they exceed the range, to whose end they are clamped; then they are rounded by 16 at most."""
    x = torch.tensor([65504.0, 65472, 65400, -65504]).half()
    assert UniformQuantizer(bucket_size=1).for_smooth.quantize(x).dequantize().sub(x).abs().max() <= 50 + 16


@pytest.mark.parametrize("function", [nn.functional.gelu, nn.functional.softplus])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_of_smooth_functions_decode_in_the_kernel(function, dtype):
    """Both read the tensor that the quantizer for smooth functions packs; so does the next layer."""
    x, chosen = torch.randn(70, 1000).to(dtype) * 5, settings(bit_width=4, rounding=Rounding.NEAREST)
    leaf, weight = x.clone().requires_grad_(), torch.randn(3, 1000).to(dtype).requires_grad_()
    with watch_saved() as saved, region(chosen):
        nn.functional.linear(function(leaf * 1), weight).sum().backward()
    packed = chosen.quantizer.for_smooth.quantize(x)
    assert [each.numel() for each in saved.tensors if each.dtype is torch.uint8] == [packed.nbytes] * 2
    same = packed.dequantize().requires_grad_()
    out = function(same)
    out.backward(weight.detach().sum(0).expand_as(x))
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(leaf.grad, same.grad, rtol=2 * step, atol=2 * step)
    torch.testing.assert_close(weight.grad[0].double(), out.detach().double().sum(0), rtol=step, atol=70 * step * 20)
