"""Launches of block means and residuals."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2

from brevact.geometry import MapBlocks
from brevact.triton_kernels.block_means import add_means_kernel, mean_kernel, subtract_means_kernel
from brevact.triton_kernels.launch import Launch

_MEANS = 128  # blocks a program
_TILE = 2048  # elements a program
_MOST_COLUMNS = 512


def split_maps(flat: Tensor, blocks: MapBlocks, low: Tensor, residual: Tensor) -> None:
    """One kernel finds the means, and another one subtracts them."""
    if not _fits(blocks):
        return NotImplemented
    sides = _constants(blocks)
    arguments = (flat, low, blocks.blocks, *blocks.sides)
    Launch(mean_kernel, (-(-blocks.blocks // _MEANS),), arguments, {**sides, "P": _MEANS}).run()
    grid, tile = _tiles(blocks)
    Launch(subtract_means_kernel, grid, (flat, low, residual, _rows(blocks), *blocks.sides), {**sides, **tile}).run()


def join_maps(residual: Tensor, blocks: MapBlocks, low: Tensor, other: Tensor | None, target: Tensor) -> None:
    """See the reference."""
    if not _fits(blocks):
        return NotImplemented
    grid, tile = _tiles(blocks)
    arguments = (residual, low, other, target, _rows(blocks), *blocks.sides, torch.finfo(target.dtype).max)
    Launch(add_means_kernel, grid, arguments, {**_constants(blocks), **tile}).run()


def _fits(blocks: MapBlocks) -> bool:
    """Whether 32 bits count the blocks and the rows of all maps, as the kernels do."""
    return max(blocks.blocks, _rows(blocks)) + _TILE < 1 << 31


def _rows(blocks: MapBlocks) -> int:
    """Rows of all maps."""
    return blocks.maps * blocks.sides[0] * blocks.sides[1]


def _constants(blocks: MapBlocks) -> dict[str, int]:
    """Sides of a block, as kernels are compiled for them."""
    return dict(zip(("BLOCK_DEPTH", "BLOCK_HEIGHT", "BLOCK_WIDTH"), blocks.block, strict=True))


def _tiles(blocks: MapBlocks) -> tuple[tuple[int], dict[str, int]]:
    """Grid, and rows and columns of a program."""
    columns = min(next_power_of_2(blocks.sides[2]), _MOST_COLUMNS)
    rows = _TILE // columns
    grid = -(-_rows(blocks) // rows) * -(-blocks.sides[2] // columns)
    return (grid,), {"R": rows, "C": columns}
