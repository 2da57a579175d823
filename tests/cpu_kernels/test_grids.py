"""Kernels of quantizers on grids give the reference's bytes, and write every byte of their results."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from brevact.cpu_kernels import launch
from brevact.cpu_kernels.grids import dequantize_grid_blocks, quantize_grid_blocks
from brevact.cpu_kernels.groups import GroupTable
from brevact.geometry import Geometry, Grid
from brevact.quantizers import kernel_ops
from brevact.quantizers.philox import column_bits
from brevact.quantizers.reference import pack, round_codes
from tests.quantizers.grid_cases import GridCase, buckets, channels, grid_cases, random_grid, values_around
from tests.quantizers.same_values import assert_same_values

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SEED = -0x123456789ABCDEF
DIVISIONS = [
    buckets(1, 3, 512),
    buckets(520, 3, 1),
    buckets(1095, 3, 64),
    buckets(1095, 3, 100),
    buckets(5003, 3, 5000),
    buckets(1095, 3, 1095),
    buckets(1300, 3, 600, block_size=600),
    channels(3, 6, 99, 3),
    channels(60, 6, 1, 3),
    channels(2, 600, 1, 3),
    channels(700, 1, 1, 3),
    channels(1, 5, 130, 3),
]


def _filled(length: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose unwritten bytes show."""
    return torch.full((length * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)


def _check(case: GridCase) -> None:
    geometry, grid, dtype = case.geometry, case.grid, case.x.dtype
    expected, codes = _filled(geometry.code_bytes, torch.uint8), _filled(geometry.code_bytes, torch.uint8)
    kernel_ops.quantize_grid.reference(case.x, geometry, grid, case.seed, expected)
    values, target = torch.empty_like(case.x), _filled(geometry.numel, dtype)
    kernel_ops.dequantize_grid.reference(expected, geometry, grid, None, values)
    launch.quantize_grid(case.x, geometry, grid, case.seed, codes)
    assert torch.equal(codes, expected), (geometry, case.seed, dtype)
    if case.multiply:
        target.copy_(torch.linspace(-3, 5, geometry.numel))
        values = values * target
    launch.dequantize_grid(codes, geometry, grid, target if case.multiply else None, target)
    assert_same_values(target, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [None, SEED], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("bit_width", range(1, 9))
def test_quantize_grid_bytes_for_every_bit_width(bit_width: int, seed: int | None, dtype: torch.dtype):
    torch.manual_seed(bit_width)
    geometry = buckets(1095, bit_width, 200)
    for size in {2, (1 << bit_width) - 1, 1 << bit_width} - {1}:
        grid = random_grid(geometry.groups, size)
        x = values_around(grid, geometry.numel, dtype)
        _check(GridCase(x, geometry, grid, seed, multiply=size > 2))


@pytest.mark.parametrize("geometry", DIVISIONS, ids=str)
def test_quantize_grid_bytes_for_every_way_to_divide_a_tensor(geometry: Geometry):
    torch.manual_seed(geometry.numel)
    names = ("has_bounds", "has_offset", "has_scale", "marks")
    for flags in range(16):
        grid = random_grid(geometry.groups, 8, **{name: bool(flags >> i & 1) for i, name in enumerate(names)})
        x = values_around(grid, geometry.numel, DTYPES[flags % 4])
        for seed in (None, SEED):
            _check(GridCase(x, geometry, grid, seed, multiply=bool(flags & 4)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=grid_cases(DTYPES, 6000))
def test_quantize_grid_bytes_of_any_tensor(case: GridCase):
    if case.grid.levels.shape[0] == 1 and case.geometry.bit_width <= 8:
        _check(case)
    else:  # the reference runs
        assert launch.dequantize_grid(torch.empty(0), case.geometry, case.grid, None, case.x) is NotImplemented


@pytest.mark.parametrize("geometry", [buckets(200_001, 4, 4096), channels(50, 100, 40, 4), channels(2000, 100, 1, 4)])
def test_quantize_grid_bytes_on_several_threads(geometry: Geometry):
    torch.manual_seed(0)
    grid = random_grid(geometry.groups, 16)
    x = values_around(grid, geometry.numel, torch.float32)
    _check(GridCase(x, geometry, grid, SEED, multiply=False))


def test_dequantize_grid_clamps_values_and_not_levels():
    """Levels beyond float16 whose scale brings them back; a scale that takes small levels beyond it."""
    levels = torch.tensor([[-1e6, -1.0, 1.0, 1e6]])
    for scale, offset in ((1e-3, None), (1e5, None), (1e-3, 5e4), (None, 7e4)):
        grid = Grid(levels, scale=None if scale is None else torch.tensor([scale]))
        grid = Grid(levels, None, None if offset is None else torch.tensor([offset]), grid.scale)
        x = torch.linspace(-1, 1, 100).half() * 2000
        _check(GridCase(x, buckets(100, 2, 100), grid, None, multiply=False))


def test_dequantize_grid_keeps_the_signs_of_zeros():
    for offset, scale in ((None, torch.tensor([2.0])), (torch.tensor([-0.0]), None), (torch.tensor([0.0]), None)):
        grid = Grid(torch.tensor([[-0.0, 1.0]]), None, offset, scale)
        _check(GridCase(torch.zeros(20), buckets(20, 1, 20), grid, None, multiply=False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "geometry", [*DIVISIONS, buckets(200_001, 4, 4096), channels(50, 100, 40, 4), channels(2000, 100, 1, 4)], ids=str
)
def test_statistics_for_every_way_to_divide_a_tensor(geometry: Geometry, dtype: torch.dtype):
    torch.manual_seed(geometry.numel)
    x = torch.randn(geometry.numel) * 3
    for special in (False, True):
        if special:
            x[::97], x[1::101], x[2::103], x[3::107] = float("nan"), 0.0, -float("inf"), float("inf")
        y = x.to(dtype)
        for got, want in zip(launch.ranges(y, geometry), kernel_ops.ranges.reference(y, geometry), strict=True):
            assert_same_values(got, want)
        offset, inverse = torch.randn(geometry.groups), torch.rand(geometry.groups) * 1e4
        inverse[::3] *= 1e4
        got = launch.moments(y, geometry, offset, inverse)
        assert torch.equal(got, kernel_ops.moments.reference(y, geometry, offset, inverse))


@pytest.mark.parametrize("first_block", [0, 2**22, 2**23 + 5, 2**36])  # elements up to 2^45: columns beyond 2^32
@pytest.mark.parametrize("bit_width", [2, 8])
def test_quantize_grid_blocks_far_into_a_tensor(first_block: int, bit_width: int):
    """Addresses are shifted so that one block, a group of its own, falls on buffers."""
    torch.manual_seed(0)
    first, size, seed = first_block * 512, 1 << bit_width, 99
    grid, x = random_grid(1, size), torch.randn(512)
    table = GroupTable(Geometry(first + 512, bit_width, 512, 512, first_block + 1, True), torch.float32, True)
    steps, inverse = grid.steps(stochastic=True), grid.inverse
    codes, target = _filled(64 * bit_width, torch.uint8), _filled(512, torch.float32)
    codes_at, offset_at = codes.data_ptr() - first // 8 * bit_width, grid.offset.data_ptr() - 4 * first_block
    inverse_at, scale_at = inverse.data_ptr() - 4 * first_block, grid.scale.data_ptr() - 4 * first_block
    blocks, levels_at = (table.address, first_block, first_block + 1), grid.levels.data_ptr()
    x_at, target_at = x.data_ptr() - 4 * first, target.data_ptr() - 4 * first
    quantize_grid_blocks(x_at, codes_at, offset_at, inverse_at, levels_at, steps.data_ptr(), size, 0, seed, *blocks)
    dequantize_grid_blocks(codes_at, offset_at, scale_at, levels_at, size, 0, 0, target_at, *blocks)
    z = (x - grid.offset) * inverse
    t = kernel_ops.positions(z, grid.levels, steps, stochastic=True)
    bits = column_bits(torch.arange(first // 8, first // 8 + 64), torch.tensor(seed)).flatten()
    q = round_codes(t, bits)
    assert torch.equal(codes, pack(q, bit_width, 512))
    assert torch.equal(target, grid.offset + grid.scale * grid.levels[0, q])
