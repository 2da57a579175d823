"""Codes of blocks to eight-plane bytes and back: of 1 to 32 bits, and one-bit masks, in blocks of 512 elements.

Byte j of a mask holds the bits of elements i * W + j at positions i.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import (
    BFLOAT16,
    BOOL,
    FLOAT32,
    KINDS,
    bfloat16_to_float,
    float_to_bfloat16,
    float_to_half,
    half_to_float,
    stage,
)
from brevact.cpu_kernels.memory import (
    advance,
    f32_at,
    f32_scratch,
    float64_of,
    i32_at,
    i64_at,
    inlined,
    kernel,
    load,
    store,
    u8_at,
    u8_scratch,
    u16_at,
    u32_at,
    u32_scratch,
)
from brevact.cpu_kernels.teams import share
from brevact.geometry import LARGEST_BLOCK

_U1, _U8 = np.uint32(1), np.uint32(8)


@inlined
def words_to_bytes(low, high, columns, bit_width, out):
    """Write columns of b <= 8 bytes from packed codes: 0 to 3 of a column in the low word, 4 to 7 in the high."""
    half = np.uint32(4 * bit_width)
    for k in range(min(bit_width, 4)):
        shift = np.uint32(8 * k)
        for j in range(columns):
            # two shifts: a single one by 32 is undefined
            word = np.uint32(load(low, j) | np.uint32(np.uint32(load(high, j) << np.uint32(half - _U1)) << _U1))
            store(out, k * columns + j, np.uint8(np.uint32(word >> shift)))
    for k in range(4, bit_width):
        shift = np.uint32(32 - 4 * bit_width + 8 * (k - 4))
        for j in range(columns):
            store(out, k * columns + j, np.uint8(np.uint32(load(high, j) >> shift)))


@inlined
def bytes_to_words(source, columns, bit_width, low, high):
    mask = np.uint32((1 << (4 * bit_width)) - 1)
    shift = np.uint32(4 * bit_width)
    if bit_width == 1:
        for j in range(columns):
            store(low, j, np.uint32(load(source, j)))
    elif bit_width == 2:
        for j in range(columns):
            store(low, j, np.uint32(load(source, j) | np.uint32(np.uint32(load(source, columns + j)) << _U8)))
    else:
        for j in range(columns):
            word = np.uint32(load(source, j) | np.uint32(np.uint32(load(source, columns + j)) << _U8))
            store(low, j, np.uint32(word | np.uint32(np.uint32(load(source, 2 * columns + j)) << np.uint32(16))))
        if bit_width > 3:
            for j in range(columns):
                byte = np.uint32(load(source, 3 * columns + j))
                store(low, j, np.uint32(load(low, j) | np.uint32(byte << np.uint32(24))))
    if bit_width <= 4:
        for j in range(columns):
            store(high, j, np.uint32(load(low, j) >> np.uint32(shift - _U1)) >> _U1)
    else:
        for j in range(columns):
            store(high, j, np.uint32(np.uint32(load(low, j) >> np.uint32(shift - _U1)) >> _U1))
        for k in range(4, bit_width):
            left = np.uint32(32 - 4 * bit_width + 8 * (k - 4))
            for j in range(columns):
                byte = np.uint32(load(source, k * columns + j))
                store(high, j, np.uint32(load(high, j) | np.uint32(byte << left)))
    for j in range(columns):
        store(low, j, np.uint32(load(low, j) & mask))


@inlined
def codes_to_bytes(codes, columns, bit_width, out):
    """Write the b * W bytes of W columns from 8 * W separate codes below 2^b, uint32, for any bit width b."""
    for k in range(bit_width):
        i = 8 * k // bit_width
        right = np.uint32(8 * k - i * bit_width)
        for j in range(columns):
            store(out, k * columns + j, np.uint8(np.uint32(load(codes, i * columns + j) >> right)))
        i += 1
        while i * bit_width < 8 * k + 8 and i < 8:
            left = np.uint32(i * bit_width - 8 * k)
            for j in range(columns):
                byte = np.uint8(np.uint32(load(codes, i * columns + j) << left))
                store(out, k * columns + j, np.uint8(load(out, k * columns + j) | byte))
            i += 1


@inlined
def bytes_to_codes(source, columns, bit_width, codes):
    mask = np.uint32((np.int64(1) << bit_width) - 1)
    for i in range(8):
        k = i * bit_width // 8
        right = np.uint32(i * bit_width - 8 * k)
        for j in range(columns):
            store(codes, i * columns + j, np.uint32(np.uint32(load(source, k * columns + j)) >> right))
        k += 1
        while 8 * k < (i + 1) * bit_width:
            left = np.uint32(8 * k - i * bit_width)
            for j in range(columns):
                byte = np.uint32(np.uint32(load(source, k * columns + j)) << left)
                store(codes, i * columns + j, np.uint32(load(codes, i * columns + j) | byte))
            k += 1
        for j in range(columns):
            store(codes, i * columns + j, np.uint32(load(codes, i * columns + j) & mask))


@inlined
def _low_words(source, item_size, first, count, mask, codes):
    """The low bits of integers of 1, 2, 4 or 8 bytes, as uint32; signs do not matter."""
    if item_size == 1:
        x8 = advance(u8_at(source), first)
        for e in range(count):
            store(codes, e, np.uint32(np.uint32(load(x8, e)) & mask))
    elif item_size == 2:
        x16 = advance(u16_at(source), first)
        for e in range(count):
            store(codes, e, np.uint32(np.uint32(load(x16, e)) & mask))
    elif item_size == 4:
        x32 = advance(u32_at(source), first)
        for e in range(count):
            store(codes, e, np.uint32(load(x32, e) & mask))
    else:
        x64 = advance(i64_at(source), first)
        for e in range(count):
            store(codes, e, np.uint32(np.uint32(load(x64, e)) & mask))


@kernel
def pack_blocks(source, item_size, packed, bit_width, block, numel, start, stop):
    """Pack codes of 1 to 32 bits, at most `LARGEST_BLOCK` in a block; integers narrower than the codes are unsigned."""
    codes = u32_scratch(block)
    mask = np.uint32((np.int64(1) << bit_width) - 1)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        columns = (count + 7) // 8
        _low_words(source, item_size, first, count, mask, codes)
        for e in range(count, 8 * columns):
            store(codes, e, np.uint32(0))
        codes_to_bytes(codes, columns, bit_width, advance(u8_at(packed), first // 8 * bit_width))


@kernel
def unpack_blocks(packed, target, item_size, bit_width, block, numel, start, stop):
    codes = u32_scratch(block)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        bytes_to_codes(advance(u8_at(packed), first // 8 * bit_width), (count + 7) // 8, bit_width, codes)
        if item_size == 4:
            y32 = advance(u32_at(target), first)
            for e in range(count):
                store(y32, e, load(codes, e))
        else:
            y64 = advance(i64_at(target), first)
            for e in range(count):
                store(y64, e, np.int64(load(codes, e)))


def pack_codes(codes: Tensor, bit_width: int, block_size: int, packed: Tensor) -> None:
    """The kernel's scratch is limited, and it does not extend signs."""
    if block_size > LARGEST_BLOCK or (codes.dtype != torch.uint8 and bit_width > 8 * codes.itemsize):
        return NotImplemented
    numel = codes.numel()
    arguments = (codes.data_ptr(), codes.itemsize, packed.data_ptr(), bit_width, block_size, numel)
    share(pack_blocks, arguments, -(-numel // block_size), block_size, torch.get_num_threads())


def unpack_codes(packed: Tensor, bit_width: int, block_size: int, codes: Tensor) -> None:
    if block_size > LARGEST_BLOCK:
        return NotImplemented
    numel = codes.numel()
    arguments = (packed.data_ptr(), codes.data_ptr(), codes.itemsize, bit_width, block_size, numel)
    share(unpack_blocks, arguments, -(-numel // block_size), block_size, torch.get_num_threads())


BLOCK = 512


@inlined
def _set_bits(source, kind, first, count, scratch, bits):
    """One byte, 0 or 1, for each element: a bool, or whether a ReLU of the float passes its gradient."""
    if kind == BOOL:
        x8 = advance(u8_at(source), first)
        for e in range(count):
            store(bits, e, np.uint8(load(x8, e) != np.uint8(0)))
    else:
        x = stage(source, kind, first, count, scratch)
        for e in range(count):
            store(bits, e, np.uint8(not load(x, e) <= np.float32(0.0)))


@inlined
def bits_to_bytes(bits, columns, out):
    """Pack the bits of a block, one byte each."""
    b1, b2, b3 = advance(bits, columns), advance(bits, 2 * columns), advance(bits, 3 * columns)
    b4, b5, b6 = advance(bits, 4 * columns), advance(bits, 5 * columns), advance(bits, 6 * columns)
    b7 = advance(bits, 7 * columns)
    for j in range(columns):
        low = load(bits, j) | load(b1, j) << 1 | load(b2, j) << 2 | load(b3, j) << 3
        high = load(b4, j) << 4 | load(b5, j) << 5 | load(b6, j) << 6 | load(b7, j) << 7
        store(out, j, np.uint8(low | high))


@kernel
def pack_mask_blocks(source, kind, packed, numel, start, stop):
    bits, scratch = u8_scratch(BLOCK), f32_scratch(BLOCK)
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        columns = (count + 7) // 8
        _set_bits(source, kind, first, count, scratch, bits)
        for e in range(count, 8 * columns):
            store(bits, e, np.uint8(0))
        bits_to_bytes(bits, columns, advance(u8_at(packed), first // 8))


@inlined
def spread_bits(packed, first, count, bits):
    """The bits of a block, one byte each."""
    columns = (count + 7) // 8
    source = advance(u8_at(packed), first // 8)
    for i in range(8):
        plane = advance(bits, i * columns)
        for j in range(columns):
            store(plane, j, np.uint8(np.uint8(load(source, j) >> np.uint8(i)) & np.uint8(1)))


@kernel
def unpack_mask_blocks(packed, target, numel, start, stop):
    bits = u8_scratch(BLOCK)
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        spread_bits(packed, first, count, bits)
        out = advance(u8_at(target), first)
        for e in range(count):
            store(out, e, load(bits, e))


@inlined
def _keep_or_zero(grad, target, kind, first, count, bits):
    if kind == FLOAT32:
        g32, y32 = advance(i32_at(grad), first), advance(i32_at(target), first)
        if grad == target:  # LLVM vectorizes a loop over one memory, and over two that do not overlap
            for e in range(count):
                store(y32, e, load(y32, e) if load(bits, e) else np.int32(0))
        else:
            for e in range(count):
                store(y32, e, load(g32, e) if load(bits, e) else np.int32(0))
    else:
        g16, y16 = advance(u16_at(grad), first), advance(u16_at(target), first)
        for e in range(count):
            store(y16, e, load(g16, e) if load(bits, e) else np.uint16(0))


@inlined
def _keep_or_scale(grad, target, kind, first, count, bits, slope):
    if kind == FLOAT32:
        g32, y32 = advance(f32_at(grad), first), advance(f32_at(target), first)
        for e in range(count):
            store(y32, e, load(g32, e) * (np.float32(1.0) if load(bits, e) else np.float32(slope)))
    elif kind == BFLOAT16:
        g16, y16 = advance(u16_at(grad), first), advance(u16_at(target), first)
        for e in range(count):
            factor = np.float32(1.0) if load(bits, e) else np.float32(slope)
            store(y16, e, float_to_bfloat16(bfloat16_to_float(load(g16, e)) * factor))
    else:
        g16, y16 = advance(u16_at(grad), first), advance(u16_at(target), first)
        for e in range(count):
            factor = np.float32(1.0) if load(bits, e) else np.float32(slope)
            store(y16, e, float_to_half(half_to_float(load(g16, e)) * factor))


@kernel
def mask_multiply_blocks(packed, grad, target, kind, slope_bits, numel, start, stop):
    """The slope is given as the bits of a float64; 0.0 gives +0."""
    bits = u8_scratch(BLOCK)
    slope = float64_of(slope_bits)
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        spread_bits(packed, first, count, bits)
        if slope == 0.0:
            _keep_or_zero(grad, target, kind, first, count, bits)
        else:
            _keep_or_scale(grad, target, kind, first, count, bits, slope)


def pack_mask(x: Tensor, packed: Tensor) -> None:
    """Types that the kernel does not read are those that quantizers do not take either."""
    kind, numel = KINDS.get(x.dtype), x.numel()
    if kind is None:
        return NotImplemented
    arguments = (x.data_ptr(), kind, packed.data_ptr(), numel)
    share(pack_mask_blocks, arguments, -(-numel // BLOCK), BLOCK, torch.get_num_threads())


def unpack_mask(packed: Tensor, mask: Tensor) -> None:
    numel = mask.numel()
    arguments = (packed.data_ptr(), mask.data_ptr(), numel)
    share(unpack_mask_blocks, arguments, -(-numel // BLOCK), BLOCK, torch.get_num_threads())


def mask_multiply(packed: Tensor, numel: int, grad: Tensor, negative_slope: float, target: Tensor) -> None:
    kind = KINDS.get(grad.dtype)
    if kind is None:
        return NotImplemented
    (slope_bits,) = struct.unpack("q", struct.pack("d", negative_slope))
    arguments = (packed.data_ptr(), grad.data_ptr(), target.data_ptr(), kind, slope_bits, numel)
    share(mask_multiply_blocks, arguments, -(-numel // BLOCK), BLOCK, torch.get_num_threads())
