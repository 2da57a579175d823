"""Launches of quantizers on grids: passes over x that reduce groups, then codes of levels, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.triton_kernels import moments as moments_kernels
from brevact.triton_kernels.launch import THREADS, WIDEST_ACCESS, Launch, group_tiling, tiling
from brevact.triton_kernels.levels import dequantize_grid_kernel, quantize_grid_kernel
from brevact.triton_kernels.moments import moments_kernel
from brevact.triton_kernels.ranges import ranges_kernel
from brevact.triton_kernels.uniform import RANGES_TILE, UniformPlan

_LEAST_OF_MOMENTS = 64
"""Elements of a group that a part has at least: its six sums are 48 bytes."""


@dataclass(frozen=True)
class GridRows:
    """Rows of float32 levels, one for all groups or one a group, and where groups lie on them.

    Args:
        levels: (R, N) contiguous levels, each row ascending; R is 1 or the number of groups, N at least 2.
        steps: (R, N - 1) contiguous: ascending bounds of nearest rounding, or inverse gaps for stochastic rounding.
            None for decoding.
        offset: (G,) contiguous offsets, or None for 0.
        factor: (G,) contiguous factors, or None for 1: inverse scales for quantizing, scales for decoding. A sign bit
            flags a group.
        marks: Whether elements that are not finite take the last code.
    """

    levels: Tensor
    steps: Tensor | None
    offset: Tensor | None
    factor: Tensor | None
    marks: bool = False


def ranges(x: Tensor, plan: UniformPlan) -> tuple[Launch, Tensor]:
    """Find the ranges of groups.

    Args:
        x: float32, bfloat16 or float16 tensor, dense in memory order.
        plan: The tensor's plan.

    Returns:
        The kernel to launch, and what it writes: (parts, 3, G) int32 keys of the lowest and the highest finite
        value of parts of the groups, see `floats.key_of`, and numbers of elements that are not finite.
    """
    tiles = group_tiling(plan.numel, plan.inner, plan.groups, plan.one_run, RANGES_TILE)
    keys = x.new_empty((tiles.parts, 3, plan.groups), dtype=torch.int32)
    arguments = (x, keys, plan.numel, plan.inner, plan.groups, tiles.repeats)
    return Launch(ranges_kernel, (tiles.group_tiles, tiles.parts), arguments, tiles.shape), keys


def moments(x: Tensor, offset: Tensor, inverse: Tensor, plan: UniformPlan) -> tuple[Launch, Tensor]:
    """Count and sum the values on either side of each group's offset.

    Args:
        x: float32, bfloat16 or float16 tensor, dense in memory order.
        offset: (G,) contiguous float32 offsets.
        inverse: (G,) contiguous float32 factors.
        plan: The tensor's plan.

    Returns:
        The kernel to launch, and what it writes: (parts, G, 6) int64 moments of parts of the groups.
    """
    itemsize = x.itemsize if plan.inner % WIDEST_ACCESS == 0 else 4  # more masks of single elements would spill
    tile = THREADS * WIDEST_ACCESS // itemsize
    tiles = group_tiling(plan.numel, plan.inner, plan.groups, plan.one_run, tile, _LEAST_OF_MOMENTS)
    sums = x.new_empty((tiles.parts, plan.groups, moments_kernels.COLUMNS.value), dtype=torch.int64)
    arguments = (x, offset, inverse, sums, plan.numel, plan.inner, plan.groups, tiles.repeats)
    return Launch(moments_kernel, (tiles.group_tiles, tiles.parts), arguments, tiles.shape), sums


def quantize_grid(x: Tensor, codes: Tensor, rows: GridRows, seed: Tensor | None, plan: UniformPlan) -> Launch:
    """Quantize a dense tensor to codes of levels.

    Args:
        x: float32, bfloat16 or float16 tensor, dense in memory order.
        codes: Packed uint8 codes, written.
        rows: The levels, with steps.
        seed: 0-d int64 tensor for stochastic rounding, else None.
        plan: The tensor's plan.

    Returns:
        The kernel to launch.
    """
    itemsize = x.itemsize if plan.rows_in_groups else max(x.itemsize, 4)  # more elements' groups than 32 would spill
    constants, grid, threads = _tiles(rows, plan, itemsize)
    arguments = (x, codes, rows.levels, rows.steps, rows.offset, rows.factor, seed, plan.numel, plan.run, plan.groups)
    constants |= {"STOCHASTIC": plan.stochastic, "MARKS": rows.marks}
    return Launch(quantize_grid_kernel, grid, arguments, constants, threads)


def dequantize_grid(codes: Tensor, rows: GridRows, other: Tensor | None, target: Tensor, plan: UniformPlan) -> Launch:
    """Decode codes of levels into a dense tensor, and multiply.

    Args:
        codes: Packed uint8 codes.
        rows: The levels.
        other: Dense factor of the type of `target`, or None.
        target: float32, bfloat16 or float16 tensor, dense in memory order, written; may be `other`.
        plan: The tensor's plan.

    Returns:
        The kernel to launch.
    """
    constants, grid, threads = _tiles(rows, plan, target.itemsize)
    largest = torch.finfo(target.dtype).max
    tensors = (codes, rows.levels, rows.offset, rows.factor, other, target)
    return Launch(
        dequantize_grid_kernel, grid, (*tensors, plan.numel, plan.run, plan.groups, largest), constants, threads
    )


def _tiles(rows: GridRows, plan: UniformPlan, itemsize: int) -> tuple[dict[str, int | bool], tuple[int], int]:
    """Constants, programs and threads of the kernels of levels."""
    tiles = tiling(plan.numel, plan.block_size, itemsize)
    constants = {
        "BIT_WIDTH": plan.bit_width,
        "SIZE": rows.levels.shape[1],
        "GROUP_ROWS": rows.levels.shape[0] > 1,
        "BLOCK": plan.block_size,
        "ROWS": tiles.rows,
        "COLUMNS_2": tiles.columns,
        "INNER": plan.known_inner,
        "ALIGNED": plan.rows_in_groups,
    }
    return constants, (tiles.programs,), tiles.threads
