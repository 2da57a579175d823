"""Formats of normalized values: the formulas of the paper's table 1, its table 2, and bytes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from brevact.quantizers import NormalizedFormat, NormalizedQuantizer
from brevact.quantizers.formats import normalized


def _sign(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0).double()


def _log_scale(x: Tensor, base: float, factor: float, lowest: int, highest: int, shift: float) -> Tensor:
    exponent = (torch.log((factor * x).abs()) / math.log(base)).floor().clamp(lowest, highest)
    return _sign(x) * base ** (shift + exponent)


def _uniform_scale(x: Tensor, steps: int, lowest: int, highest: int) -> Tensor:
    return (0.5 + (steps * x).floor().clamp(lowest, highest)) / steps


FORMULAS = {
    "L2": lambda x: _log_scale(x, 2.0, 1.034, -1, 0, 0.5),
    "L3": lambda x: _log_scale(x, 2.0, 1.316, -1, 2, 0.0),
    "L4": lambda x: _log_scale(x, 2.0, 1.36, -3, 4, 0.0),
    "L5": lambda x: _log_scale(x, 2.0**0.5, 1.177, -6, 9, 0.0),
    "U4": lambda x: _uniform_scale(x, 2, -8, 7),
    "U5": lambda x: _uniform_scale(x, 3, -16, 15),
    "U8": lambda x: _uniform_scale(x, 8, -128, 127),
    "O4": lambda x: _sign(x) * (1.29 ** (0.5 + (torch.log(1 + x.abs()) / math.log(1.29)).floor().clamp(0, 7)) - 1),
}


@pytest.mark.parametrize("format", NormalizedFormat)
def test_levels_are_those_of_the_formula(format):
    torch.manual_seed(0)
    x = torch.cat((torch.randn(50_000) * 3, torch.linspace(-40, 40, 20_001), torch.randn(1000) * 1e-3))
    got = NormalizedQuantizer(format=format).for_normalized.quantize(x).dequantize().double()
    want = FORMULAS[format.value](x.double())
    off = ~torch.isclose(got, want, rtol=2**-23, atol=0.0)
    # Bounds are float32: only values within a unit in the last place of one may go the other way.
    nudged = [FORMULAS[format.value](x.double() * (1 + sign * 2**-22) + sign * 2**-40) for sign in (-1, 1)]
    near = ~torch.isclose(nudged[0], nudged[1], rtol=2**-23, atol=0.0)
    assert (off <= near).all() and near.double().mean() < 0.01


@pytest.mark.parametrize("format", NormalizedFormat)
def test_every_code_has_its_level_and_zero_counts_as_positive(format):
    q = NormalizedQuantizer(format=format).for_normalized
    levels, bounds = format.halves()
    assert len(levels) == 2 ** (format.bit_width - 1) == len(bounds) + 1
    exact = torch.tensor([-level for level in reversed(levels)] + levels)
    assert torch.equal(q.quantize(exact).dequantize(), exact)
    zeros = q.quantize(torch.tensor([0.0, -0.0])).dequantize()
    assert torch.equal(zeros, torch.full((2,), levels[0]))
    reached = torch.tensor(bounds)  # a bound belongs to the level beyond it
    assert torch.equal(q.quantize(reached).dequantize(), torch.tensor(levels[1:]))
    if format.value[0] != "U":
        assert torch.equal(q.quantize(-reached).dequantize(), -torch.tensor(levels[1:]))
    else:  # floor goes down on both sides
        assert torch.equal(q.quantize(-reached).dequantize(), -torch.tensor(levels[:-1]))


@pytest.mark.parametrize(("format", "correlation"), [("L2", 0.918), ("L3", 0.965), ("L4", 0.981)])
def test_normal_values_have_the_correlation_and_deviation_of_table_2(format, correlation):
    """By integration over quantiles, whose error is far below half a unit of the table's last digit, and 5e-5 of L2."""
    count = 2_000_000
    x = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count).float()
    y = NormalizedQuantizer(format=format).for_normalized.quantize(x).dequantize().double()
    x = x.double()
    found = (x * y).mean() / (x.square().mean() * y.square().mean()).sqrt()
    # The paper rounds its figures to three digits; L2's constant 1.034 itself is rounded, to half of 0.001 relative.
    assert abs(found - correlation) <= 0.0005 + 0.0005 * (format == "L2")
    assert abs(y.square().mean().sqrt() - 1.0) <= 0.0005 + 0.0005


