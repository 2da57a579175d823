"""Maps divided into blocks: block means in float16, and what they leave, in plain torch.

Float arithmetic is float32, elementwise and in a fixed order, so that every device computes the same bits.
Shapes: M maps of D by H by W elements, divided into d by h by w blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.quantizers.layout import Layout

SPATIAL = 3
"""Axes of a map; shapes with fewer have sides of 1 in front."""
LARGEST_MEAN = 65504.0
"""Largest finite float16."""


@dataclass(frozen=True)
class MapBlocks:
    """How the distinct elements of a tensor divide into maps, and a map into blocks.

    Args:
        maps: Number of maps M.
        sides: D, H and W of a map.
        block: Sides of a block, none larger than the map's; the last block along an axis may be smaller.
    """

    maps: int
    sides: tuple[int, int, int]
    block: tuple[int, int, int]

    @staticmethod
    def of(layout: Layout, block: int) -> MapBlocks:
        """Maps of a tensor: one for each index of the first two axes (of the first, if there are no more than two).

        Axes of size 1 at the end are left out first: (N, C, 1, 1) is divided as (N, C).

        >>> MapBlocks.of(Layout.of(torch.empty(4, 16, 14, 14)), 8)
        MapBlocks(maps=64, sides=(1, 14, 14), block=(1, 8, 8))
        >>> MapBlocks.of(Layout.of(torch.empty(4, 100)), 8)
        MapBlocks(maps=4, sides=(1, 1, 100), block=(1, 1, 8))

        Args:
            layout: Layout of the tensor. An expanded axis counts as one of size 1: its repeats are not stored. Of more
                than five axes, the last three are a map's.
            block: Side of a block.

        Returns:
            The division; a tensor without elements has no maps.
        """
        shape = layout.shape[: max(layout.dims, default=-1) + 1]
        shape = tuple(size if d in layout.dims else 1 for d, size in enumerate(shape))
        leading = max(min(2, len(shape) - 1), len(shape) - SPATIAL, 0)
        spatial = shape[leading:]
        depth, height, width = (*(1,) * (SPATIAL - len(spatial)), *spatial)
        sides = depth, height, width
        maps = math.prod(shape[:leading]) if layout.numel else 0
        return MapBlocks(maps, sides, (min(depth, block), min(height, block), min(width, block)))

    @property
    def elements(self) -> int:
        """Elements of a map."""
        return math.prod(self.sides)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Blocks along each axis of a map: d, h and w."""
        depth, height, width = (-(-side // max(block, 1)) for side, block in zip(self.sides, self.block, strict=True))
        return depth, height, width

    @property
    def blocks(self) -> int:
        """Blocks of all maps."""
        return self.maps * math.prod(self.counts)


def split_maps(flat: Tensor, blocks: MapBlocks, low: Tensor, residual: Tensor) -> None:
    """Mean of every block, and what upsampled means leave: low = float16(mean), residual = x - upsample(low).

    The elements of a block are added row by row, in lexicographic order of the first two axes, and then along the last
    one; the sum is divided by their number. Means beyond the range of float16 become its largest finite value, and 0
    where sums of either sign overflow. A block that holds NaN or an infinity has none: what is stored is NaN, what is
    subtracted 0, so that its NaN or infinity stays in the residual.

    Args:
        flat: (M * D * H * W,) floating-point tensor, map by map.
        blocks: Its division.
        low: (M * d * h * w,) float16 tensor, written.
        residual: (M * D * H * W,) float32 tensor, written.
    """
    x_MDHW = flat.view(blocks.maps, *blocks.sides)
    sums_MdhW = flat.new_zeros((blocks.maps, *blocks.counts[:2], blocks.sides[2]), dtype=torch.float32)
    finite_MdhW = torch.ones_like(sums_MdhW, dtype=torch.bool)
    for rows in _rows(blocks):
        part = x_MDHW[rows].float()
        sums_MdhW[:, : part.shape[1], : part.shape[2]] += part
        finite_MdhW[:, : part.shape[1], : part.shape[2]] &= part.isfinite()
    finite_Mdhw = torch.ones((blocks.maps, *blocks.counts), dtype=torch.bool, device=flat.device)
    sums_Mdhw = flat.new_zeros((blocks.maps, *blocks.counts), dtype=torch.float32)
    for k in range(blocks.block[2]):
        column = sums_MdhW[..., k :: blocks.block[2]]
        sums_Mdhw[..., : column.shape[-1]] += column
        finite_Mdhw[..., : column.shape[-1]] &= finite_MdhW[..., k :: blocks.block[2]]
    mean = sums_Mdhw / _elements_of_blocks(blocks, flat.device)
    mean = mean.nan_to_num(nan=0.0).clamp(-LARGEST_MEAN, LARGEST_MEAN)
    low.copy_(mean.masked_fill(~finite_Mdhw, float("nan")).flatten())
    low_MdhW = _widened(low, blocks)
    residual_MDHW = residual.view(x_MDHW.shape)
    for rows in _rows(blocks):
        part = x_MDHW[rows].float()
        residual_MDHW[rows] = part - low_MdhW[:, : part.shape[1], : part.shape[2]]


def join_maps(residual: Tensor, blocks: MapBlocks, low: Tensor, out: Tensor) -> Tensor:
    """The inverse of `split_maps`: upsample(low) + residual, clamped to the finite range of the output's type.

    Args:
        residual: (M * D * H * W,) float32 tensor.
        blocks: The division into maps.
        low: (M * d * h * w,) float16 tensor.
        out: (M * D * H * W,) floating-point tensor, overwritten; may be `residual`.

    Returns:
        `out`.
    """
    limit = min(torch.finfo(out.dtype).max, torch.finfo(torch.float32).max)
    residual_MDHW, out_MDHW = residual.view(blocks.maps, *blocks.sides), out.view(blocks.maps, *blocks.sides)
    low_MdhW = _widened(low, blocks)
    for rows in _rows(blocks):
        part = residual_MDHW[rows]
        out_MDHW[rows] = (low_MdhW[:, : part.shape[1], : part.shape[2]] + part).clamp(-limit, limit)
    return out


def _rows(blocks: MapBlocks) -> Iterator[tuple[slice, slice, slice]]:
    """Index of row i, j of every block that has one."""
    for i in range(blocks.block[0]):
        for j in range(blocks.block[1]):
            yield slice(None), slice(i, None, blocks.block[0]), slice(j, None, blocks.block[1])


def _widened(low: Tensor, blocks: MapBlocks) -> Tensor:
    """Means in float32, 0 for NaN, repeated along the last axis: (M, d, h, W)."""
    column = torch.arange(blocks.sides[2], device=low.device) // max(blocks.block[2], 1)
    return low.view(blocks.maps, *blocks.counts).float().nan_to_num(nan=0.0).index_select(3, column)


def _elements_of_blocks(blocks: MapBlocks, device: torch.device) -> Tensor:
    """Number of elements of each block of a map: (d, h, w) float32."""
    depth, height, width = (
        (side - torch.arange(count, device=device) * block).clamp(max=block)
        for side, block, count in zip(blocks.sides, blocks.block, blocks.counts, strict=True)
    )
    return (depth[:, None, None] * height[:, None] * width).float()
