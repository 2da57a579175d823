"""Quantizers on grids on CUDA and ROCm tensors: a part of `gpu`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from brevact import triton_kernels
from brevact.quantizers.geometry import Geometry
from brevact.quantizers.grid import Grid
from brevact.quantizers.range_keys import ranges_of_keys


def ranges(flat: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """See `grid_dispatch.ranges`.

    Args:
        flat: (n,) contiguous tensor.
        geometry: Its groups.

    Returns:
        `(low, high, missing)`, each (G,): float32, float32 and int64.
    """
    launch, keys = triton_kernels.ranges(flat, grid_plan_of(geometry, False))
    launch.run()
    return ranges_of_keys(keys)


def moments(flat: Tensor, geometry: Geometry, offset: Tensor, inverse: Tensor) -> Tensor:
    """See `grid_dispatch.moments`.

    Args:
        flat: (n,) contiguous tensor.
        geometry: Its groups.
        offset: (G,) contiguous float32 offsets.
        inverse: (G,) contiguous float32 factors.

    Returns:
        (G, 6) int64.
    """
    launch, sums = triton_kernels.moments(flat, offset, inverse, grid_plan_of(geometry, False))
    launch.run()
    return sums.sum(0)


def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: int | Tensor | None, codes: Tensor) -> None:
    """See `grid_dispatch.quantize_grid`. The kernel reads the seed from device memory.

    Args:
        flat: (n,) contiguous tensor.
        geometry: Its blocks and groups.
        grid: Its levels.
        seed: Signed 64-bit int or 0-d int64 tensor, None for nearest.
        codes: Receives the packed codes.
    """
    key: Tensor | None = None
    if seed is not None:
        key = seed.to(flat.device) if isinstance(seed, Tensor) else flat.new_full((), seed, dtype=torch.int64)
    rows = _rows(grid, grid.steps(stochastic=seed is not None), grid.inverse)
    triton_kernels.quantize_grid(flat, codes, rows, key, grid_plan_of(geometry, seed is not None)).run()


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    """See `grid_dispatch.dequantize_grid`.

    Args:
        codes: Packed codes.
        geometry: Blocks and groups.
        grid: Levels.
        other: Dense factor, or None.
        target: Dense result; may be `other`.
    """
    rows = _rows(grid, None, grid.scale)
    triton_kernels.dequantize_grid(codes, rows, other, target, grid_plan_of(geometry, False)).run()


def _rows(grid: Grid, steps: Tensor | None, factor: Tensor | None) -> triton_kernels.GridRows:
    """The grid as the kernels read it."""
    steps, offset, factor = (None if x is None else x.contiguous() for x in (steps, grid.offset, factor))
    return triton_kernels.GridRows(grid.levels.contiguous(), steps, offset, factor, marks=grid.marks)


@functools.lru_cache(maxsize=4096)
def grid_plan_of(geometry: Geometry, stochastic: bool) -> triton_kernels.UniformPlan:
    """What the kernels of grids need to know of a tensor.

    Args:
        geometry: Its blocks and groups.
        stochastic: Rounding.

    Returns:
        Its plan.
    """
    return triton_kernels.UniformPlan(
        numel=geometry.numel,
        bit_width=geometry.bit_width,
        block_size=geometry.block_size,
        inner=geometry.inner,
        groups=geometry.groups,
        one_run=geometry.one_run,
        stochastic=stochastic,
    )
