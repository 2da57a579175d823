"""Launches of quantizers on grids: passes over x that reduce groups, then codes of levels, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from brevact.geometry import Geometry, Grid, ranges_of_keys
from brevact.triton_kernels import moments as moments_kernels
from brevact.triton_kernels.launch import THREADS, WIDEST_ACCESS, GroupTiling, Launch, group_tiling, seed_on, tiling
from brevact.triton_kernels.levels import dequantize_grid_kernel, quantize_grid_kernel
from brevact.triton_kernels.moments import moments_kernel
from brevact.triton_kernels.ranges import ranges_kernel
from brevact.triton_kernels.uniform import RANGES_TILE, one_pass, rows_in_groups, run_of

_LEAST_OF_MOMENTS = 64
"""Elements of a group that a part has at least: its six sums are 48 bytes."""


def ranges(flat: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parts of large groups have keys of their own, see `floats.key_of`, which are then joined."""
    tiles = group_tiling(geometry, RANGES_TILE)
    keys = flat.new_empty((tiles.parts, 4, geometry.groups), dtype=torch.int32)
    arguments = (flat, keys, geometry.numel, geometry.inner, geometry.groups, tiles.repeats)
    Launch(ranges_kernel, (tiles.group_tiles, tiles.parts), arguments, tiles.shape).run()
    return ranges_of_keys(keys)


def moments(flat: Tensor, geometry: Geometry, offset: Tensor, inverse: Tensor) -> Tensor:
    """Parts of large groups have sums of their own, which are then joined."""
    tiles = moments_tiling(geometry, flat.itemsize)
    sums = flat.new_empty((tiles.parts, geometry.groups, moments_kernels.COLUMNS.value), dtype=torch.int64)
    sizes = (geometry.numel, geometry.inner, geometry.groups, tiles.repeats)
    arguments = (flat, offset.contiguous(), inverse.contiguous(), sums, *sizes)
    Launch(moments_kernel, (tiles.group_tiles, tiles.parts), arguments, tiles.shape).run()
    return sums.sum(0)


def moments_tiling(geometry: Geometry, itemsize: int) -> GroupTiling:
    """Tiles of the kernel of moments, for elements of so many bytes."""
    itemsize = itemsize if geometry.inner % WIDEST_ACCESS == 0 else 4  # more masks of single elements would spill
    return group_tiling(geometry, THREADS * WIDEST_ACCESS // itemsize, _LEAST_OF_MOMENTS)


def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: int | Tensor | None, codes: Tensor) -> None:
    """See the reference."""
    itemsize = flat.itemsize if rows_in_groups(geometry) else max(flat.itemsize, 4)  # more groups would spill
    constants, programs, threads = _tiles(grid, geometry, itemsize)
    constants |= {"STOCHASTIC": seed is not None, "MARKS": grid.marks}
    rows = _contiguous(grid.levels, grid.steps(stochastic=seed is not None), grid.offset, grid.inverse)
    sizes = (geometry.numel, run_of(geometry), geometry.groups)
    arguments = (flat, codes, *rows, seed_on(flat.device, seed), *sizes)
    Launch(quantize_grid_kernel, programs, arguments, constants, threads).run()


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    """See the reference."""
    constants, programs, threads = _tiles(grid, geometry, target.itemsize)
    sizes = (geometry.numel, run_of(geometry), geometry.groups, torch.finfo(target.dtype).max)
    arguments = (codes, *_contiguous(grid.levels, grid.offset, grid.scale), other, target, *sizes)
    Launch(dequantize_grid_kernel, programs, arguments, constants, threads).run()


def _contiguous(*parts: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if part is None else part.contiguous() for part in parts)


def _tiles(grid: Grid, geometry: Geometry, itemsize: int) -> tuple[dict[str, int | bool], tuple[int], int]:
    """Constants, programs and threads of the kernels of levels."""
    tiles = tiling(geometry.numel, geometry.block_size, itemsize)
    constants = {
        "BIT_WIDTH": geometry.bit_width,
        "SIZE": grid.levels.shape[1],
        "GROUP_ROWS": grid.levels.shape[0] > 1,
        "BLOCK": geometry.block_size,
        "ROWS": tiles.rows,
        "COLUMNS_2": tiles.columns,
        "INNER": geometry.inner if one_pass(geometry) else 0,
        "ALIGNED": rows_in_groups(geometry),
    }
    return constants, (tiles.programs,), tiles.threads
