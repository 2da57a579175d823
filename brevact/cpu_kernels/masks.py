"""Kernels of one-bit masks, in blocks of 512 elements: byte j holds the bits of elements i * W + j at positions i."""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import (
    BFLOAT16,
    BOOL,
    FLOAT32,
    FLOAT64,
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
    f64_at,
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
)
from brevact.cpu_kernels.teams import share

BLOCK = 512


@inlined
def _set_bits(source, kind, first, count, scratch, bits):
    """One byte, 0 or 1, for each element: a bool, or whether a ReLU of the float passes its gradient."""
    if kind == BOOL:
        x8 = advance(u8_at(source), first)
        for e in range(count):
            store(bits, e, np.uint8(load(x8, e) != np.uint8(0)))
    elif kind == FLOAT64:  # float32 has no room for the smallest
        x64 = advance(f64_at(source), first)
        for e in range(count):
            store(bits, e, np.uint8(not load(x64, e) <= 0.0))
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
    elif kind == FLOAT64:
        g64, y64 = advance(i64_at(grad), first), advance(i64_at(target), first)
        for e in range(count):
            store(y64, e, load(g64, e) if load(bits, e) else np.int64(0))
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
    elif kind == FLOAT64:
        g64, y64 = advance(f64_at(grad), first), advance(f64_at(target), first)
        for e in range(count):
            store(y64, e, load(g64, e) * (1.0 if load(bits, e) else slope))
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
