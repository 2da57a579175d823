"""Sign and magnitude: the formula, its bytes and its range."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from brevact.quantizers import Rounding, SignMagnitudeQuantizer

FLOAT32 = torch.finfo(torch.float32)


def plain(levels: int = 4, **settings: object) -> SignMagnitudeQuantizer:
    return SignMagnitudeQuantizer(base_levels=levels, mix_levels_prob=0, **settings)


def codes_of(x: Tensor, scale: Tensor, levels: int) -> Tensor:
    return x.double() / scale.double() * levels


@pytest.mark.parametrize("use_max", [True, False], ids=["max", "l2"])
@pytest.mark.parametrize("levels", [1, 3, 4, 16, 100, 256])
def test_nearest_follows_the_formula(levels, use_max):
    torch.manual_seed(levels)
    x = torch.randn(6, 512)
    packed = plain(levels, use_max=use_max, rounding=Rounding.NEAREST).quantize(x)
    scale = x.abs().amax(1) if use_max else x.norm(dim=1)
    torch.testing.assert_close(packed.scale, scale, rtol=0.0 if use_max else 2**-14, atol=0)  # units of max / 65535
    t = x.double().abs() / packed.scale.double()[:, None] * levels
    expected = x.double().sign() * t.round() / levels * packed.scale.double()[:, None]
    clear = ((t % 1) - 0.5).abs() > levels * 2**-22  # float32 arithmetic may see the others on the other side
    assert clear.double().mean() > 0.99
    torch.testing.assert_close(packed.dequantize().double()[clear], expected[clear], rtol=2**-22, atol=0)


def test_ties_go_to_even_magnitudes_on_both_sides():
    x = torch.tensor([0.125, 0.375, 0.625, 0.875, 1.0])
    y = plain(rounding="nearest").quantize(torch.cat((x, -x))).dequantize()
    expected = torch.tensor([0.0, 0.5, 0.5, 1.0, 1.0])
    assert torch.equal(y, torch.cat((expected, -expected)))


@pytest.mark.parametrize(("levels", "bit_width"), [(1, 2), (3, 3), (4, 4), (7, 4), (8, 5), (16, 6), (64, 8), (256, 10)])
def test_bytes_count_the_sign_and_zero(levels, bit_width):
    assert bit_width == math.ceil(math.log2(2 * levels + 1))
    packed = plain(levels).quantize(torch.randn(512 * 100), seed=0)
    assert packed.nbytes == 100 * (64 * bit_width + 4)


@pytest.mark.parametrize(
    ("base", "mix", "probability", "widths"),
    [(4, 16, 0.5, (4, 6)), (4, 64, 0.3, (4, 8)), (8, 64, 0.4, (5, 8)), (16, 256, 0.2, (6, 10)), (4, 16, 0.3, (4, 6))],
)
def test_mixtures_of_the_thesis_take_the_bits_that_their_levels_need(base, mix, probability, widths):
    quantizer = SignMagnitudeQuantizer(base_levels=base, mix_levels=mix, mix_levels_prob=probability, bucket=8)
    buckets = 4000
    packed = quantizer.quantize(torch.randn(8 * buckets), seed=0)
    low, high = widths
    expected = 8 * ((1 - probability) * low + probability * high) + 33  # a scale and a bit of the mask
    error = 5 * 8 * (high - low) * (probability * (1 - probability) / buckets) ** 0.5  # 5 standard errors
    assert abs(8 * packed.nbytes / buckets - expected) <= error + 0.1


def test_the_global_variant_has_one_scale_and_one_draw_a_tensor():
    quantizer, x, draws = SignMagnitudeQuantizer(bucket=None), torch.randn(64), 2000
    found = [quantizer.quantize(x, seed=seed) for seed in range(draws)]
    assert all(torch.equal(packed.scale, x.abs().max()[None]) for packed in found[:50])
    high = sum(packed.quantizer.levels == 16 for packed in found) / draws
    assert {packed.nbytes for packed in found} == {32 + 4, 48 + 4}
    assert abs(high - 0.3) <= 5 * (0.3 * 0.7 / draws) ** 0.5


@pytest.mark.parametrize("use_max", [True, False], ids=["max", "l2"])
@pytest.mark.parametrize("bucket", [1, 7, 512, None])
def test_scales_are_no_smaller_than_any_magnitude(bucket, use_max):
    torch.manual_seed(0)
    rows = (torch.randn(600), torch.full((600,), -3.7), torch.eye(600)[0] * 1e-30, torch.rand(600) * FLOAT32.tiny)
    for x in rows:
        packed = plain(bucket=bucket, use_max=use_max).quantize(x, seed=0)
        size = bucket or 600
        scale = packed.scale.repeat_interleave(size)[:600]
        assert (scale >= x.abs()).all()
        assert (packed.dequantize().abs() <= scale).all()


@pytest.mark.parametrize("use_max", [True, False], ids=["max", "l2"])
def test_the_largest_values_of_float32_stay_finite(use_max):
    x = torch.linspace(-1, 1, 64) * FLOAT32.max
    packed = plain(use_max=use_max).quantize(x, seed=0)
    y = packed.dequantize()
    assert torch.isfinite(y).all() and (y * x >= 0).all()
    assert packed.scale == FLOAT32.max


def test_the_smallest_values_of_float32_are_unbiased():
    """Below 2^-126 the inverse of a scale would overflow: the scale stays there, and values are levels of it or 0."""
    x, draws = torch.linspace(-1, 1, 100) * FLOAT32.tiny * 0.75, 4000
    total = plain(bucket=100).quantize(x.repeat(draws), seed=0).dequantize().double().view(draws, -1).sum(0)
    error = 5 * FLOAT32.tiny / 4 * 0.5 / draws**0.5
    assert (total / draws - x.double()).abs().max() <= error + FLOAT32.tiny * 2**-16
