"""What the kernels of block means read about the maps of a tensor: a table of int64 in memory."""

from __future__ import annotations

import functools
import math

import numpy as np

from brevact.geometry import MapBlocks

DEPTH, HEIGHT, WIDTH, BLOCK_DEPTH, BLOCK_HEIGHT, BLOCK_WIDTH, TILE, ROWS = range(8)
"""Fields of the table: sides of a map, sides of a block, columns of a tile (whole blocks), rows taken as one."""

_WIDE_TILE = 1024


def columns_of_tile(block_width: int, width: int) -> int:
    """Columns of a tile: whole blocks, at most `memory.LARGEST_BLOCK` columns if a block has no more."""
    return min(max(_WIDE_TILE // block_width, 1), -(-width // block_width)) * block_width


def rows_at_once(block_height: int, width: int) -> int:
    """Rows of a line of blocks that are subtracted from or added to as one: all, where maps are narrow, or one.

    They follow each other in memory; more than one are no more than a wide tile.
    """
    return block_height if block_height * width <= _WIDE_TILE else 1


class MapTable:
    """Maps and blocks, of at most `memory.LARGEST_BLOCK` columns, of a tensor with elements, as kernels read them."""

    def __init__(self, blocks: MapBlocks) -> None:
        tile = columns_of_tile(blocks.block[2], blocks.sides[2])
        rows = rows_at_once(blocks.block[1], blocks.sides[2])
        self.tiles = blocks.maps * math.prod(blocks.counts[:2]) * -(-blocks.sides[2] // tile)
        self.tile_size = max(blocks.maps * blocks.elements // max(self.tiles, 1), 1)
        self.table = np.array((*blocks.sides, *blocks.block, tile, rows), dtype=np.int64)
        self.address = self.table.ctypes.data


@functools.lru_cache(maxsize=4096)
def map_table(blocks: MapBlocks) -> MapTable:
    """Table of the maps of a tensor."""
    return MapTable(blocks)
