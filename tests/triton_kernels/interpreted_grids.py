"""Interpreted kernels of quantizers on grids; see `test_interpreted`. Tensors are small, as in `interpreted_groups`."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings

from brevact.geometry import Geometry
from brevact.quantizers import kernel_ops, reference
from brevact.quantizers.philox import column_bits
from brevact.triton_kernels.grids import moments_tiling
from brevact.triton_kernels.launch import group_tiling
from brevact.triton_kernels.levels import dequantize_grid_tile, quantize_grid_tile
from brevact.triton_kernels.uniform import RANGES_TILE
from tests.crosses import taking_turns
from tests.quantizers.grid_cases import GridCase, buckets, channels, grid_cases, random_grid, values_around
from tests.triton_kernels.checks import SEED, check_grid, check_statistics, filled

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 512


@pytest.mark.parametrize("bit_width, seed", taking_turns(range(1, 11), [None, SEED]))
def test_quantize_grid_bytes_for_every_bit_width(bit_width: int, seed: int | None):
    """Types take turns: what depends on them does not depend on the width."""
    torch.manual_seed(bit_width)
    geometry, dtype = buckets(BLOCK + 71, bit_width, 256), DTYPES[(bit_width + (seed is None)) % 3]
    marks = bit_width % 2 == 0
    grid = random_grid(geometry.groups, 1 << bit_width, rows_by_group=dtype is torch.float32, marks=marks)
    x = values_around(grid, geometry.numel, dtype)
    check_grid(GridCase(x, geometry, grid, seed, multiply=seed is None))


DIVISIONS = [
    buckets(520, 3, 1),
    buckets(1095, 3, 64),
    buckets(1000, 3, 100),
    buckets(4096 + 520, 3, 2048),  # a second tile of one block and a ragged one
    buckets(4096 + 9, 3, 4096),  # a second tile of a ragged block alone
    buckets(5003, 3, 5000),
    buckets(1095, 3, 1095),
    buckets(1095, 3, 64, block_size=64),
    buckets(1300, 3, 600, block_size=600),
    channels(3, 6, 99, 3),
    channels(60, 6, 1, 3),
    channels(2, 600, 1, 3),
    channels(3, 3, 64, 3),
    channels(1, 5, 130, 3),
]


@pytest.mark.parametrize("geometry", DIVISIONS, ids=str)
def test_quantize_grid_bytes_for_every_way_to_divide_a_tensor(geometry: Geometry):
    torch.manual_seed(geometry.numel)
    grid = random_grid(geometry.groups, 8, rows_by_group=True, marks=True)
    x = values_around(grid, geometry.numel, torch.bfloat16)
    check_grid(GridCase(x, geometry, grid, SEED, multiply=False))


@pytest.mark.exhaustive
@settings(max_examples=8, deadline=None, derandomize=True)
@given(case=grid_cases(DTYPES, 2200))
def test_quantize_grid_bytes_of_any_tensor(case: GridCase):
    check_grid(case)


@pytest.mark.parametrize(
    "geometry",
    [*DIVISIONS, buckets(40_003, 3, 40_003), channels(24, 2, 300, 3), channels(1500, 8, 1, 3)],  # parts of groups
    ids=str,
)
def test_statistics_for_every_way_to_divide_a_tensor(geometry: Geometry):
    torch.manual_seed(geometry.numel)
    x = torch.randn(geometry.numel) * 3
    x[::97], x[1::101], x[2::103] = float("nan"), 0.0, -float("inf")
    check_statistics(x.to(DTYPES[geometry.numel % 3]), geometry)


def test_statistics_of_a_large_group_are_found_in_parts():
    geometry = buckets(40_003, 3, 40_003)
    assert group_tiling(geometry, RANGES_TILE).parts > 1 and moments_tiling(geometry, 4).parts > 1


@triton.jit
def _block_far_away_kernel(
    x_ptr, codes_ptr, levels_ptr, steps_ptr, offset_ptr, factor_ptr, seed_ptr, target_ptr, first_ptr, groups_ptr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Quantize and decode the block at `first`, whose memory is the tensors', in groups of a block."""
    first, groups = tl.load(first_ptr), tl.load(groups_ptr)
    SIZE: tl.constexpr = 2**BITS
    codes_ptr, group = codes_ptr - first // 8 * BITS, first // 512 % groups
    levels_ptr, steps_ptr = levels_ptr - group * SIZE, steps_ptr - group * (SIZE - 1)
    offset_ptr, factor_ptr = offset_ptr - group, factor_ptr - group
    row, column = tl.zeros((1, 1), tl.int32), tl.arange(0, 64)[None, :]
    quantize_grid_tile(
        x_ptr - first, codes_ptr, levels_ptr, steps_ptr, offset_ptr, factor_ptr, seed_ptr,
        first, row, column, 64, 1, 512, groups,
        BITS, True, SIZE, GROUP_ROWS=True, MARKS=False, BLOCK=512, INNER=0, ALIGNED=True, RAGGED=False,
    )  # fmt: skip
    dequantize_grid_tile(
        codes_ptr, levels_ptr, offset_ptr, factor_ptr, None, target_ptr - first,
        first, row, column, 64, 1, 512, groups, 3e38,
        BITS, SIZE, GROUP_ROWS=True, BLOCK=512, INNER=0, ALIGNED=True, RAGGED=False,
    )  # fmt: skip


@pytest.mark.parametrize("first_block", [2**22, 2**23 + 5, 2**36])  # elements up to 2^45: columns beyond 2^32
def test_quantize_grid_blocks_far_into_a_tensor(first_block: int):
    torch.manual_seed(0)
    bit_width, seed, first, groups = 5, torch.tensor(99), first_block * BLOCK, first_block // 3
    grid = random_grid(1, 1 << bit_width, has_scale=False)
    steps, one = grid.steps(stochastic=True), torch.ones(1)
    x = torch.randn(BLOCK)
    codes, target = filled(BLOCK * bit_width // 8, torch.uint8, "cpu"), filled(BLOCK, x.dtype, "cpu")
    numbers = torch.tensor(first), torch.tensor(groups)
    _block_far_away_kernel[(1,)](x, codes, grid.levels, steps, grid.offset, one, seed, target, *numbers, bit_width)
    t = kernel_ops.positions(x - grid.offset, grid.levels, steps, stochastic=True)
    q = reference.round_codes(t, column_bits(torch.arange(first // 8, first // 8 + 64), seed).flatten())
    assert torch.equal(codes, reference.pack(q, bit_width, BLOCK))
    assert torch.equal(target, grid.offset + grid.levels[0, q])
