"""Launches of the uniform quantizer: one pass over x where a program holds whole groups, else two."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from brevact.geometry import Place, UniformPlan
from brevact.triton_kernels.dequantize import dequantize_kernel
from brevact.triton_kernels.launch import Program, one_pass, over_blocks, over_groups, parts_of, rows_in_groups, seed_on
from brevact.triton_kernels.normalize import fits, values_of
from brevact.triton_kernels.packing import mask_multiply
from brevact.triton_kernels.quantize import quantize_calibrated_kernel, quantize_kernel
from brevact.triton_kernels.ranges import RANGES_TILE, join_ranges_kernel, ranges_kernel

_JOIN_TILE = 64


def quantize_uniform(x: Tensor, plan: UniformPlan, seed: int | Tensor | None, buffer: Tensor) -> None:
    key = None if seed is None else seed_on(x.device, seed)
    program = _quantizing(plan, x.itemsize, key is not None, None)
    if program is not None:
        program.run(x, buffer, buffer, buffer, key, None, None)
        return
    find, join, quantize = _in_two_passes(plan, x.itemsize, key is not None)
    keys = x.new_empty(find.grid[1] * 4 * plan.geometry.groups, dtype=torch.int32)
    inverse = x.new_empty(plan.geometry.groups, dtype=torch.float32)
    find.run(x, keys)
    join.run(keys, buffer, buffer, inverse)
    quantize.run(x, buffer, buffer, inverse, key)


def quantize_normalized(
    x: Tensor,
    plan: UniformPlan,
    seed: int | Tensor | None,
    mean: Tensor | None,
    factor: Tensor,
    place: Place,
    buffer: Tensor,
) -> None:
    program = _quantizing(plan, x.itemsize, seed is not None, place)
    if program is None:
        return NotImplemented
    key = None if seed is None else seed_on(x.device, seed)
    program.run(x, buffer, buffer, buffer, key, mean, factor)


@functools.lru_cache(maxsize=4096)
def _quantizing(plan: UniformPlan, itemsize: int, stochastic: bool, place: Place | None) -> Program | None:
    """The program of one read, if any. Its tensors: elements, buffer (codes, scales, minima), seed, means, factors."""
    geometry = plan.geometry
    if not one_pass(geometry) or not fits(place, geometry.numel):
        return None
    constants = {
        "STOCHASTIC": stochastic,
        "DITHERED": plan.dithered,
        "UNEVEN": plan.uneven,
        "GROUPS_2": next_power_of_2(max(geometry.block_size // geometry.inner, 1)),
        "INNER_2": next_power_of_2(geometry.inner),
    }
    constants |= parts_of(plan) | values_of(place, geometry)
    return over_blocks(quantize_kernel, geometry, itemsize, geometry.inner, **constants)


@functools.lru_cache(maxsize=4096)
def _in_two_passes(plan: UniformPlan, itemsize: int, stochastic: bool) -> tuple[Program, Program, Program]:
    """The programs that find ranges, join them to scales, minima and inverse scales, and quantize with these."""
    geometry, groups = plan.geometry, plan.geometry.groups
    find = over_groups(ranges_kernel, geometry, RANGES_TILE)
    groups_tile = min(next_power_of_2(max(groups, 1)), _JOIN_TILE)
    values: dict[str, Any] = {
        "parts": find.grid[1],
        "groups": groups,
        "BIT_WIDTH": geometry.bit_width,
        "PARTS_TILE": min(next_power_of_2(find.grid[1]), _JOIN_TILE),
        "GROUPS_TILE": groups_tile,
    }
    join = Program(join_ranges_kernel, (-(-groups // groups_tile),), **parts_of(plan), **values)
    itemsize = itemsize if rows_in_groups(geometry) else max(itemsize, 4)  # more elements' groups than 32 would spill
    values = {"STOCHASTIC": stochastic, **parts_of(plan)}
    return find, join, over_blocks(quantize_calibrated_kernel, geometry, itemsize, **values)


def dequantize_uniform(buffer: Tensor, plan: UniformPlan, other: Tensor | None, target: Tensor) -> None:
    program = _decoding(plan, target.dtype, None)
    assert program is not None, "places alone may be out of reach"
    program.run(buffer, buffer, buffer, other, target, None, None)


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
    """Its tensors: buffer (codes, scales, minima), factor or addend, target, means, factors. None if out of reach."""
    geometry = plan.geometry
    if not fits(place, geometry.numel):
        return None
    values: dict[str, Any] = {
        "largest": torch.finfo(dtype if place is None else torch.float32).max,
        "UNEVEN": plan.uneven,
    }
    values |= parts_of(plan) | values_of(place, geometry)
    return over_blocks(dequantize_kernel, geometry, dtype.itemsize, **values)
