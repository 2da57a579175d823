"""Float32 elements that do not lie in memory in the order of a kernel's blocks: read, and written, by strides."""

from __future__ import annotations

from brevact.cpu_kernels.memory import advance, f32_at, inlined, load, store
from brevact.geometry import MOST_DIMS

OF_GRAD, OF_VALUES = MOST_DIMS, 2 * MOST_DIMS
"""Where strides begin, behind the sizes."""


@inlined
def gather(source, places, strides, first, count, out):
    """Read elements first to first + count of a tensor whose sizes, and strides, stand at these places."""
    rows, columns, size = load(places, 1), load(places, 2), load(places, 3)
    x, step = f32_at(source), load(places, strides + 3)
    of_plane, of_row, of_column = load(places, strides), load(places, strides + 1), load(places, strides + 2)
    i, j = first // size, first % size
    row, column = i // columns, i % columns
    plane, row = row // rows, row % rows
    e = 0
    while e < count:
        run = min(size - j, count - e)
        at, to = advance(x, plane * of_plane + row * of_row + column * of_column + j * step), advance(out, e)
        if step == 1:
            for k in range(run):
                store(to, k, load(at, k))
        else:
            for k in range(run):
                store(to, k, load(at, k * step))
        e, j, column = e + run, 0, column + 1
        if column == columns:
            column, row = 0, row + 1
        if row == rows:
            row, plane = 0, plane + 1


@inlined
def scatter(values, places, strides, first, count, target):
    rows, columns, size = load(places, 1), load(places, 2), load(places, 3)
    x, step = f32_at(target), load(places, strides + 3)
    of_plane, of_row, of_column = load(places, strides), load(places, strides + 1), load(places, strides + 2)
    i, j = first // size, first % size
    row, column = i // columns, i % columns
    plane, row = row // rows, row % rows
    e = 0
    while e < count:
        run = min(size - j, count - e)
        to, at = advance(x, plane * of_plane + row * of_row + column * of_column + j * step), advance(values, e)
        if step == 1:
            for k in range(run):
                store(to, k, load(at, k))
        else:
            for k in range(run):
                store(to, k * step, load(at, k))
        e, j, column = e + run, 0, column + 1
        if column == columns:
            column, row = 0, row + 1
        if row == rows:
            row, plane = 0, plane + 1
