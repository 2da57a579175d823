"""Kernel that counts and sums the values on either side of each group's offset; see `quantizers.kernel_ops.moments`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import stage
from brevact.cpu_kernels.groups import BLOCK, GROUPS, INNER, KIND, NEAREST, NUMEL, run_of
from brevact.cpu_kernels.memory import advance, f32_scratch, i64_at, inlined, kernel, load, rint, store, u32_scratch
from brevact.cpu_kernels.quantize_grid import affine
from brevact.cpu_kernels.ranges import parts_of
from brevact.cpu_kernels.tables import grid_table
from brevact.cpu_kernels.teams import share
from brevact.geometry import Geometry

COLUMNS = 6
"""Sums of a group: count, sum and sum of squares below its offset, then above."""
_LARGEST_UNIT = np.float32(65536.0)


@inlined
def _split(z, count, counts, units, sign):
    """Whether 0 < sign * z < infinity, and min(rint(|z|), 65536) where it is, else 0."""
    for e in range(count):
        v = load(z, e) * sign
        r = np.uint32(np.int32(rint(v if v < _LARGEST_UNIT else _LARGEST_UNIT)))
        inside = v > np.float32(0.0) and v < np.float32(np.inf)
        store(counts, e, np.uint32(inside))
        store(units, e, r if inside else np.uint32(0))


@inlined
def _add_run(counts, units, count, group, groups, sums):
    """Add elements of one group: sums of a block fit 32 bits, those of squares do not."""
    n, s, q = np.uint32(0), np.uint32(0), np.uint64(0)
    for e in range(count):
        n = np.uint32(n + load(counts, e))
        s = np.uint32(s + load(units, e))
        q = np.uint64(q + np.uint64(np.uint64(load(units, e)) * np.uint64(load(units, e))))
    store(sums, group, load(sums, group) + np.int64(n))
    store(sums, groups + group, load(sums, groups + group) + np.int64(s))
    store(sums, 2 * groups + group, load(sums, 2 * groups + group) + np.int64(q))


@inlined
def _add_each(counts, units, count, group, groups, sums):
    n, s, q = advance(sums, group), advance(sums, groups + group), advance(sums, 2 * groups + group)
    for e in range(count):
        store(n, e, load(n, e) + np.int64(load(counts, e)))
    for e in range(count):
        store(s, e, load(s, e) + np.int64(load(units, e)))
    for e in range(count):
        r = np.uint64(load(units, e))
        store(q, e, load(q, e) + np.int64(np.uint64(r * r)))


@kernel
def add_moments(source, offset, inverse, sums_at, table_at, blocks, parts, start, stop):
    """Add the moments of parts start to stop, each a run of blocks, to the part's six int64 sums of each group."""
    table = i64_at(table_at)
    numel, block, inner, groups = load(table, NUMEL), load(table, BLOCK), load(table, INNER), load(table, GROUPS)
    scratch, z, counts, units = f32_scratch(block), f32_scratch(block), u32_scratch(block), u32_scratch(block)
    for part in range(start, stop):
        for index in range(blocks * part // parts, blocks * (part + 1) // parts):
            first = index * block
            count = min(block, numel - first)
            affine(stage(source, load(table, KIND), first, count, scratch), first, count, offset, inverse, table, z)
            for side in range(2):
                _split(z, count, counts, units, np.float32(2 * side - 1))
                sums = advance(i64_at(sums_at), (2 * part + side) * 3 * groups)
                e = 0
                while e < count:
                    group, run = run_of(first + e, count - e, table)
                    if inner == 1:
                        _add_each(advance(counts, e), advance(units, e), run, group, groups, sums)
                    else:
                        _add_run(advance(counts, e), advance(units, e), run, group, groups, sums)
                    e += run


def moments(flat: Tensor, geometry: Geometry, offset: Tensor, inverse: Tensor) -> Tensor:
    table, threads = grid_table(geometry, flat.dtype, NEAREST), torch.get_num_threads()
    sums = np.zeros((parts_of(geometry, threads), COLUMNS, geometry.groups), dtype=np.int64)
    offset, inverse = offset.contiguous(), inverse.contiguous()  # in names, so that their memory lives on
    pointers = flat.data_ptr(), offset.data_ptr(), inverse.data_ptr(), sums.ctypes.data
    share(
        add_moments,
        (*pointers, table.address, table.blocks, len(sums)),
        len(sums),
        -(-geometry.numel // len(sums)),
        threads,
    )
    return torch.from_numpy(sums.sum(0).T)
