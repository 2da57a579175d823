"""Kernels of the gradient of fake quantization: `integer_ops.fake_quantize_backward`'s bytes, in one pass.

Sums of float32 numbers are in the order of `torch.sum` on the CPU, from kernels that make the numbers in blocks. ATen
adds a contiguous array in 32 lanes: the elements of 16 rows, that is of a block, one below the other; sums of 16
blocks, of 256 and of 4096 likewise; then the rest, and last the lanes. Each thread does so for its own run of
elements. Blocks are independent of each other. Source: aten/src/ATen/native/cpu/SumKernel.cpp, `cascade_sum`, and
TensorIteratorReduce.cpp, `two_pass_reduction`. Whether this is so where the package runs is tried once.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.fake_quantize import (
    BIT_WIDTH,
    BLOCK,
    CLIPS,
    CODES,
    HAS_SPARE,
    HIGHEST,
    KIND,
    LEVELS,
    LOWEST,
    MASK,
    NUMEL,
    OUT,
    RECTIFIES,
    RESIDUAL,
    ROUNDING,
    SCALES,
    VALUES,
    WIDTH,
    ZERO_POINT,
    ZERO_POINTS,
    X,
    address,
    fill_numbers,
    pass_mask,
    reads,
    round_values,
    run,
    settle,
    shift_values,
)
from brevact.cpu_kernels.floats import FLOAT32, KINDS, emit, stage
from brevact.cpu_kernels.memory import (
    advance,
    f32_at,
    f32_scratch,
    i64_at,
    inlined,
    kernel,
    load,
    rint,
    store,
    u8_at,
    u8_scratch,
    u32_scratch,
)
from brevact.cpu_kernels.packing import bytes_to_codes, spread_bits
from brevact.cpu_kernels.teams import share
from brevact.geometry import IntegerPlan

LANES = 32
LEVELS_OF_SUM, _STEP = 4, 16
_VECTOR = 8
_GRAIN = 32768
"""Elements of a thread below which ATen takes fewer threads."""
_MOST = 1 << 24
"""Elements of a run from which ATen's blocks are larger."""


@inlined
def add_block(terms, sums, lanes):
    """Write the sums of the lanes of a full block; `sums` is scratch for them."""
    for k in range(LANES):
        store(sums, k, np.float32(0.0) + load(terms, k))
    for row in range(LANES, BLOCK, LANES):
        for k in range(LANES):
            store(sums, k, load(sums, k) + load(terms, row + k))
    for k in range(LANES):
        store(lanes, k, load(sums, k))


