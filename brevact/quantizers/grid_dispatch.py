"""The passes of quantizers on grids over a tensor: by compiled kernels, or by the plain torch reference.

Everything between the passes is arithmetic on one number a group, in plain torch on the tensor's device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from brevact.quantizers import grid_reference
from brevact.quantizers.dispatch import flat_memory, kernels_for, refuse_wrapped
from brevact.quantizers.geometry import Geometry
from brevact.quantizers.grid import Grid


def ranges(flat: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Smallest and largest finite value of each group, and how many are not; see `grid_reference.ranges`.

    Args:
        flat: (n,) contiguous floating-point tensor.
        geometry: Its groups.

    Returns:
        `(low, high, missing)`, each (G,): float32, float32 and int64.
    """
    kernels = kernels_for(flat)
    if kernels is not None:
        return kernels.ranges(flat, geometry)
    refuse_wrapped(flat)
    return grid_reference.ranges(flat, geometry)


def moments(flat: Tensor, geometry: Geometry, offset: Tensor, inverse: Tensor) -> Tensor:
    """Counts, sums and sums of squares on either side of each group's offset; see `grid_reference.moments`.

    Args:
        flat: (n,) contiguous floating-point tensor.
        geometry: Its groups.
        offset: (G,) float32 offsets.
        inverse: (G,) float32 factors.

    Returns:
        (G, 6) int64.
    """
    kernels = kernels_for(flat, offset, inverse)
    if kernels is not None:
        return kernels.moments(flat, geometry, offset.contiguous(), inverse.contiguous())
    return grid_reference.moments(flat, geometry, offset, inverse)


def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: int | Tensor | None, codes: Tensor) -> None:
    """Quantize to codes of levels; see `grid_reference.quantize_grid`.

    Args:
        flat: (n,) contiguous floating-point tensor.
        geometry: Its blocks and groups.
        grid: Its levels.
        seed: Seed of stochastic rounding, None for nearest.
        codes: Receives the packed uint8 codes.
    """
    kernels = kernels_for(flat, codes, grid.levels)
    if kernels is not None:
        kernels.quantize_grid(flat, geometry, grid, seed, codes)
        return
    refuse_wrapped(flat)
    key = None if seed is None else torch.as_tensor(seed, device=flat.device)
    codes.copy_(grid_reference.quantize_grid(flat, geometry, grid, key))


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    """Decode, and multiply by a tensor of the same dtype and memory order.

    Args:
        codes: Packed uint8 codes.
        geometry: Blocks and groups.
        grid: Levels.
        other: Dense factor, or None.
        target: Tensor whose memory holds the elements densely in memory order; may be `other`.
    """
    kernels = kernels_for(target, codes, grid.levels, *(() if other is None else (other,)))
    if kernels is not None:
        kernels.dequantize_grid(codes, geometry, grid, other, target)
        return
    flat = flat_memory(target, geometry.numel)
    if other is None:
        grid_reference.dequantize_grid(codes, geometry, grid, flat)
        return
    decoded = grid_reference.dequantize_grid(codes, geometry, grid, torch.empty_like(flat))
    torch.mul(decoded, flat_memory(other, geometry.numel), out=flat)
