"""What the kernels read about a tensor: tables of int64 in memory, made once for each way to divide one."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import torch

from brevact.cpu_kernels import groups
from brevact.cpu_kernels.floats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from brevact.cpu_kernels.masks import BOOL
from brevact.cpu_kernels.pooling_blocks import columns_of_tile, rows_at_once
from brevact.geometry import Geometry, MapBlocks

KINDS = {
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16,
    torch.float16: FLOAT16,
    torch.float64: FLOAT64,
    torch.bool: BOOL,
}
"""The codes by which the kernels know types."""


class GroupTable:
    """Blocks and groups of a tensor, as the kernels of quantizers read them.

    Args:
        geometry: Blocks of at most `memory.LARGEST_BLOCK` elements, and groups.
        dtype: Type of the elements.
        rounding: `groups.NEAREST`, `STOCHASTIC` or `DITHERED`.
        scale_dtype: Type of the scales.
        minimum_dtype: Type of the minima.
        rows: Address of int64 indices, where the tensor is made of some groups of another one, at whose address its
            elements are read and written: group g is row rows[g], of `inner` elements. 0 otherwise.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        rounding: int,
        scale_dtype: torch.dtype = torch.float32,
        minimum_dtype: torch.dtype = torch.float32,
        rows: int = 0,
    ) -> None:
        self.geometry = geometry
        self.blocks = -(-geometry.numel // geometry.block_size)
        self.fused = geometry.one_run and geometry.block_size % geometry.inner == 0
        table = np.empty(11, dtype=np.int64)
        table[groups.NUMEL] = geometry.numel
        table[groups.BIT_WIDTH] = geometry.bit_width
        table[groups.BLOCK] = geometry.block_size
        table[groups.INNER] = geometry.inner
        table[groups.GROUPS] = geometry.groups
        table[groups.FUSED] = self.fused
        table[groups.ROUNDING] = rounding
        table[groups.SCALE_KIND] = KINDS[scale_dtype]
        table[groups.MINIMUM_KIND] = KINDS[minimum_dtype]
        table[groups.KIND] = KINDS[dtype]
        table[groups.ROWS] = rows
        self.table = table  # owns the memory at the address
        self.address = table.ctypes.data


@functools.lru_cache(maxsize=4096)
def grid_table(geometry: Geometry, dtype: torch.dtype, rounding: int) -> GroupTable:
    """Table of a tensor that is quantized to levels, of which a single group is one run."""
    if geometry.groups == 1:
        geometry = dataclasses.replace(geometry, inner=max(geometry.numel, 1))
    return GroupTable(geometry, dtype, rounding)


class MapTable:
    """Maps and blocks of a tensor, as the kernels of block means read them.

    Args:
        blocks: Division of a tensor with elements, of at most `memory.LARGEST_BLOCK` columns a block.
    """

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
