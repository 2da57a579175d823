"""Sums of float32 numbers in the order of `torch.sum` on the CPU, from kernels that make the numbers in blocks.

ATen adds a contiguous array in 32 lanes: the elements of 16 rows, that is of a block, one below the other; sums of 16
blocks, of 256 and of 4096 likewise; then the rest, and last the lanes. Each thread does so for its own run of
elements. Blocks are independent of each other. Source: aten/src/ATen/native/cpu/SumKernel.cpp, `cascade_sum`, and
TensorIteratorReduce.cpp, `two_pass_reduction`. Whether this is so where the package runs is tried once.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.memory import advance, f32_at, f32_scratch, inlined, kernel, load, store
from brevact.cpu_kernels.teams import share

BLOCK = 512
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


@inlined
def add_run(lanes, rest, run, numel, sums, index, levels):
    """Add the elements of a run; `levels` is scratch. See `add_runs`."""
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
def add_runs(lanes, rest, run, numel, sums, start, stop):
    """Add the elements of runs start to stop: lanes' sums of `run` full blocks each, and `rest` of the last block."""
    levels = f32_scratch(LEVELS_OF_SUM * LANES)
    for index in range(start, stop):
        add_run(lanes, rest, run, numel, sums, index, levels)


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


def finish_into(sums: Tensor, lanes: Tensor, rest: Tensor, numel: int, runs: tuple[int, int], threads: int) -> None:
    """Write the sums, (k,), of several arrays, each by a row of `lanes` and of `rest`; see `finish`."""
    run, count = runs
    if count > 1 or (numel >= _GRAIN and threads > 1):
        for place in range(len(sums)):
            sums[place] = finish(lanes[place], rest[place], numel, runs, threads)
        return
    lane_bytes, rest_bytes = lanes.stride(0) * lanes.itemsize, rest.stride(0) * rest.itemsize
    starts = lanes.data_ptr(), rest.data_ptr(), sums.data_ptr()
    for place in range(len(sums)):
        arguments = starts[0] + place * lane_bytes, starts[1] + place * rest_bytes, run, numel
        share(add_runs, (*arguments, starts[2] + place * sums.itemsize), 1, run, 1)


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
