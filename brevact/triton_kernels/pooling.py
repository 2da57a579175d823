"""Launches of block means and residuals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton import next_power_of_2

from brevact.triton_kernels.block_means import add_means_kernel, mean_kernel, subtract_means_kernel
from brevact.triton_kernels.launch import Launch

_MEANS = 128  # blocks a program
_TILE = 2048  # elements a program
_MOST_COLUMNS = 512


@dataclass(frozen=True, kw_only=True)
class PoolingPlan:
    """What the kernels of block means need to know of a tensor.

    Args:
        maps: Number of maps.
        sides: Depth, height and width of a map, all positive.
        block: Sides of a block, none larger than the map's.
    """

    maps: int
    sides: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.maps * math.prod(-(-side // block) for side, block in zip(self.sides, self.block, strict=True))

    @property
    def rows(self) -> int:
        """Rows of all maps."""
        return self.maps * self.sides[0] * self.sides[1]

    @property
    def constants(self) -> dict[str, int]:
        """Sides of a block, as kernels are compiled for them."""
        return dict(zip(("BLOCK_DEPTH", "BLOCK_HEIGHT", "BLOCK_WIDTH"), self.block, strict=True))


def can_pool(plan: PoolingPlan) -> bool:
    """Whether the kernels take a tensor: they count blocks and rows in 32 bits.

    Args:
        plan: The tensor's plan.

    Returns:
        True if they do.
    """
    return max(plan.blocks, plan.rows) + _TILE < 1 << 31


def split_maps(x: Tensor, low: Tensor, residual: Tensor, plan: PoolingPlan) -> tuple[Launch, Launch]:
    """Block means in float16, and what they leave.

    Args:
        x: Contiguous elements, map by map.
        low: float16 means, written.
        residual: float32 residual, written.
        plan: The tensor's plan.

    Returns:
        The kernels to launch, in this order.
    """
    means = Launch(
        mean_kernel, (-(-plan.blocks // _MEANS),), (x, low, plan.blocks, *plan.sides), {**plan.constants, "P": _MEANS}
    )
    grid, tile = _tiles(plan)
    rest = Launch(subtract_means_kernel, grid, (x, low, residual, plan.rows, *plan.sides), {**plan.constants, **tile})
    return means, rest


def join_maps(residual: Tensor, low: Tensor, other: Tensor | None, target: Tensor, plan: PoolingPlan) -> Launch:
    """Add upsampled means to a residual, and multiply.

    Args:
        residual: float32 residual, map by map.
        low: float16 means.
        other: Contiguous factor of the target's type, or None.
        target: Contiguous result, written; may be `residual` or `other`.
        plan: The tensor's plan.

    Returns:
        The kernel to launch.
    """
    grid, tile = _tiles(plan)
    largest = torch.finfo(target.dtype).max
    arguments = (residual, low, other, target, plan.rows, *plan.sides, largest)
    return Launch(add_means_kernel, grid, arguments, {**plan.constants, **tile})


def _tiles(plan: PoolingPlan) -> tuple[tuple[int], dict[str, int]]:
    """Grid, and rows and columns of a program."""
    columns = min(next_power_of_2(plan.sides[2]), _MOST_COLUMNS)
    rows = _TILE // columns
    grid = -(-plan.rows // rows) * -(-plan.sides[2] // columns)
    return (grid,), {"R": rows, "C": columns}
