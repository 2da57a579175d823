"""Kernels of quantizers on grids: any tensor, several threads, ends, zeros, and blocks far into a tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from brevact.cpu_kernels import launch
from brevact.cpu_kernels.levels import quantize_grid_blocks
from brevact.cpu_kernels.uniform import GroupTable
from brevact.geometry import Geometry, Grid
from brevact.quantizers import kernel_ops
from brevact.quantizers.reference import column_bits, pack, round_codes
from tests.quantizers.grid_cases import GridCase, buckets, grid_cases, random_grid, values_around
from tests.quantizers.kernel_laws import DTYPES, SEED, Backend

_check = Backend(launch).check_grid


@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=grid_cases(DTYPES, 6000))
def test_quantize_grid_bytes_of_any_tensor(case: GridCase):
    if case.geometry.bit_width <= 8:
        _check(case)
    else:  # the reference runs
        assert launch.dequantize_grid(torch.empty(0), case.geometry, case.grid, None, case.x) is NotImplemented


def test_quantize_grid_bytes_on_several_threads():
    torch.manual_seed(0)
    grid = random_grid(16)
    x = values_around(grid, 200_001, torch.float32)
    _check(GridCase(x, buckets(200_001, 4, 4096), grid, SEED, multiply=False))


def test_dequantize_grid_keeps_the_signs_of_zeros_and_clamps_to_the_type():
    for levels in ([-0.0, 1.0], [-1e6, 1e6]):
        for x in (torch.zeros(20), torch.ones(20).half()):
            _check(GridCase(x, buckets(20, 1, 20), Grid(torch.tensor([levels])), None, multiply=False))


@pytest.mark.parametrize("first_block", [0, 2**22, 2**23 + 5, 2**36])  # elements up to 2^45: columns beyond 2^32
@pytest.mark.parametrize("bit_width", [2, 8])
def test_quantize_grid_blocks_far_into_a_tensor(first_block: int, bit_width: int):
    """Addresses are shifted so that one block falls on buffers."""
    torch.manual_seed(0)
    first, size, seed = first_block * 512, 1 << bit_width, 99
    grid, x = random_grid(size), torch.randn(512)
    table = GroupTable(Geometry(first + 512, bit_width, 512, 512, first_block + 1, True), torch.float32, True)
    steps = grid.steps(stochastic=True)
    codes = Backend(launch).filled(64 * bit_width, torch.uint8)
    codes_at = codes.data_ptr() - first // 8 * bit_width
    blocks, levels_at = (table.address, first_block, first_block + 1), grid.levels.data_ptr()
    quantize_grid_blocks(x.data_ptr() - 4 * first, codes_at, levels_at, steps.data_ptr(), size, 0, seed, *blocks)
    t = kernel_ops.positions(x, grid.levels, steps, stochastic=True)
    bits = column_bits(torch.arange(first // 8, first // 8 + 64), torch.tensor(seed)).flatten()
    q = round_codes(t, bits)
    assert torch.equal(codes, pack(q, bit_width, 512))
