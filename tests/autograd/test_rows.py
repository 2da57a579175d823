"""Norms that are written out: rows of other scales do not add their noise to each other's gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from brevact.autograd import region
from brevact.quantizers import Layout, PackedActivation, PackedSpec, Rounding
from tests.autograd.measuring import settings, watch_saved

SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "pow": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "square": lambda x: torch.rsqrt(torch.square(x).mean(-1, keepdim=True) + 1e-6) * x,
    "operator": lambda x: x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-6),
    "reciprocal": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt().reciprocal(),
    "product with itself": lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    "quotient": lambda x: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "div": lambda x: torch.div(x, (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()),
}
#: Norms that subtract the mean, or do not divide by the mean of squares: the denominator packs its own tensor.
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "variance": lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-6).sqrt(),
    "deviation": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
    "length": lambda x: x.shape[-1] ** 0.5 * x / x.norm(dim=-1, keepdim=True),
}


def rows_of_many_scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of whose deviations neighbours differ by four orders of magnitude."""
    scale = 10.0 ** (torch.arange(shape[0] * ((len(shape) > 2 and shape[1]) or 1)) % 5 - 2.0)
    x = torch.randn(*shape) * scale.view(*shape[:-1], 1)
    return x.to(dtype)


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, chosen, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaf = x.clone().requires_grad_()
    with watch_saved() as saved, region(chosen):
        out = function(leaf * 1)
    return torch.autograd.grad(out, leaf, grad)[0], saved.tensors


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_have_an_error_of_their_own_scale(spelling, dtype):
    x = rows_of_many_scales(40, 96, dtype=dtype)  # a bucket of 512 would lie in six rows
    grad = torch.randn(x.shape).to(dtype)
    expected, _ = gradient(SPELLINGS[spelling], x, None, grad)
    found, saved = gradient(SPELLINGS[spelling], x, settings(bit_width=8, bucket_size=512), grad)
    error = (found - expected).double().norm(dim=1) / expected.double().norm(dim=1)
    # A step is the range, some 8 deviations, in 255. dx = r (g - x^ mean(g x^)) has two factors x^ of deviation 1, each
    # with an error of less than a step, beside g of deviation 1; and roundings of the type.
    assert error.max() < 2 * 8 / 255 + 8 * torch.finfo(dtype).eps
    packed = {t.data_ptr() for t in saved if t.dtype is torch.uint8}
    assert len(packed) == 1  # the square and the product share it
    assert all(t.dtype is torch.uint8 or t.numel() < x.numel() for t in saved)


