"""Quantizers on grids: codes of levels of any spacing, and back.

All groups share SIZE levels and the SIZE - 1 numbers of `Grid.steps`, which stay in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from brevact.geometry import Geometry, Grid
from brevact.triton_kernels.floats import cast, float_of_code, maximum, minimum, round_stochastic, widen
from brevact.triton_kernels.groups import is_finite
from brevact.triton_kernels.launch import over_blocks, seed_on
from brevact.triton_kernels.philox import element_bits, seed_words
from brevact.triton_kernels.tiles import element_mask, load_bytes, load_planes, plane_of, store_codes, tile, unpack_code

_UNALIGNED = ["levels_ptr", "steps_ptr", "seed_ptr"]


@triton.jit
def count_reached(z, row_ptr, SIZE: tl.constexpr, BIT_WIDTH: tl.constexpr):
    """How many of SIZE - 1 ascending numbers z reaches, 2 <= SIZE <= 2^BIT_WIDTH; none if z is NaN."""
    count = 0  # the first probe is the same for all values
    for k in tl.static_range(BIT_WIDTH):
        probe = count + (1 << (BIT_WIDTH - 1 - k))
        if SIZE < (1 << BIT_WIDTH):
            probe = tl.minimum(probe, SIZE - 1)
        count = tl.where(z >= tl.load(row_ptr + (probe - 1)), probe, count)
    return count


@triton.jit
def codes_on_row(
    z, words, levels_ptr, steps_ptr,
    i: tl.constexpr, SIZE: tl.constexpr, BIT_WIDTH: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Codes (int32) of plane i of a tile, see `quantizers.kernel_ops.positions`."""
    if STOCHASTIC:
        # a value that reaches the last level lies in the last gap, too
        index = tl.minimum(count_reached(z, levels_ptr + 1, SIZE, BIT_WIDTH), SIZE - 2)
        low, step = tl.load(levels_ptr + index), tl.load(steps_ptr + index)
        fraction = (z - low) * step
        fraction = tl.where(fraction > 0.0, tl.minimum(fraction, 1.0), 0.0)  # 0 for NaN as well
        t = float_of_code(index.to(tl.uint32)) + fraction
        q = round_stochastic(t, element_bits(words, i), BIT_WIDTH)
    else:
        q = count_reached(z, steps_ptr, SIZE, BIT_WIDTH)
    return q


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=_UNALIGNED)
def quantize_grid_kernel(
    x_ptr, codes_ptr, levels_ptr, steps_ptr, seed_ptr, numel,
    BIT_WIDTH: tl.constexpr, STOCHASTIC: tl.constexpr, SIZE: tl.constexpr, MARKS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr,
):  # fmt: skip
    """Round x to levels, and pack. MARKS: `Grid.marks`."""
    for RAGGED in tl.static_range(ROWS == 0, 2):
        at = tile(numel, BLOCK, ROWS, COLUMNS_2, RAGGED, IN_INT64=True)
        if at[4] > 0:
            planes = load_planes(x_ptr, at, BLOCK, RAGGED)
            words = seed_words(at, seed_ptr, BLOCK, STOCHASTIC)
            codes = ()
            for i in tl.static_range(8):
                x = widen(planes[i])
                q = codes_on_row(x, words, levels_ptr, steps_ptr, i, SIZE, BIT_WIDTH, STOCHASTIC)
                if MARKS:
                    q = tl.where(is_finite(x), q, (1 << BIT_WIDTH) - 1)
                if RAGGED:
                    q = tl.where(element_mask(i, at, RAGGED), q, 0)
                codes += (q,)
            store_codes(codes_ptr, codes, at, BLOCK, BIT_WIDTH, RAGGED)


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=_UNALIGNED)
def dequantize_grid_kernel(
    codes_ptr, levels_ptr, other_ptr, target_ptr, numel, largest,
    BIT_WIDTH: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr,
):  # fmt: skip
    for RAGGED in tl.static_range(ROWS == 0, 2):
        at = tile(numel, BLOCK, ROWS, COLUMNS_2, RAGGED)
        if at[4] > 0:
            packed = load_bytes(codes_ptr, at, BLOCK, BIT_WIDTH, RAGGED)
            for i in tl.static_range(8):
                valid = element_mask(i, at, RAGGED)
                q = unpack_code(packed, i, BIT_WIDTH).to(tl.int32)
                y = tl.load(levels_ptr + (tl.minimum(q, SIZE - 1) if SIZE < (1 << BIT_WIDTH) else q))
                y = cast(maximum(minimum(y, largest), -largest), target_ptr.dtype.element_ty)
                if other_ptr is not None:
                    factor = widen(tl.load(plane_of(other_ptr, i, at, BLOCK), mask=valid))
                    y = cast(widen(y) * factor, target_ptr.dtype.element_ty)
                tl.store(plane_of(target_ptr, i, at, BLOCK), y, mask=valid)


def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: int | Tensor | None, codes: Tensor) -> None:
    if len(grid.levels) > 1:
        return NotImplemented
    stochastic = seed is not None
    constants = {"SIZE": grid.levels.shape[1], "STOCHASTIC": stochastic, "MARKS": grid.marks}
    program = over_blocks(quantize_grid_kernel, geometry, flat.itemsize, **constants)
    levels, steps = grid.levels.contiguous(), grid.steps(stochastic=stochastic).contiguous()
    program.run(flat, codes, levels, steps, seed_on(flat.device, seed))


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    if len(grid.levels) > 1:
        return NotImplemented
    size, largest = grid.levels.shape[1], torch.finfo(target.dtype).max
    program = over_blocks(dequantize_grid_kernel, geometry, target.itemsize, SIZE=size, largest=largest)
    program.run(codes, grid.levels.contiguous(), other, target)