@pytest.mark.parametrize("format", ["L3", "L4", "L5", "U4", "U5", "U8", "O4"])
def test_stochastic_rounding_is_unbiased_inside_the_grid(format):
    torch.manual_seed(0)
    q = NormalizedQuantizer(format=format, rounding="stochastic").for_normalized
    end = NormalizedFormat(format).halves()[0][-1]
    x = torch.linspace(-end, end, 400)
    draws = torch.stack([q.quantize(x, seed=seed).dequantize().double() for seed in range(1000)])
    levels = torch.tensor(NormalizedFormat(format).halves()[0])
    gap = max(2 * levels[0].item(), levels.diff().max().item())
    error = draws.var(0).clamp(min=gap**2 / 1000).div(1000).sqrt()
    assert ((draws.mean(0) - x.double()).abs() <= 5 * error + gap * 2**-17).all()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_channels_store_their_mean_and_deviation(memory_format):
    torch.manual_seed(0)
    shift, spread = torch.linspace(-300, 300, 6), torch.logspace(-3, 3, 6)
    x = torch.randn(16, 6, 9, 7) * spread.view(-1, 1, 1) + shift.view(-1, 1, 1)
    x = x.contiguous(memory_format=memory_format)
    packed = NormalizedQuantizer(format="L4").quantize(x)
    mean, deviation = packed.tensors[1:]
    exact = x.double().transpose(0, 1).flatten(1)
    # Values are counted in units of the range: each is off by half a unit at most, and so is their mean; the deviation
    # too (the triangle inequality of the 2-norm), beside the rounding of float32.
    unit = (exact.amax(1) - exact.amin(1)) / 65535
    rounding = exact.abs().amax(1) * 2**-22
    assert ((mean.double() - exact.mean(1)).abs() <= unit / 2 + rounding).all()
    assert ((deviation.double() - exact.std(1, correction=0)).abs() <= unit + rounding).all()
    assert packed.nbytes == x.numel() // 2 + 2 * 4 * 6


@pytest.mark.parametrize("format", NormalizedFormat)
def test_levels_of_fake_tensors_and_of_real_ones_are_kept_apart(format):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    for quantizer in (NormalizedQuantizer(format=format), NormalizedQuantizer(format=format).for_normalized):
        expected = quantizer.quantize(x).dequantize()
        normalized._kept_levels.cache_clear()  # as in a process that begins with fake tensors
        with FakeTensorMode():
            assert quantizer.quantize(torch.randn(2, 3, 8, 8)).dequantize().shape == x.shape
        assert torch.equal(quantizer.quantize(x).dequantize(), expected)
        with FakeTensorMode():
            assert quantizer.quantize(torch.randn(2, 3, 8, 8)).dequantize().shape == x.shape


@pytest.mark.parametrize("values", [(1.0, -1.0), (-1.0, 1.0, 1e-38, 2e-38)], ids=str)
@pytest.mark.parametrize("name", NormalizedFormat, ids=lambda each: each.value)
def test_a_range_beyond_float32_keeps_signs(name, values):
    """The ends count as +-2^125: their mean, and so the place of the grid, is that of the values' signs."""
    largest = torch.finfo(torch.float32).max
    x = torch.tensor(values).repeat(32).view(1, 1, -1) * largest
    packed = NormalizedQuantizer(format=name).quantize(x, seed=0)
    mean, deviation = packed.tensors[1:]
    clamped = x.double().clamp(-(2.0**125), 2.0**125)
    torch.testing.assert_close(mean.double(), clamped.mean().view(1), rtol=0, atol=2.0**125 / 65536)
    torch.testing.assert_close(deviation.double(), clamped.std(correction=0).view(1), rtol=1e-4, atol=0)
    y = packed.dequantize()
    assert y.isfinite().all() and (y.sign() * x.sign() >= 0)[x.abs() == largest].all()
