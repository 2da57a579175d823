"""Launchers of the kernels of block means."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from brevact.cpu_kernels.memory import LARGEST_BLOCK
from brevact.cpu_kernels.pooling_blocks import columns_of_tile, join_maps_tiles, rows_at_once, split_maps_tiles
from brevact.cpu_kernels.teams import share


@dataclass(frozen=True, kw_only=True)
class PoolingPlan:
    """What the kernels of block means need to know of a tensor, besides addresses.

    Args:
        maps: Number of maps.
        sides: Depth, height and width of a map, all positive.
        block: Sides of a block, none larger than the map's; at most `memory.LARGEST_BLOCK` columns.
    """

    maps: int
    sides: tuple[int, int, int]
    block: tuple[int, int, int]
    tiles: int = field(init=False)
    tile_size: int = field(init=False)
    table: np.ndarray = field(init=False, repr=False, compare=False)
    address: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Fill the table that the kernels read."""
        tile = columns_of_tile(self.block[2], self.sides[2])
        rows = rows_at_once(self.block[1], self.sides[2])
        table = np.array((*self.sides, *self.block, tile, rows), dtype=np.int64)
        lines = math.prod(-(-side // block) for side, block in zip(self.sides[:2], self.block[:2], strict=True))
        tiles = self.maps * lines * -(-self.sides[2] // tile)
        object.__setattr__(self, "tiles", tiles)
        object.__setattr__(self, "tile_size", max(self.maps * math.prod(self.sides) // max(tiles, 1), 1))
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "address", table.ctypes.data)


def can_pool(block_width: int) -> bool:
    """Whether the kernels take blocks of this many columns: their scratch is limited.

    Args:
        block_width: Columns of a block.

    Returns:
        True if a plan can be made.
    """
    return block_width <= LARGEST_BLOCK


def split_maps(source: int, kind: int, low: int, residual: int, plan: PoolingPlan, threads: int) -> None:
    """Block means in float16, and what they leave.

    Args:
        source: Address of the elements, map by map.
        kind: Code of their type, see `floats`.
        low: Address of the means, written.
        residual: Address of the float32 residual, written.
        plan: The tensor's plan.
        threads: Most threads to use.
    """
    share(split_maps_tiles, (source, kind, low, residual, plan.address), plan.tiles, plan.tile_size, threads)


def join_maps(residual: int, low: int, other: int, target: int, kind: int, plan: PoolingPlan, threads: int) -> None:
    """Add upsampled means to a residual, and multiply.

    Args:
        residual: Address of the float32 residual.
        low: Address of the float16 means.
        other: Address of a factor of the target's type, or 0.
        target: Address of the result, written; may be `residual` or `other`.
        kind: Code of its type.
        plan: The tensor's plan.
        threads: Most threads to use.
    """
    arguments = (residual, low, other, target, kind, plan.address)
    share(join_maps_tiles, arguments, plan.tiles, plan.tile_size, threads)
