"""Kernel that quantizes: positions on each group's grid, rounding, packing; `kernel_ops.quantize_uniform`'s bytes."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import stage
from brevact.cpu_kernels.groups import (
    BIT_WIDTH,
    BLOCK,
    DITHERED,
    HIGHEST_KEY,
    INNER,
    KIND,
    LOWEST_KEY,
    NUMEL,
    ROUNDING,
    STOCHASTIC,
    UNEVEN,
    GroupTable,
    calibrate,
    extend,
    extend_finite,
    inverse_of,
    is_finite,
    is_finite_range,
    is_flagged,
    place_zeros,
    shows_errors,
    store_shifted,
    uniform_table,
    zero_in_range,
)
from brevact.cpu_kernels.memory import (
    advance,
    as_u32,
    f32_scratch,
    i64_at,
    inlined,
    kernel,
    load,
    store,
    u8_at,
    u32_scratch,
)
from brevact.cpu_kernels.normalize import SCRATCH, normalize_elements, words_of
from brevact.cpu_kernels.rounding import halves_of, is_spread, shift_of, shift_to_levels, write_codes
from brevact.cpu_kernels.teams import share
from brevact.cpu_kernels.uneven import canonical, quantize_uneven, second_ends
from brevact.geometry import Place, UniformPlan


@inlined
def _to_steps(x, count, m, inverse, levels, steps):
    """Positions on the grid, t = clip((x - m) / s), of elements of one group; zeros if the inverse is 0."""
    if inverse > np.float32(0.0):
        for e in range(count):
            t = max((load(x, e) - m) * inverse, np.float32(0.0))
            store(steps, e, t if t < levels else levels)
    else:
        for e in range(count):
            store(steps, e, np.float32(0.0))


@inlined
def _to_flagged_steps(x, count, m, inverse, levels, steps):
    """The same in a flagged group: finite elements below the last level, which encodes the others."""
    below = levels - np.float32(1.0)
    for e in range(count):
        v = load(x, e)
        t = max((v - m) * inverse, np.float32(0.0))
        t = t if t < below else below
        store(steps, e, t if is_finite(v) else levels)


@inlined
def _to_steps_of_group(x, count, m, s, levels, steps):
    if is_flagged(s):
        _to_flagged_steps(x, count, m, inverse_of(s), levels, steps)
    else:
        _to_steps(x, count, m, inverse_of(s), levels, steps)


@kernel
def quantize_blocks(source, codes, scale, minimum, seed, table_at, norm_at, start, stop):
    """`norm_at` has words of `normalize`, or is 0."""
    table = i64_at(table_at)
    numel, bit_width, block, inner = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, INNER)
    dithered, stochastic = load(table, ROUNDING) == DITHERED, load(table, ROUNDING) == STOCHASTIC
    uneven = load(table, UNEVEN) != 0
    k = halves_of(seed)
    top = (np.int64(1) << bit_width) - 1
    steps, scratch = f32_scratch(block), f32_scratch(block)
    mean_of, scale_of = f32_scratch(SCRATCH), f32_scratch(SCRATCH)
    wide = as_u32(scratch)  # codes come when the elements in it have become steps
    columns = block // 8
    random = u32_scratch(columns), u32_scratch(columns), u32_scratch(columns), u32_scratch(columns)
    joined = u32_scratch(columns), u32_scratch(columns)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        x = stage(source, load(table, KIND), first, count, steps if norm_at else scratch)
        if norm_at:  # from one memory to another, or LLVM would not vectorize it
            normalize_elements(x, first, count, norm_at, mean_of, scale_of, scratch)
            x = scratch
        if dithered:
            stochastic = False  # unless there are groups that do not shift their levels
        e = 0
        while e < count:
            run = min(inner, count - e)
            low_key, high_key = extend(advance(x, e), run, HIGHEST_KEY, LOWEST_KEY)
            flagged = not is_finite_range(low_key, high_key)
            if flagged:
                low_key, high_key = extend_finite(advance(x, e), run, HIGHEST_KEY, LOWEST_KEY)
            if uneven:
                low_end, high_end = canonical(low_key), canonical(high_key)
                second_low, second_high, takes = HIGHEST_KEY, LOWEST_KEY, flagged
                if not flagged:
                    second_low, second_high, takes = second_ends(advance(x, e), run, low_end, high_end)
                if takes:
                    stochastic = stochastic or dithered
                    quantize_uneven(
                        advance(x, e), run, low_end, high_end, second_low, second_high, flagged,
                        bit_width, (first + e) // inner, scale, minimum, advance(steps, e),
                    )  # fmt: skip
                    e += run
                    continue
            zero = zero_in_range(advance(x, e), run, low_key, high_key)
            m, s = calibrate(low_key, high_key, flagged, zero, (first + e) // inner, scale, minimum, table)
            at = advance(steps, e)
            _to_steps_of_group(advance(x, e), run, m, s, np.float32(top), at)
            if zero and m < np.float32(0.0) and shows_errors(table):
                place_zeros(advance(x, e), run, at)
            if dithered:
                if not flagged and not zero and is_spread(at, run):
                    group = (first + e) // inner
                    shift = shift_of(group, k[0], k[1])
                    shift_to_levels(at, run, shift, np.float32(top))
                    store_shifted(m, s, shift, group, minimum, table)
                else:
                    stochastic = True
            e += run
        write_codes(steps, first, count, bit_width, stochastic, k, random, joined, wide, u8_at(codes))


def quantize_uniform(x: Tensor, plan: UniformPlan, seed: int | Tensor | None, buffer: Tensor) -> None:
    if not plan.geometry.in_blocks:
        return NotImplemented
    quantize(x, uniform_table(plan, x.dtype, seed is not None), plan, seed, buffer)


def quantize_normalized(
    x: Tensor,
    plan: UniformPlan,
    seed: int | Tensor | None,
    mean: Tensor | None,
    factor: Tensor,
    place: Place,
    buffer: Tensor,
) -> None:
    if not plan.geometry.in_blocks:
        return NotImplemented
    quantize(x, uniform_table(plan, x.dtype, seed is not None), plan, seed, buffer, words_of(mean, factor, place))


def quantize(
    x: Tensor,
    table: GroupTable,
    plan: UniformPlan,
    seed: int | Tensor | None,
    buffer: Tensor,
    norm: ctypes.Array | None = None,
) -> None:
    source, codes, threads = x.data_ptr(), buffer.data_ptr(), torch.get_num_threads()
    metadata = codes + plan.scale_at, codes + plan.minimum_at
    key, words = 0 if seed is None else int(seed), 0 if norm is None else ctypes.addressof(norm)
    arguments = (source, codes, *metadata, key, table.address, words)
    share(quantize_blocks, arguments, table.blocks, plan.geometry.block_size, threads)
