"""Kernels of quantizers on grids: any tensor, several threads, ends, zeros, and blocks far into a tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from brevact.cpu_kernels import launch
from brevact.cpu_kernels.grids import dequantize_grid_blocks, quantize_grid_blocks
from brevact.cpu_kernels.groups import GroupTable
from brevact.geometry import Geometry, Grid
from brevact.quantizers import kernel_ops
from brevact.quantizers.reference import column_bits, pack, round_codes
from tests.quantizers.grid_cases import GridCase, buckets, channels, grid_cases, random_grid, values_around
from tests.quantizers.kernel_laws import DTYPES, SEED, Backend

_check = Backend(launch).check_grid


@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=grid_cases((*DTYPES, torch.float64), 6000))
def test_quantize_grid_bytes_of_any_tensor(case: GridCase):
    if case.geometry.bit_width <= 8:
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


@pytest.mark.parametrize("first_block", [0, 2**22, 2**23 + 5, 2**36])  # elements up to 2^45: columns beyond 2^32
@pytest.mark.parametrize("bit_width", [2, 8])
def test_quantize_grid_blocks_far_into_a_tensor(first_block: int, bit_width: int):
    """Addresses are shifted so that one block, a group of its own, falls on buffers."""
    torch.manual_seed(0)
    first, size, seed = first_block * 512, 1 << bit_width, 99
    grid, x = random_grid(1, size), torch.randn(512)
    table = GroupTable(Geometry(first + 512, bit_width, 512, 512, first_block + 1, True), torch.float32, True)
    steps, inverse = grid.steps(stochastic=True), grid.inverse
    codes, target = Backend(launch).filled(64 * bit_width, torch.uint8), torch.full((512,), torch.nan)
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
