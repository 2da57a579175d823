"""Launches of the uniform quantizer: one pass over x where a program holds whole groups, else two."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton import next_power_of_2

from brevact.geometry import Geometry, Place, UniformPlan
from brevact.triton_kernels.dequantize import dequantize_kernel
from brevact.triton_kernels.launch import TENSOR, Launch, Program, group_tiling, parts_of, seed_on, tiling
from brevact.triton_kernels.normalize import NO_STATISTICS, fits, place_flags
from brevact.triton_kernels.packing import mask_multiply
from brevact.triton_kernels.quantize import quantize_calibrated_kernel, quantize_kernel
from brevact.triton_kernels.ranges import calibrate_kernel, join_ranges_kernel, ranges_kernel

LARGEST_TILE = 16384
"""Elements of the largest group that one program holds in registers."""
RANGES_TILE = 2048
"""Elements of a tile of the kernels that find ranges."""
_JOIN_TILE = 64


def one_pass(geometry: Geometry) -> bool:
    """Whether a program holds whole groups, so that x is read once."""
    if not geometry.one_run:
        return False
    block, inner = geometry.block_size, geometry.inner
    if block % inner == 0:
        return True
    return inner % block == 0 and inner & (inner - 1) == 0 and inner <= LARGEST_TILE and geometry.numel % inner == 0


def run_of(geometry: Geometry) -> int:
    """`inner`, or a larger aligned number that means the same where there is one group."""
    inner, block = geometry.inner, geometry.block_size
    return inner if geometry.groups != 1 else -(-inner // block) * block


def rows_in_groups(geometry: Geometry) -> bool:
    """Whether a row of a whole block's plane lies in one group."""
    return run_of(geometry) % (geometry.block_size // 8) == 0


def quantize_uniform(x: Tensor, plan: UniformPlan, seed: int | Tensor | None, buffer: Tensor) -> None:
    """One read of the elements where a program holds whole groups, else two."""
    key = None if seed is None else seed_on(x.device, seed)
    program = _quantizing(plan, x.itemsize, key is not None, None)
    if program is not None:
        program.run(x, buffer, buffer, buffer, key)
        return
    geometry = plan.geometry
    codes, minimum, scale = (part.of(buffer) for part in parts_of(plan))
    inverse = x.new_empty(geometry.groups, dtype=torch.float32)
    _calibrate(x, scale, minimum, inverse, geometry)
    aligned = rows_in_groups(geometry)
    itemsize = x.itemsize if aligned else max(x.itemsize, 4)  # more elements' groups than 32 would spill
    tiles = tiling(geometry.numel, geometry.block_size, itemsize)
    constants = {"BLOCK": geometry.block_size, "ROWS": tiles.rows, "ALIGNED": aligned, **_rounding(geometry, key)}
    arguments = (x, codes, minimum, inverse, key, geometry.numel, run_of(geometry), geometry.groups)
    Launch(quantize_calibrated_kernel, (tiles.programs,), arguments, constants, tiles.threads).run()


def quantize_normalized(
    x: Tensor,
    plan: UniformPlan,
    seed: int | Tensor | None,
    mean: Tensor | None,
    factor: Tensor,
    place: Place,
    buffer: Tensor,
) -> None:
    """Where programs hold whole groups, and the kernels' integers reach."""
    program = _quantizing(plan, x.itemsize, seed is not None, place)
    if program is None:
        return NotImplemented
    key = None if seed is None else seed_on(x.device, seed)
    program.run(x, buffer, buffer, buffer, key, mean, factor)


@functools.lru_cache(maxsize=4096)
def _quantizing(plan: UniformPlan, itemsize: int, stochastic: bool, place: Place | None) -> Program | None:
    """The program that reads elements once, normalized on the way if they have a place; None where there is none.

    Its tensors are the elements, the buffer for codes, scales and minima, the seed, and with a place the means and the
    factors.
    """
    geometry = plan.geometry
    if not one_pass(geometry) or (place is not None and not fits(place, geometry.numel)):
        return None
    tiles = tiling(geometry.numel, geometry.block_size, itemsize, geometry.inner)
    flags = 0 if place is None else place_flags(place, geometry.numel, geometry.block_size // 8)
    constants = {
        "INNER": geometry.inner,
        "BLOCK": geometry.block_size,
        "ROWS": tiles.rows,
        "GROUPS_2": next_power_of_2(max(geometry.block_size // geometry.inner, 1)),
        "INNER_2": next_power_of_2(geometry.inner),
        "COLUMNS_2": tiles.columns,
        "PLACE": flags,
        "DITHERED": plan.dithered,
        "UNEVEN": plan.uneven,
        "BIT_WIDTH": geometry.bit_width,
        "STOCHASTIC": stochastic,
    }
    codes, minimum, scale = parts_of(plan)
    statistics = NO_STATISTICS if place is None else (TENSOR, TENSOR, *place)
    arguments = (TENSOR, codes, scale, minimum, TENSOR, geometry.numel, *statistics)
    return Program(quantize_kernel, (tiles.programs,), arguments, constants, tiles.threads)


def _rounding(geometry: Geometry, key: Tensor | None) -> dict[str, int | bool]:
    return {"BIT_WIDTH": geometry.bit_width, "STOCHASTIC": key is not None}


def _calibrate(x: Tensor, scale: Tensor, minimum: Tensor, inverse: Tensor, geometry: Geometry) -> None:
    """Metadata of all groups, each by one program, or by several and a second launch that joins their ranges."""
    tiles, groups = group_tiling(geometry, RANGES_TILE), geometry.groups
    metadata, sizes = (scale, minimum, inverse), (geometry.numel, geometry.inner, groups, tiles.repeats)
    if tiles.parts == 1:
        constants = {"BIT_WIDTH": geometry.bit_width, **tiles.shape}
        Launch(calibrate_kernel, (tiles.group_tiles,), (x, *metadata, *sizes), constants).run()
        return
    keys = x.new_empty(4 * tiles.parts * groups, dtype=torch.int32)
    Launch(ranges_kernel, (tiles.group_tiles, tiles.parts), (x, keys, *sizes), tiles.shape).run()
    constants = {
        "BIT_WIDTH": geometry.bit_width,
        "PARTS_TILE": min(next_power_of_2(tiles.parts), _JOIN_TILE),
        "GROUPS_TILE": min(next_power_of_2(groups), _JOIN_TILE),
    }
    grid = (-(-groups // constants["GROUPS_TILE"]),)
    Launch(join_ranges_kernel, grid, (keys, *metadata, tiles.parts, groups), constants).run()


def dequantize_uniform(buffer: Tensor, plan: UniformPlan, other: Tensor | None, target: Tensor) -> None:
    """See the reference."""
    program = _decoding(plan, target.dtype, None)
    assert program is not None, "places alone may be out of reach"
    program.run(buffer, buffer, buffer, other, target)


def denormalize(
    buffer: Tensor,
    plan: UniformPlan,
    mean: Tensor | None,
    factor: Tensor,
    place: Place,
    addend: Tensor | None,
    mask: Tensor | None,
    target: Tensor,
) -> None:
    """Where the kernels' integers reach; a mask is applied in a pass of its own."""
    program = _decoding(plan, target.dtype, place)
    if program is None:
        return NotImplemented
    program.run(buffer, buffer, buffer, addend, target, mean, factor)
    if mask is not None:
        mask_multiply(mask, plan.geometry.numel, target, 0.0, target)


@functools.lru_cache(maxsize=4096)
def _decoding(plan: UniformPlan, dtype: torch.dtype, place: Place | None) -> Program | None:
    """The program that decodes and multiplies, or undoes a normalization and adds if elements have a place.

    Its tensors are the buffer for codes, scales and minima, the factor or the addend, the target, and with a place the
    means and the factors. None where the places are out of reach.
    """
    geometry = plan.geometry
    if place is not None and not fits(place, geometry.numel):
        return None
    tiles = tiling(geometry.numel, geometry.block_size, dtype.itemsize)
    constants = {
        "BIT_WIDTH": geometry.bit_width,
        "BLOCK": geometry.block_size,
        "ROWS": tiles.rows,
        "COLUMNS_2": tiles.columns,
        "INNER": geometry.inner if one_pass(geometry) else 0,
        "ALIGNED": rows_in_groups(geometry),
        "PLACE": 0 if place is None else place_flags(place, geometry.numel, geometry.block_size // 8),
        "UNEVEN": plan.uneven,
    }
    codes, minimum, scale = parts_of(plan)
    largest = torch.finfo(dtype if place is None else torch.float32).max
    sizes, statistics = (geometry.numel, run_of(geometry), geometry.groups, largest), NO_STATISTICS
    if place is not None:
        statistics = (TENSOR, TENSOR, *place)
    arguments = (codes, scale, minimum, TENSOR, TENSOR, *sizes, *statistics)
    return Program(dequantize_kernel, (tiles.programs,), arguments, constants, tiles.threads)
