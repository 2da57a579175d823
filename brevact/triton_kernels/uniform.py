"""Launches of the uniform quantizer: one pass over x where a program holds whole groups, else two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from triton import next_power_of_2

from brevact.triton_kernels.dequantize import dequantize_kernel
from brevact.triton_kernels.launch import Launch, group_tiling, tiling
from brevact.triton_kernels.normalize import NO_ARGUMENTS, Normalization
from brevact.triton_kernels.quantize import quantize_calibrated_kernel, quantize_kernel
from brevact.triton_kernels.ranges import calibrate_kernel, join_ranges_kernel, ranges_kernel

LARGEST_TILE = 16384
"""Elements of the largest group that one program holds in registers."""
RANGES_TILE = 2048
"""Elements of a tile of the kernels that find ranges."""
_JOIN_TILE = 64


@dataclass(frozen=True, kw_only=True)
class UniformPlan:
    """What the uniform quantizer's kernels need to know of a tensor.

    Args:
        numel: Number of elements.
        bit_width: Bits a code, 1 to 8, 12, 16 or 24.
        block_size: Elements in a packing block, a multiple of 8.
        inner: Consecutive elements of one group.
        groups: Number of groups: the group of element e is `e // inner % groups`.
        one_run: Whether each group is a single run of elements.
        stochastic: Rounding.
    """

    numel: int
    bit_width: int
    block_size: int
    inner: int
    groups: int
    one_run: bool
    stochastic: bool

    @property
    def one_pass(self) -> bool:
        """Whether a program holds whole groups, so that x is read once."""
        if not self.one_run:
            return False
        if self.block_size % self.inner == 0:
            return True
        is_tile = self.inner % self.block_size == 0 and _is_power_of_2(self.inner) and self.inner <= LARGEST_TILE
        return is_tile and self.numel % self.inner == 0

    @property
    def known_inner(self) -> int:
        """`inner` where kernels are compiled for it, else 0."""
        return self.inner if self.one_pass else 0

    @property
    def rows_in_groups(self) -> bool:
        """Whether a row of a whole block's plane lies in one group."""
        return self.run % (self.block_size // 8) == 0

    @property
    def run(self) -> int:
        """`inner`, or a larger aligned number that means the same where there is one group."""
        return self.inner if self.groups != 1 else -(-self.inner // self.block_size) * self.block_size


def _is_power_of_2(n: int) -> bool:
    return n & (n - 1) == 0


def quantize_uniform(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    seed: Tensor | None,
    plan: UniformPlan,
    norm: Normalization | None = None,
) -> Iterator[Launch]:
    """Quantize a dense tensor.

    Args:
        x: float32, bfloat16 or float16 tensor, dense in memory order.
        codes: Packed uint8 codes, written.
        scale: (G,) bfloat16 or float32 scales, written.
        minimum: (G,) bfloat16 or float32 minima, written.
        seed: 0-d int64 tensor for stochastic rounding, else None.
        plan: The tensor's plan.
        norm: Statistics to normalize by on the way, for plans of one pass.

    Yields:
        Kernels to launch, in order.
    """
    rounding = {"BIT_WIDTH": plan.bit_width, "STOCHASTIC": plan.stochastic}
    if plan.one_pass:
        tiles = tiling(plan.numel, plan.block_size, x.itemsize, plan.inner)
        constants = {
            "INNER": plan.inner,
            "BLOCK": plan.block_size,
            "ROWS": tiles.rows,
            "GROUPS_2": next_power_of_2(max(plan.block_size // plan.inner, 1)),
            "INNER_2": next_power_of_2(plan.inner),
            "COLUMNS_2": tiles.columns,
            "PLACE": 0 if norm is None else norm.place(plan.numel, plan.block_size // 8),
        }
        arguments = (x, codes, scale, minimum, seed, plan.numel, *(NO_ARGUMENTS if norm is None else norm.arguments))
        yield Launch(quantize_kernel, (tiles.programs,), arguments, rounding | constants, tiles.threads)
        return
    inverse = x.new_empty(plan.groups, dtype=torch.float32)
    yield from _calibrate(x, scale, minimum, inverse, plan)
    itemsize = x.itemsize if plan.rows_in_groups else max(x.itemsize, 4)  # more elements' groups than 32 would spill
    tiles = tiling(plan.numel, plan.block_size, itemsize)
    constants = {"BLOCK": plan.block_size, "ROWS": tiles.rows, "ALIGNED": plan.rows_in_groups}
    arguments = (x, codes, minimum, inverse, seed, plan.numel, plan.run, plan.groups)
    yield Launch(quantize_calibrated_kernel, (tiles.programs,), arguments, rounding | constants, tiles.threads)


def _calibrate(x: Tensor, scale: Tensor, minimum: Tensor, inverse: Tensor, plan: UniformPlan) -> Iterator[Launch]:
    """Metadata of all groups, each by one program, or by several and a second launch that joins their ranges."""
    tiles = group_tiling(plan.numel, plan.inner, plan.groups, plan.one_run, RANGES_TILE)
    sizes = (plan.numel, plan.inner, plan.groups, tiles.repeats)
    if tiles.parts == 1:
        constants = {"BIT_WIDTH": plan.bit_width, **tiles.shape}
        yield Launch(calibrate_kernel, (tiles.group_tiles,), (x, scale, minimum, inverse, *sizes), constants)
        return
    keys = x.new_empty(3 * tiles.parts * plan.groups, dtype=torch.int32)
    yield Launch(ranges_kernel, (tiles.group_tiles, tiles.parts), (x, keys, *sizes), tiles.shape)
    constants = {
        "BIT_WIDTH": plan.bit_width,
        "PARTS_TILE": min(next_power_of_2(tiles.parts), _JOIN_TILE),
        "GROUPS_TILE": min(next_power_of_2(plan.groups), _JOIN_TILE),
    }
    grid = (-(-plan.groups // constants["GROUPS_TILE"]),)
    yield Launch(join_ranges_kernel, grid, (keys, scale, minimum, inverse, tiles.parts, plan.groups), constants)


def dequantize_uniform(
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    other: Tensor | None,
    target: Tensor,
    plan: UniformPlan,
    norm: Normalization | None = None,
) -> Launch:
    """Decode into a dense tensor, and multiply.

    Args:
        codes: Packed uint8 codes.
        scale: (G,) scales.
        minimum: (G,) minima.
        other: Dense factor of the type of `target`, or None.
        target: float32, bfloat16 or float16 tensor, dense in memory order, written; may be `other`.
        plan: The tensor's plan.
        norm: Means and deviations to undo a normalization by.

    Returns:
        The kernel to launch.
    """
    tiles = tiling(plan.numel, plan.block_size, target.itemsize)
    constants = {
        "BIT_WIDTH": plan.bit_width,
        "BLOCK": plan.block_size,
        "ROWS": tiles.rows,
        "COLUMNS_2": tiles.columns,
        "INNER": plan.known_inner,
        "ALIGNED": plan.rows_in_groups,
        "PLACE": 0 if norm is None else norm.place(plan.numel, plan.block_size // 8),
    }
    largest = torch.finfo(target.dtype if norm is None else torch.float32).max
    arguments = (codes, scale, minimum, other, target, plan.numel, plan.run, plan.groups, largest)
    arguments += NO_ARGUMENTS if norm is None else norm.arguments
    return Launch(dequantize_kernel, (tiles.programs,), arguments, constants, tiles.threads)
