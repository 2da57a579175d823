"""Buckets whose range a few values take: the others keep their precision, and far values are exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from brevact.quantizers import MixedQuantizer, SampleQuantizer, UniformQuantizer, uneven

WIDTHS = 2, 3, 4, 5, 8
OUTLIERS = 12.0, 50.0, -200.0, 1000.0, 2.0**100
SENTINELS = -30.0, -100.0, -1e4, -1e9, 1e30, -torch.inf, torch.inf, torch.finfo(torch.float32).min
QUANTIZERS = {
    **{f"{rounding}-{bits}": UniformQuantizer(bit_width=bits, rounding=rounding)
       for bits in WIDTHS for rounding in ("nearest", "stochastic", "dithered")},
    "bucket-64": UniformQuantizer(bit_width=4, bucket_size=64),
    "mixed": MixedQuantizer(bit_width=3, mix_bit_width=6),
    "sample": SampleQuantizer(bit_width=4),
}  # fmt: skip


def _errors(quantizer, x: Tensor, draws: int) -> Tensor:
    return torch.stack([quantizer.quantize(x, seed=seed).dequantize().double() for seed in range(draws)]) - x.double()


def _with(value: float, share: int) -> tuple[Tensor, Tensor]:
    """Eight buckets of normal values with one in `share` replaced, and the mask of the replaced ones."""
    torch.manual_seed(0)
    x = torch.randn(8, 512)
    x[:, 5::share] = value
    return x, x == value


@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS.keys())
def test_far_values_are_exact_and_spare_their_bucket(quantizer):
    draws = 8
    # A bucket with a far value rounds stochastically.
    is_dithered = getattr(quantizer, "rounding", None) == "dithered"
    alike = UniformQuantizer(bit_width=quantizer.bit_width) if is_dithered else quantizer
    for value, share in [(v, 64) for v in OUTLIERS] + [(v, 4) for v in SENTINELS]:
        x, is_far = _with(value, share)
        y = quantizer.quantize(x, seed=0).dequantize()
        assert torch.equal(y[is_far], x[is_far]), value
        plain = torch.where(is_far, 0.1, x)
        ours, without = (_errors(alike, t, draws)[:, ~is_far].square().mean().sqrt() for t in (x, plain))
        assert ours <= 2 * without, value


def test_ordinary_buckets_are_even():
    """No bucket of 512 samples of common distributions is uneven, and at most one in fifty of exponential ones."""
    torch.manual_seed(0)
    x = torch.randn(400, 512)
    for y in (x, x.relu(), torch.nn.functional.gelu(x), torch.rand(400, 512), x + 100, torch.dropout(x, 0.9, True)):
        assert not uneven.is_uneven(y).any()
    assert uneven.is_uneven(torch.distributions.Exponential(1.0).sample(x.shape)).float().mean() <= 0.02


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_a_constant_beside_a_far_value_is_exact(value: float):
    x = torch.full((600,), value).index_fill(0, torch.arange(0, 600, 7), -1e4)
    for bits in WIDTHS:
        assert torch.equal(UniformQuantizer(bit_width=bits).quantize(x, seed=0).dequantize(), x)


def test_far_values_keep_16_significant_bits():
    x = torch.randn(4096).index_copy(0, torch.arange(0, 4096, 512), 1000 * torch.rand(8) + 100)
    y = UniformQuantizer(bit_width=4).quantize(x, seed=0).dequantize()
    assert ((y - x)[::512].abs() <= x[::512] * 2.0**-16).all()
    assert torch.equal(UniformQuantizer(bit_width=4).quantize(x.half(), seed=0).dequantize()[::512], x.half()[::512])
