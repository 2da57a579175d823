"""Dual precision: block means, the division into maps, offsets and large values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from brevact.quantizers import DualPrecisionQuantizer, Layout, UniformQuantizer, quantize
from brevact.quantizers.formats.dual_precision import map_blocks
from tests.quantizers.subjects import DTYPES, TENSORS, dual_step


def _low(packed) -> Tensor:
    return packed.tensors[2].float()


@pytest.mark.parametrize(
    ("shape", "maps", "sides"),
    [
        ((), 1, (1, 1, 1)),
        ((100,), 1, (1, 1, 100)),
        ((4, 100), 4, (1, 1, 100)),
        ((4, 3, 100), 12, (1, 1, 100)),
        ((4, 3, 9, 14), 12, (1, 9, 14)),
        ((4, 3, 6, 9, 14), 12, (6, 9, 14)),
        ((2, 4, 3, 6, 9, 14), 24, (6, 9, 14)),
        ((1, 3, 9, 14), 3, (1, 9, 14)),
        ((4, 30, 1, 1), 4, (1, 1, 30)),
        ((4, 0, 3), 0, (1, 1, 3)),
    ],
)
def test_map_blocks_of_shapes(shape: tuple[int, ...], maps: int, sides: tuple[int, int, int]):
    blocks = map_blocks(Layout.of(torch.empty(shape)), 8)
    assert (blocks.maps, blocks.sides) == (maps, sides)
    assert blocks.block == tuple(min(side, 8) for side in sides)


@pytest.mark.parametrize(
    "shape", [(2, 3, 7, 7), (2, 3, 8, 14), (2, 3, 9, 28), (2, 3, 33, 2), (2, 3, 5, 9, 17), (5, 41)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_low_part_is_average_pooling_with_true_counts(shape: tuple[int, ...], dtype: torch.dtype):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3 + 1).to(dtype)
    exact = x.double() if len(shape) > 2 else x.double().unsqueeze(1)
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[exact.dim() - 3]
    for block in (1, 3, 8, 40):
        sides = [min(side, block) for side in exact.shape[2:]]
        expected = pool(exact, sides, ceil_mode=True).flatten()
        low = _low(DualPrecisionQuantizer(block=block).quantize(x, seed=0)).double()
        # Half a unit of float16; a float32 rounding for each addition, each of at most the block's sum.
        reach = math.prod(sides) * 2**-24 * x.double().abs().max()
        assert ((low - expected).abs() <= expected.abs() * 2**-11 + 2**-25 + reach).all()


def test_bytes_do_not_depend_on_memory_format_and_dtype():
    torch.manual_seed(0)
    x = torch.randn(3, 5, 9, 14).bfloat16()
    quantizer = DualPrecisionQuantizer()
    expected = quantizer.quantize(x, seed=3)
    gaps = torch.empty(3, 5, 9, 28, dtype=x.dtype)[..., ::2].copy_(x)
    for same in (x.contiguous(memory_format=torch.channels_last), gaps, x.float(), x.double()):
        packed = quantizer.quantize(same, seed=3)
        assert torch.equal(packed.buffer, expected.buffer)
        assert torch.equal(packed.dequantize().bfloat16(), expected.dequantize())


def test_codes_are_those_of_the_residual():
    """The residual packed by `UniformQuantizer`, a map per row, with a bfloat16 minimum and scale."""
    x = torch.randn(4, 6, 9, 14)
    packed = DualPrecisionQuantizer(bit_width=3).quantize(x, seed=11)
    low = _low(packed).view(4, 6, 2, 2).repeat_interleave(8, 2).repeat_interleave(8, 3)[:, :, :9, :14]
    uniform = UniformQuantizer(bit_width=3, granularity="sample", minimum_dtype=torch.bfloat16)
    expected = uniform.quantize((x - low).view(24, -1), seed=11)
    assert torch.equal(packed.codes, expected.codes) and torch.equal(packed.minimum, expected.minimum)
    assert torch.equal(dual_step(packed, x)[:, :, 0, 0].flatten(), expected.scale.float())
    assert torch.equal(packed.dequantize(), low + expected.dequantize().view(x.shape))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.14159, 1e-30, 1e-6, 65504.0])
def test_constants_that_float16_holds_are_exact(value: float):
    value = torch.tensor(value, dtype=torch.float16).item()
    for shape in ((), (1300,), (2, 3, 100), (2, 3, 9, 14)):
        x = torch.full(shape, value)
        assert torch.equal(DualPrecisionQuantizer().quantize(x, seed=1).dequantize(), x)


def test_smooth_maps_have_smaller_errors_than_without_means():
    torch.manual_seed(0)
    x = F.interpolate(torch.randn(4, 8, 4, 4), size=(32, 32), mode="bilinear") + 0.05 * torch.randn(4, 8, 32, 32)
    uniform = UniformQuantizer(granularity="sample").quantize(x.view(32, -1), seed=0).dequantize().view(x.shape)
    dual = DualPrecisionQuantizer().quantize(x, seed=0).dequantize()
    assert (dual - x).square().mean() < 0.5 * (uniform - x).square().mean()


def test_an_offset_costs_no_more_than_a_unit_of_its_mean():
    """The residual is taken from the rounded mean: half a unit of float16 at 1000, rounded down to bfloat16."""
    torch.manual_seed(0)
    x = 1000.3 + 0.01 * torch.randn(4, 4, 16, 16)
    packed = DualPrecisionQuantizer().quantize(x, seed=0)
    step = dual_step(packed, x)
    assert ((packed.dequantize() - x).abs() <= step + 8 * 2**-24 * 1000).all()
    residual = 0.25 + 0.06  # half of 2^-1, and the noise
    assert step.max() * 3 <= (2 * 0.06 + residual * 2**-7) * (1 + 2**-7) + 4 * 2**-24 * 1000


@pytest.mark.parametrize("scale", [7e4, 1e6, 1e30, 1.6e38])
def test_finite_values_beyond_float16_decode_to_finite_values(scale: float):
    torch.manual_seed(0)
    for x in (
        scale * torch.linspace(1, 2, 576).view(1, 1, 24, 24),
        -scale * (1 + torch.rand(2, 3, 9, 9)),
        scale * torch.randn(2, 3, 8, 8).sign(),  # sums of either infinity, where they overflow
    ):
        packed = DualPrecisionQuantizer().quantize(x, seed=0)
        y = packed.dequantize()
        assert torch.isfinite(_low(packed)).all() and torch.isfinite(y).all()
        assert ((y - x).abs() <= dual_step(packed, x) + 7 * 2**-24 * 2 * x.abs().max()).all()


def test_traced_tensors_have_the_shape_of_the_bytes():
    quantizer = DualPrecisionQuantizer()
    reals = [make().detach() for make in TENSORS.values()]
    for real in (torch.randn(3, 4, 9, 14), *reals):
        with FakeTensorMode() as mode:
            packed = quantize(quantizer, mode.from_tensor(real), None)
            y = packed.dequantize()
        assert packed.buffer.shape == quantizer.quantize(real).buffer.shape
        assert (y.shape, y.dtype) == (real.shape, real.dtype)
