"""Launches of quantizers on grids: passes over x that reduce groups, then codes of levels, and back."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from brevact.geometry import Geometry, Grid, ranges_of_keys
from brevact.triton_kernels import moments as moments_kernels
from brevact.triton_kernels.launch import (
    THREADS,
    WIDEST_ACCESS,
    Program,
    over_blocks,
    over_groups,
    rows_in_groups,
    seed_on,
)
from brevact.triton_kernels.levels import dequantize_grid_kernel, quantize_grid_kernel
from brevact.triton_kernels.moments import moments_kernel
from brevact.triton_kernels.ranges import RANGES_TILE, ranges_kernel

_LEAST_OF_MOMENTS = 64
"""Elements of a group that a part has at least: its six sums are 48 bytes."""


def ranges(flat: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    program = over_groups(ranges_kernel, geometry, RANGES_TILE)
    keys = flat.new_empty((program.grid[1], 4, geometry.groups), dtype=torch.int32)
    program.run(flat, keys)
    return ranges_of_keys(keys)


def moments(flat: Tensor, geometry: Geometry, offset: Tensor, inverse: Tensor) -> Tensor:
    itemsize = flat.itemsize if geometry.inner % WIDEST_ACCESS == 0 else 4  # more masks of single elements would spill
    program = over_groups(moments_kernel, geometry, THREADS * WIDEST_ACCESS // itemsize, _LEAST_OF_MOMENTS)
    sums = flat.new_empty((program.grid[1], geometry.groups, moments_kernels.COLUMNS.value), dtype=torch.int64)
    program.run(flat, offset.contiguous(), inverse.contiguous(), sums)
    return sums.sum(0)


def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: int | Tensor | None, codes: Tensor) -> None:
    if len(grid.levels) > 1:
        return NotImplemented
    itemsize = flat.itemsize if rows_in_groups(geometry) else max(flat.itemsize, 4)  # more groups would spill
    stochastic = seed is not None
    constants = {"STOCHASTIC": stochastic, "MARKS": grid.marks}
    program = _program(quantize_grid_kernel, geometry, itemsize, SIZE=grid.levels.shape[1], **constants)
    rows = _contiguous(grid.levels, grid.steps(stochastic=stochastic), grid.offset, grid.inverse)
    program.run(flat, codes, *rows, seed_on(flat.device, seed))


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    if len(grid.levels) > 1:
        return NotImplemented
    size, largest = grid.levels.shape[1], torch.finfo(target.dtype).max
    program = _program(dequantize_grid_kernel, geometry, target.itemsize, SIZE=size, largest=largest)
    program.run(codes, *_contiguous(grid.levels, grid.offset, grid.scale), other, target)


def _contiguous(*parts: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if part is None else part.contiguous() for part in parts)


@functools.lru_cache(maxsize=4096)
def _program(kernel: Any, geometry: Geometry, itemsize: int, **values: Any) -> Program:
    return over_blocks(kernel, geometry, itemsize, **values)
