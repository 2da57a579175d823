"""Quantizers on grids on CPU tensors: a part of `cpu`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from brevact import cpu_kernels
from brevact.quantizers.cpu_kinds import KINDS
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
    keys = cpu_kernels.range_keys(flat.data_ptr(), _grid_plan(geometry, flat.dtype, False), torch.get_num_threads())
    return ranges_of_keys(torch.from_numpy(keys))


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
    plan = _grid_plan(geometry, flat.dtype, False)
    pointers = flat.data_ptr(), offset.data_ptr(), inverse.data_ptr()
    return torch.from_numpy(cpu_kernels.moments(*pointers, plan, torch.get_num_threads()).sum(0).T)


def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: int | Tensor | None, codes: Tensor) -> None:
    """See `grid_dispatch.quantize_grid`.

    Args:
        flat: (n,) contiguous tensor.
        geometry: Its blocks and groups.
        grid: Its levels.
        seed: Signed 64-bit int or 0-d int64 tensor, None for nearest.
        codes: Receives the packed codes.
    """
    stochastic = seed is not None
    levels, steps = grid.levels.contiguous(), grid.steps(stochastic=stochastic).contiguous()
    offset, inverse = _affine(grid.offset, grid.inverse)  # in names, so that their memory lives on
    affine = (offset.data_ptr(), inverse.data_ptr()) if inverse is not None and offset is not None else (0, 0)
    rows = cpu_kernels.GridRows(levels.data_ptr(), steps.data_ptr(), levels.shape[1], levels.shape[0])
    plan = _grid_plan(geometry, flat.dtype, stochastic)
    key = 0 if seed is None else int(seed)
    pointers = flat.data_ptr(), codes.data_ptr()
    cpu_kernels.quantize_grid(*pointers, affine, rows, grid.marks, key, plan, torch.get_num_threads())


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    """See `grid_dispatch.dequantize_grid`.

    Args:
        codes: Packed codes.
        geometry: Blocks and groups.
        grid: Levels.
        other: Dense factor, or None.
        target: Dense result; may be `other`.
    """
    levels = grid.levels.contiguous()
    offset, scale = _affine(grid.offset, grid.scale)
    affine = (offset.data_ptr(), scale.data_ptr()) if scale is not None and offset is not None else (0, 0)
    rows = cpu_kernels.GridRows(levels.data_ptr(), 0, levels.shape[1], levels.shape[0])
    factor = 0 if other is None else other.data_ptr()
    plan = _grid_plan(geometry, target.dtype, False)
    pointers = factor, target.data_ptr()
    flagged = grid.scale is not None and bool(torch.signbit(grid.scale).any())
    cpu_kernels.dequantize_grid(codes.data_ptr(), affine, rows, flagged, *pointers, plan, torch.get_num_threads())


def _affine(offset: Tensor | None, factor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Both, contiguous, or neither: what is missing is 1, or -0.0, to which adding changes no zero either."""
    if factor is None:
        if offset is None:
            return None, None
        factor = torch.ones_like(offset)
    elif offset is None:
        offset = torch.full_like(factor, -0.0)
    return offset.contiguous(), factor.contiguous()


@functools.lru_cache(maxsize=4096)
def _grid_plan(geometry: Geometry, dtype: torch.dtype, stochastic: bool) -> cpu_kernels.UniformPlan:
    """What the kernels of grids need to know of a tensor."""
    return cpu_kernels.UniformPlan(
        numel=geometry.numel,
        bit_width=geometry.bit_width,
        block_size=geometry.block_size,
        inner=geometry.inner if geometry.groups != 1 else max(geometry.numel, 1),
        groups=geometry.groups,
        one_run=geometry.one_run,
        stochastic=stochastic,
        scale_kind=cpu_kernels.FLOAT32,
        minimum_kind=cpu_kernels.FLOAT32,
        kind=KINDS[dtype],
    )