@pytest.mark.parametrize("spelling", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_over_a_deviation_have_an_error_of_their_own_scale(spelling, dtype):
    x = rows_of_many_scales(40, 96, dtype=dtype)
    grad = torch.randn(x.shape).to(dtype)
    expected, _ = gradient(OTHERS[spelling], x, None, grad)
    found, saved = gradient(OTHERS[spelling], x, settings(bit_width=8, bucket_size=512), grad)
    error = (found - expected).double().norm(dim=1) / expected.double().norm(dim=1)
    assert error.max() < 2 * 8 / 255 + 8 * torch.finfo(dtype).eps  # as above
    assert all(t.dtype is torch.uint8 or t.numel() < x.numel() for t in saved)


def test_what_divides_without_a_gradient_needs_no_numerator():
    x, d = torch.randn(64, 512), torch.rand(64, 1) + 1
    _, saved = gradient(lambda x: x / d, x, settings(), torch.ones_like(x))
    assert all(t.numel() <= d.numel() for t in saved)


def test_the_gradient_is_the_formula_on_the_decoded_rows():
    x, chosen = rows_of_many_scales(6, 64), settings(bit_width=3, rounding=Rounding.NEAREST)
    grad = torch.randn(x.shape)
    found, saved = gradient(SPELLINGS["pow"], x, chosen, grad)
    (codes,) = {t.data_ptr(): t for t in saved if t.dtype is torch.uint8}.values()
    (inverse,) = {t.data_ptr(): t for t in saved if t.dtype is torch.bfloat16}.values()
    z = PackedActivation(PackedSpec.of(chosen.quantizer, Layout.of(x)), codes).dequantize()
    torch.testing.assert_close(inverse.float(), x.square().mean(1, keepdim=True).rsqrt(), rtol=2**-8, atol=0)
    decoded = z / inverse.float()
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    of_r = (grad * decoded).sum(-1, keepdim=True) * -0.5 * r**3 / 64
    expected = grad * r + 2 * decoded * of_r
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("value", [0.0, 1e-38, 3e38, float("inf"), float("nan")])
def test_rows_without_a_scale(value):
    """Zero rows and rows that are not finite: finite ones beside them have their gradient."""
    x = torch.randn(8, 512)
    x[3] = value
    for function in (torch.square, SPELLINGS["pow"]):
        expected, _ = gradient(function, x, None, torch.ones_like(x))
        found, _ = gradient(function, x, settings(bit_width=8, bucket_size=512), torch.ones_like(x))
        rest = torch.arange(8) != 3
        error = (found - expected)[rest].norm(dim=1) / expected[rest].norm(dim=1)
        assert error.max() < 2 * 8 / 255
        assert torch.equal(found[3].isfinite(), expected[3].isfinite()) or value == 3e38


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_element_that_is_not_finite_leaves_the_scales_of_rows_as_they_are(spelling, value):
    x = rows_of_many_scales(40, 96)  # a bucket of 512 lies in six rows
    x[4, 7] = x[24, 1] = value  # of the largest rows
    grad = torch.randn(x.shape)
    expected, _ = gradient(SPELLINGS[spelling], x, None, grad)
    found, _ = gradient(SPELLINGS[spelling], x, settings(bit_width=8, bucket_size=512), grad)
    rest = torch.tensor([row not in (4, 24) for row in range(40)])
    error = (found - expected)[rest].norm(dim=1) / expected[rest].norm(dim=1)
    assert error.max() < 2 * 8 / 254  # a flagged bucket has a level less


def test_finite_neighbours_of_an_infinity_in_a_square():
    """No norm follows: the gradient of the row's other elements is finite, and of the row's own scale."""
    x = rows_of_many_scales(40, 96)
    x[5, 7] = float("inf")  # in one of the smallest rows
    expected, _ = gradient(torch.square, x, None, torch.ones_like(x))
    found, _ = gradient(torch.square, x, settings(bit_width=8, bucket_size=512), torch.ones_like(x))
    finite = expected.isfinite()
    assert torch.equal(found.isfinite(), finite)
    difference = (found - expected).masked_fill(~finite, 0.0).norm(dim=1)
    assert (difference / expected.masked_fill(~finite, 0.0).norm(dim=1)).max() < 8 / 254


def test_short_rows_and_other_factors_are_kept_as_before():
    x, gate = torch.randn(64, 63), torch.rand(64, 1, requires_grad=True)
    _, saved = gradient(torch.square, x, settings(), torch.ones_like(x))
    assert all(t.dtype is not torch.bfloat16 for t in saved)
    wide = torch.randn(64, 512)
    _, saved = gradient(lambda x: x * gate.sigmoid(), wide, settings(), torch.ones_like(wide))
    assert all(t.dtype is not torch.bfloat16 for t in saved)


def test_a_norm_over_another_dimension():
    """Over channels, as layer norms of maps are written."""
    x = torch.randn(2, 96, 8, 8) * (10.0 ** (torch.arange(64) % 5 - 2.0)).view(8, 8)

    def norm(x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = x.mean(1, keepdim=True)
        return (x - mean) * torch.rsqrt((x - mean).abs().mean(1, keepdim=True).square() + 1e-6)

    grad = torch.randn(x.shape)
    expected, _ = gradient(norm, x, None, grad)
    found, _ = gradient(norm, x, settings(bit_width=8, bucket_size=512, min_numel=1000), grad)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 2 * 8 / 255


def test_a_quotient_whose_denominator_is_no_deviation_is_torchs():
    """Where there are as many rows as elements that are packed, and under a lossless policy, twice differentiable."""
    x = torch.randn(40, 96)
    for chosen in (settings(min_numel=0), settings(bit_width=32)):
        leaf = x.clone().requires_grad_()
        with region(chosen):
            h = leaf * 1
            y = h / h.sum(-1, keepdim=True)
        (found,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
        plain = x.clone().requires_grad_()
        z = plain / plain.sum(-1, keepdim=True)
        (expected,) = torch.autograd.grad(z.square().sum(), plain, create_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
