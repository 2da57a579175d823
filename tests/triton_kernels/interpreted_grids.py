"""Interpreted kernels of quantizers on grids; see `test_interpreted`. Tensors are small, as in `interpreted_groups`."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from brevact.geometry import Geometry
from brevact.triton_kernels.grids import moments_kernel
from brevact.triton_kernels.groups import RANGES_TILE, group_of, ranges_kernel
from brevact.triton_kernels.launch import over_groups
from tests.crosses import taking_turns
from tests.quantizers.grid_cases import GridCase, buckets, channels, random_grid, values_around
from tests.triton_kernels.checks import SEED, check_grid, check_statistics

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 512


@pytest.mark.parametrize("bit_width, seed", taking_turns(range(1, 11), [None, SEED]))
def test_quantize_grid_bytes_for_every_bit_width(bit_width: int, seed: int | None):
    """Types take turns: what depends on them does not depend on the width."""
    torch.manual_seed(bit_width)
    geometry, dtype = buckets(BLOCK + 71, bit_width, 256), DTYPES[(bit_width + (seed is None)) % 3]
    marks = bit_width % 2 == 0
    grid = random_grid(geometry.groups, 1 << bit_width, marks=marks)
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
    grid = random_grid(geometry.groups, 8, marks=True)
    x = values_around(grid, geometry.numel, torch.bfloat16)
    check_grid(GridCase(x, geometry, grid, SEED, multiply=False))


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
    assert over_groups(ranges_kernel, geometry, RANGES_TILE).grid[1] > 1
    assert over_groups(moments_kernel, geometry, 512, 64).grid[1] > 1


@triton.jit
def _groups_far_away_kernel(first_ptr, inner_ptr, groups_ptr, group_ptr):
    offset = tl.arange(0, 512)
    group = group_of(tl.load(first_ptr), offset, tl.load(inner_ptr), tl.load(groups_ptr), INNER=0)
    tl.store(group_ptr + offset, group)


@pytest.mark.parametrize("first", [2**31, 2**32 + 8, 2**45 - 512])
@pytest.mark.parametrize("inner, groups", [(512, 2**20 // 3), (7, 2**40), (1, 99), (2**33, 3)])
def test_groups_of_elements_far_into_a_tensor(first: int, inner: int, groups: int):
    found = torch.empty(512, dtype=torch.int64)
    _groups_far_away_kernel[(1,)](*(torch.tensor(each) for each in (first, inner, groups)), found)
    assert torch.equal(found, (first + torch.arange(512)) // inner % groups)
