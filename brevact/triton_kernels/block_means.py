"""Kernels of block means and residuals: `kernel_ops.split_maps` and `kernel_ops.join_maps`, to the same bits.

Shapes: P blocks; R rows by C columns of a tile, of a tensor seen as a matrix with the columns of a map. A map has
depth * height rows. Indices of blocks and of rows are below 2^31.
"""

import triton
import triton.language as tl

from brevact.triton_kernels.floats import cast, maximum, minimum, widen
from brevact.triton_kernels.groups import is_finite

_LARGEST_MEAN = tl.constexpr(65504.0)


@triton.jit
def mean_kernel(
    x_ptr, low_ptr, blocks, depth, height, width,
    BLOCK_DEPTH: tl.constexpr, BLOCK_HEIGHT: tl.constexpr, BLOCK_WIDTH: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Float16 means of P blocks: rows first, then columns, one after the other; NaN where not all is finite.

    0 where an element is 0.
    """
    block = tl.program_id(0) * P + tl.arange(0, P)
    across, down = tl.cdiv(width, BLOCK_WIDTH), tl.cdiv(height, BLOCK_HEIGHT)
    line = block // across
    layer = line // down
    layers = tl.cdiv(depth, BLOCK_DEPTH)
    first_column = (block % across) * BLOCK_WIDTH
    first_height = (line % down) * BLOCK_HEIGHT
    first_depth = (layer % layers) * BLOCK_DEPTH
    first_row = ((layer // layers) * depth + first_depth) * height + first_height
    total = tl.zeros((P,), tl.float32)
    finite, zero = tl.full((P,), 1, tl.int1), tl.full((P,), 0, tl.int1)
    for k in range(BLOCK_WIDTH):
        column = first_column + k
        in_row = (block < blocks) & (column < width)
        pointers = x_ptr + (first_row.to(tl.int64) * width + column)
        column_sum = tl.zeros((P,), tl.float32)
        for i in range(BLOCK_DEPTH):
            in_layer = in_row & (first_depth + i < depth)
            for j in range(BLOCK_HEIGHT):
                valid = in_layer & (first_height + j < height)
                offset = (i * height + j).to(tl.int64) * width
                x = widen(tl.load(pointers + offset, mask=valid, other=0.0))
                column_sum += x
                finite &= is_finite(x)
                zero |= valid & (x == 0.0)
        total += column_sum
    rows = tl.minimum(depth - first_depth, BLOCK_DEPTH) * tl.minimum(height - first_height, BLOCK_HEIGHT)
    count = (rows * tl.minimum(width - first_column, BLOCK_WIDTH)).to(tl.float32)
    mean = tl.div_rn(total, tl.where(block < blocks, count, 1.0))
    mean = tl.where((mean == mean) & ~zero, mean, 0.0)
    mean = tl.minimum(tl.maximum(mean, -_LARGEST_MEAN), _LARGEST_MEAN)
    bits = tl.where(finite, mean.to(tl.float16).to(tl.int16, bitcast=True), 0x7E00)
    tl.store(low_ptr + block, bits.to(tl.int16).to(tl.float16, bitcast=True), mask=block < blocks)


@triton.jit
def _mean(pointer, valid):
    """Float16 means as float32, 0 for NaN."""
    mean = widen(tl.load(pointer, mask=valid))
    return tl.where(mean == mean, mean, 0.0)


@triton.jit
def _tile(
    rows, depth, height, width,
    BLOCK_DEPTH: tl.constexpr, BLOCK_HEIGHT: tl.constexpr, BLOCK_WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A program's elements and the blocks they lie in, [R, C] each, and which exist."""
    tiles = tl.cdiv(width, C)
    row = (tl.program_id(0) // tiles) * R + tl.arange(0, R)[:, None]
    column = (tl.program_id(0) % tiles) * C + tl.arange(0, C)[None, :]
    layer = row // height
    line = (row % height) // BLOCK_HEIGHT
    layers, down, across = tl.cdiv(depth, BLOCK_DEPTH), tl.cdiv(height, BLOCK_HEIGHT), tl.cdiv(width, BLOCK_WIDTH)
    line += ((layer // depth) * layers + (layer % depth) // BLOCK_DEPTH) * down
    element = row.to(tl.int64) * width + column
    block = line.to(tl.int64) * across + column // BLOCK_WIDTH
    return element, block, (row < rows) & (column < width)


@triton.jit
def subtract_means_kernel(
    x_ptr, low_ptr, residual_ptr, rows, depth, height, width,
    BLOCK_DEPTH: tl.constexpr, BLOCK_HEIGHT: tl.constexpr, BLOCK_WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """residual = x - upsample(low)."""
    element, block, valid = _tile(rows, depth, height, width, BLOCK_DEPTH, BLOCK_HEIGHT, BLOCK_WIDTH, R, C)
    x = widen(tl.load(x_ptr + element, mask=valid))
    tl.store(residual_ptr + element, x - _mean(low_ptr + block, valid), mask=valid)


@triton.jit
def add_means_kernel(
    residual_ptr, low_ptr, other_ptr, target_ptr, rows, depth, height, width, largest,
    BLOCK_DEPTH: tl.constexpr, BLOCK_HEIGHT: tl.constexpr, BLOCK_WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """target = clamp(upsample(low) + residual) to +-largest, times `other` unless that is None."""
    element, block, valid = _tile(rows, depth, height, width, BLOCK_DEPTH, BLOCK_HEIGHT, BLOCK_WIDTH, R, C)
    y = _mean(low_ptr + block, valid) + tl.load(residual_ptr + element, mask=valid)
    y = cast(maximum(minimum(y, largest), -largest), target_ptr.dtype.element_ty)
    if other_ptr is not None:
        factor = widen(tl.load(other_ptr + element, mask=valid))
        y = cast(widen(y) * factor, target_ptr.dtype.element_ty)
    tl.store(target_ptr + element, y, mask=valid)