@kernel
def add_runs(lanes, rest, run, numel, sums, start, stop):
    """Add the elements of runs start to stop: lanes' sums of `run` full blocks each, and `rest` of the last block."""
    levels = f32_scratch(LEVELS_OF_SUM * LANES)
    for index in range(start, stop):
        first = index * run
        count = min(run, numel - first)
        blocks, left = count // BLOCK, count % BLOCK
        for k in range(LEVELS_OF_SUM * LANES):
            store(levels, k, np.float32(0.0))
        source = advance(f32_at(lanes), first // BLOCK * LANES)
        for block in range(blocks):
            for k in range(LANES):
                store(levels, LANES + k, load(levels, LANES + k) + load(source, block * LANES + k))
            number, level = block + 1, 1
            while level < LEVELS_OF_SUM - 1 and number % _STEP == 0:
                below, above = advance(levels, level * LANES), advance(levels, (level + 1) * LANES)
                for k in range(LANES):
                    store(above, k, load(above, k) + load(below, k))
                    store(below, k, np.float32(0.0))
                number, level = number // _STEP, level + 1
        tail, rows = f32_at(rest), left // LANES
        for row in range(rows):
            for k in range(LANES):
                store(levels, k, load(levels, k) + load(tail, row * LANES + k))
        for level in range(1, LEVELS_OF_SUM):
            for k in range(LANES):
                store(levels, k, load(levels, k) + load(levels, level * LANES + k))
        vectors = left // _VECTOR
        for vector in range(rows * (LANES // _VECTOR), vectors):
            for k in range(_VECTOR):
                store(levels, k, load(levels, k) + load(tail, vector * _VECTOR + k))
        for vector in range(1, LANES // _VECTOR):
            for k in range(_VECTOR):
                store(levels, k, load(levels, k) + load(levels, vector * _VECTOR + k))
        total = np.float32(0.0)
        for e in range(vectors * _VECTOR, left):
            total = np.float32(total + load(tail, e))
        for k in range(_VECTOR):
            total = np.float32(total + load(levels, k))
        store(f32_at(sums), index, np.float32(0.0) + total)


@kernel
def add_blocks(source, lanes, rest, numel, start, stop):
    """Sums of the lanes of blocks start to stop of an array; a block that is not full is copied."""
    own = f32_scratch(LANES)
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        x = advance(f32_at(source), first)
        if count == BLOCK:
            add_block(x, own, advance(f32_at(lanes), index * LANES))
        else:
            for e in range(count):
                store(f32_at(rest), e, load(x, e))


def runs_of(numel: int, threads: int) -> tuple[int, int] | None:
    """Elements of a run and number of runs that ATen divides a sum into; None where blocks would not fit into them."""
    if numel < _GRAIN or threads == 1:
        run, count = max(numel, 1), 1
    else:
        count = min(threads, -(-numel // _GRAIN))
        run = -(-numel // count)
        count = -(-numel // run)
        if run % BLOCK:
            return None
    is_short = numel - (count - 1) * run < _VECTOR  # which is added in another order
    return None if run > _MOST or is_short else (run, count)


def finish(lanes: Tensor, rest: Tensor, numel: int, runs: tuple[int, int], threads: int) -> Tensor:
    """Return the sum, (), of the sums of the lanes of blocks, (B * 32,), and the elements of a ragged last block."""
    run, count = runs
    sums = torch.zeros(threads if count > 1 or (numel >= _GRAIN and threads > 1) else 1)
    arguments = (lanes.data_ptr(), rest.data_ptr(), run, numel, sums.data_ptr())
    share(add_runs, arguments, count, run, threads)
    return sums.sum() if sums.numel() > 1 else sums[0]


@functools.cache
def adds_as_torch(threads: int) -> bool:
    """Whether `torch.sum` adds as this module says, by a few sums on so many threads."""
    generator = torch.Generator().manual_seed(0)
    return all(
        _is_as_torch(torch.randn(numel, generator=generator), threads)
        for numel in (8, 1000, 16 * BLOCK + 77, threads * 128 * BLOCK, threads * 289 * BLOCK)
    )


def _is_as_torch(x: Tensor, threads: int) -> bool:
    runs = runs_of(x.numel(), threads)
    return runs is None or torch.equal(cascade_sum(x, runs, threads), x.sum())


def cascade_sum(x: Tensor, runs: tuple[int, int], threads: int) -> Tensor:
    blocks = -(-x.numel() // BLOCK)
    lanes, rest = torch.empty(blocks * LANES), torch.empty(BLOCK)
    share(add_blocks, (x.data_ptr(), lanes.data_ptr(), rest.data_ptr(), x.numel()), blocks, BLOCK, threads)
    return finish(lanes, rest, x.numel(), runs, threads)


TERMS, SUMS, REST, KINDS_OF_TERMS = range(28, 32)
"""Addresses, 0 for none, of (k, n) terms, of the sums of lanes of full blocks, (k, B * 32), of (k, 512) terms of a last
block that is not full; k, 4 where the zero point learns, else 2. X is the gradient, OUT that of the tensor."""


@inlined
def _unpack(codes, columns, bit_width, count, lowest, has_spare, zero_points, q):
    """Integers less zero points, of codes."""
    spare = np.uint32((np.int64(1) << bit_width) - 1) if has_spare else np.uint32(0xFFFFFFFF)
    for e in range(count):
        code = load(codes, e)
        number = np.float32(np.int32(code)) + lowest
        store(q, e, (np.float32(np.nan) if code == spare else number) - load(zero_points, e))


@inlined
def _terms(g, clipped, q, steps, scales, count, kind, first, second):
    """g q and -g' (steps / s); steps are x / s."""
    if kind != FLOAT32:
        for e in range(count):
            store(first, e, load(g, e) * load(q, e))
            store(second, e, load(steps, e) / load(scales, e))
        settle(second, kind, count)
        for e in range(count):
            store(second, e, -load(clipped, e) * load(second, e))
        return
    for e in range(count):
        store(first, e, load(g, e) * load(q, e))
        store(second, e, -load(clipped, e) * (load(steps, e) / load(scales, e)))


@inlined
def _all_of_nearest(g, x, scales, zero_points, count, lowest, highest, rectifies, clips, target, first, second):
    """All in one loop, for float32 rounded to nearest, of x alone; nothing is beyond a bound that is NaN."""
    floor = np.float32(0.0) if rectifies else np.float32(np.nan)
    bottom = lowest if clips else np.float32(np.nan)
    top = highest if clips else np.float32(np.nan)
    for e in range(count):
        v, s, z = load(x, e), load(scales, e), load(zero_points, e)
        v = np.float32(0.0) if v < floor else v
        step = v / s
        r = rint(step + z)
        through = load(g, e) * s
        through = np.float32(0.0) if (r > top) | (r < bottom) | (v <= floor) else through
        store(target, e, through / s)
        r = highest if r > highest else r
        r = lowest if r < lowest else r
        store(first, e, load(g, e) * (r - z))
        store(second, e, -through * (step / s))


@inlined
def _levels_of(numbers, levels, width, count, out):
    """Residuals of their codes; of two bits by comparisons, which take less than to look them up."""
    if width == 2:
        clipped, first, second, third = load(levels, 0), load(levels, 1), load(levels, 2), load(levels, 3)
        for e in range(count):
            number = load(numbers, e)
            below = clipped if number == np.uint32(0) else first
            above = second if number == np.uint32(2) else third
            store(out, e, below if number < np.uint32(2) else above)
    else:
        for e in range(count):
            store(out, e, load(levels, np.int64(load(numbers, e))))


@inlined
def _all_of_residuals(g, codes, residuals, steps, scales, zero_points, count, lowest, spare, target, first, second):
    """All in one loop, for float32. Code 0 means clipped; others have x / s - q for x / s, and NaN or 0 for q."""
    for e in range(count):
        s, code = load(scales, e), load(codes, e)
        number = np.float32(np.int32(code)) + lowest
        q = (np.float32(np.nan) if code == spare else number) - load(zero_points, e)
        through, is_clipped = load(g, e) * s, load(residuals, e) == np.uint32(0)
        through = np.float32(0.0) if is_clipped else through
        store(target, e, through / s)
        store(first, e, load(g, e) * (q if is_clipped else q * np.float32(0.0)))
        store(second, e, -through * (load(steps, e) / s))


@inlined
def _terms_of_zero_point(g, scales, bits, count, kind, third, fourth):
    """-g s, and g s where nothing was clipped."""
    for e in range(count):
        store(third, e, -(load(g, e) * load(scales, e)))
    settle(third, kind, count)
    for e in range(count):
        store(fourth, e, -load(third, e) if load(bits, e) else np.float32(0.0))


@inlined
def _place_terms(words, index, count, row, one, other, kind, own):
    """Write or add the terms of rows `row` and `row + 1`."""
    numel = load(words, NUMEL)
    blocks, first = (numel + BLOCK - 1) // BLOCK, index * BLOCK
    if load(words, TERMS):
        emit(one, load(words, TERMS), kind, row * numel + first, count)
        emit(other, load(words, TERMS), kind, (row + 1) * numel + first, count)
    elif load(words, SUMS) and count == BLOCK:
        lanes = advance(f32_at(load(words, SUMS)), (row * blocks + index) * LANES)
        add_block(one, own, lanes)
        add_block(other, own, advance(lanes, blocks * LANES))
    elif load(words, SUMS):
        rest = advance(f32_at(load(words, REST)), row * BLOCK)
        for e in range(count):
            store(rest, e, load(one, e))
        for e in range(count):
            store(rest, BLOCK + e, load(other, e))


@kernel
def fake_quantize_backward_blocks(words_at, start, stop):
    words = i64_at(words_at)
    numel, bit_width, has_spare = load(words, NUMEL), load(words, BIT_WIDTH), load(words, HAS_SPARE)
    lowest, width = np.float32(load(words, LOWEST)), load(words, WIDTH)
    highest, rounding = np.float32(load(words, HIGHEST)), load(words, ROUNDING)
    rectifies, clips = load(words, RECTIFIES), load(words, CLIPS)
    again = load(words, CODES) == 0 and load(words, VALUES) != 0  # all is recomputed from the quantized values
    wants_terms = load(words, TERMS) != 0 or load(words, SUMS) != 0
    scales, zero_points, clipped = f32_scratch(BLOCK), f32_scratch(BLOCK), f32_scratch(BLOCK)
    q, steps, first_terms, second_terms = f32_scratch(BLOCK), f32_scratch(BLOCK), f32_scratch(BLOCK), f32_scratch(BLOCK)
    rounded, spent, staged, of_values = f32_scratch(BLOCK), f32_scratch(BLOCK), f32_scratch(BLOCK), f32_scratch(BLOCK)
    kind = load(words, KIND)
    bits, codes, numbers, own = u8_scratch(BLOCK), u32_scratch(BLOCK), u32_scratch(BLOCK), f32_scratch(LANES)
    spare = np.uint32((np.int64(1) << bit_width) - 1) if has_spare else np.uint32(0xFFFFFFFF)
    single = load(words, SCALES) == 1 and load(words, ZERO_POINTS) == 1
    has_zero = load(words, ZERO_POINTS) == 1 and load(f32_at(load(words, ZERO_POINT)), 0) == np.float32(0.0)
    fill_numbers(words, 0, BLOCK if single else 0, scales, zero_points)
    for e in range(BLOCK):
        store(bits, e, np.uint8(1))
    direct, learns, has_codes = kind == FLOAT32, load(words, KINDS_OF_TERMS) == 4, load(words, CODES) != 0
    is_fused = again and direct and rounding == 0 and not learns
    of_residuals = has_codes and load(words, RESIDUAL) != 0 and direct and wants_terms and not learns
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        columns = (count + 7) // 8
        if not single:
            fill_numbers(words, first, count, scales, zero_points)
        g, x = stage(load(words, X), kind, first, count, staged), of_values
        if load(words, VALUES):
            x = stage(load(words, VALUES), kind, first, count, of_values)
        target = advance(f32_at(load(words, OUT)), first) if direct else spent
        if has_codes and wants_terms:
            bytes_to_codes(advance(u8_at(load(words, CODES)), first // 8 * bit_width), columns, bit_width, codes)
        if load(words, RESIDUAL) and not again:
            bytes_to_codes(advance(u8_at(load(words, RESIDUAL)), first // 8 * width), columns, width, numbers)
            _levels_of(numbers, f32_at(load(words, LEVELS)), width, count, steps)
        if is_fused:
            _all_of_nearest(
                *(g, x, scales, zero_points, count, lowest, highest, rectifies, clips, target),
                *(first_terms, second_terms),
            )
        elif of_residuals:
            _all_of_residuals(
                *(g, codes, numbers, steps, scales, zero_points, count, lowest, spare, target),
                *(first_terms, second_terms),
            )
        else:
            if again:
                shift_values(x, spent, rectifies, count, scales, zero_points, kind, steps)
                round_values(steps, count, rounding, rounded)
                pass_mask(x, rounded, count, lowest, highest, rectifies, clips, bits)
            elif load(words, RESIDUAL):
                for e in range(count):
                    store(bits, e, np.uint8(load(numbers, e) != np.uint32(0)))
                settle(steps, kind, count)
            elif load(words, MASK):
                spread_bits(load(words, MASK), first, count, bits)
            for e in range(count):
                through = load(g, e) * load(scales, e)
                store(clipped, e, through if load(bits, e) else np.float32(0.0))
            settle(clipped, kind, count)
            for e in range(count):
                store(target, e, load(clipped, e) / load(scales, e))
            if not direct:
                emit(spent, load(words, OUT), kind, first, count)
            if not wants_terms:
                continue
            if learns or not (has_codes or again):
                if again and rectifies:
                    pass_mask(x, rounded, count, lowest, highest, 0, clips, bits)
                _terms_of_zero_point(g, scales, bits, count, kind, first_terms, second_terms)
                _place_terms(words, index, count, 2, first_terms, second_terms, kind, own)
            if again:
                for e in range(count):
                    r = load(rounded, e)
                    r = highest if r > highest else r
                    r = lowest if r < lowest else r
                    store(q, e, r - load(zero_points, e))
            elif has_codes:
                _unpack(codes, columns, bit_width, count, lowest, has_spare, zero_points, q)
            else:
                continue
            settle(q, kind, count)
            if load(words, RESIDUAL):  # unclipped elements have x / s - q for x / s, and NaN or 0 for q
                for e in range(count):
                    store(q, e, load(q, e) * np.float32(0.0) if load(bits, e) else load(q, e))
            elif not (again and has_zero):  # where steps are x / s + 0
                for e in range(count):
                    store(steps, e, load(x, e) / load(scales, e))
                settle(steps, kind, count)
            _terms(g, clipped, q, steps, scales, count, kind, first_terms, second_terms)
        _place_terms(words, index, count, 0, first_terms, second_terms, kind, own)


@kernel
def decode_integers_blocks(words_at, start, stop):
    words = i64_at(words_at)
    numel, bit_width, has_spare = load(words, NUMEL), load(words, BIT_WIDTH), load(words, HAS_SPARE)
    lowest, kind = np.float32(load(words, LOWEST)), load(words, KIND)
    scales, zero_points, q, codes = f32_scratch(BLOCK), f32_scratch(BLOCK), f32_scratch(BLOCK), u32_scratch(BLOCK)
    single = load(words, SCALES) == 1 and load(words, ZERO_POINTS) == 1
    fill_numbers(words, 0, BLOCK if single else 0, scales, zero_points)
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        if not single:
            fill_numbers(words, first, count, scales, zero_points)
        columns = (count + 7) // 8
        bytes_to_codes(advance(u8_at(load(words, CODES)), first // 8 * bit_width), columns, bit_width, codes)
        _unpack(codes, columns, bit_width, count, lowest, has_spare, zero_points, q)
        settle(q, kind, count)
        out = advance(f32_at(load(words, OUT)), first) if kind == FLOAT32 else q
        for e in range(count):
            store(out, e, load(q, e) * load(scales, e))
        if kind != FLOAT32:
            emit(q, load(words, OUT), kind, first, count)


def decode_integers(codes: Tensor, plan: IntegerPlan, scale: Tensor, zero_point: Tensor, target: Tensor) -> None:
    if plan.bit_width > 8 or not reads(target, plan, scale, zero_point):
        return NotImplemented
    arrays = None, target, None, codes, None, None, None
    run(decode_integers_blocks, plan, scale, zero_point, arrays, 0, 0, 0, 0, KINDS[target.dtype])


def fake_quantize_backward(
    grad: Tensor,
    plan: IntegerPlan,
    scale: Tensor,
    zero_point: Tensor,
    residual_of: Any,
    codes: Tensor | None,
    mask: Tensor | None,
    values: Tensor | None,
    residual: Tensor | None,
    target: Tensor,
    terms: Tensor | None,
    sums: Tensor | None,
    parts: Tensor | None,
) -> None:
    """The kernel adds float32 where torch's order of a sum is known; else torch adds the terms."""
    if (
        parts is not None
        or not reads(grad, plan, scale, zero_point, values, target, terms, sums)
        or (codes is not None and plan.bit_width > 8)
    ):
        return NotImplemented
    threads = torch.get_num_threads()
    blocks, first = -(-plan.numel // BLOCK), 0 if codes is not None or values is not None else 2
    rows = next((each.shape[0] for each in (sums, terms) if each is not None), 0)
    runs = None if sums is None or terms is not None else runs_of(plan.numel, threads)
    if runs is not None and (grad.dtype is not torch.float32 or not adds_as_torch(threads)):
        runs = None
    if sums is not None and runs is None and terms is None:
        terms = grad.new_empty(rows, plan.numel)
    lanes = rest = None
    if runs is not None:
        lanes, rest = grad.new_empty(rows, blocks * LANES), grad.new_empty(rows, BLOCK)
    levels, width = (None, 0) if residual is None else (residual_of.rows(grad.device)[0], residual_of.bit_width)
    arrays = grad, target, values, codes, mask, residual, None
    words = address(levels), 0, width, 0, KINDS[grad.dtype], address(terms), address(lanes), address(rest), rows
    run(fake_quantize_backward_blocks, plan, scale, zero_point, arrays, *words)
    if sums is not None and runs is not None and lanes is not None and rest is not None:
        for place in range(first, rows):
            sums[place] = finish(lanes[place], rest[place], plan.numel, runs, threads)
    elif sums is not None and terms is not None:
        for place in range(first, rows):
            sums[place] = terms[place].sum()
