"""Positions on a grid to codes, codes to eight-plane bytes, and back: of at most 8 bits; and one-bit masks.

Rounding is to nearest, stochastic by Philox4x32, or on shifted levels. Byte j of a mask holds the bits of elements
i * W + j at positions i.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import KINDS, emit, stage
from brevact.cpu_kernels.intrinsics import advance, f32_scratch, f64_of, inlined, kernel, load, store, u8_at, u8_scratch
from brevact.cpu_kernels.teams import share
from brevact.geometry import LARGEST_BLOCK

BLOCK = 512
"""Elements of a block of a mask."""

_COLUMNS = np.int64(BLOCK // 8)

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 7
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@inlined
def _round(c0, c1, c2, c3, k0, k1):
    """One round on 32-bit words held in uint64."""
    p0, p1 = c0 * _M0, c2 * _M1
    return (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW


@inlined
def _bump(key, step):
    return (key + step) & _LOW


@inlined
def halves_of(seed):
    """The low and the high half of a seed, each in a uint64."""
    return np.uint64(seed) & _LOW, np.uint64(seed) >> _32


@inlined
def shift_of(group, k0, k1):
    """The shift of a group's levels; see `reference.shifts`."""
    counter = np.uint64(group)
    c0, c1, c2, c3 = counter & _LOW, counter >> _32, np.uint64(1), np.uint64(0)
    for _ in range(_ROUNDS):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        k0, k1 = _bump(k0, _W0), _bump(k1, _W1)
    return np.float32(c0 >> np.uint64(8)) * np.float32(2.0**-24) - np.float32(0.5)


@inlined
def column_words(first, columns, k0, k1, words):
    """Write the four random words of columns, whose indices are the counters, in rows; k0 is the seed's low half."""
    a1, b1 = _bump(k0, _W0), _bump(k1, _W1)
    a2, b2 = _bump(a1, _W0), _bump(b1, _W1)
    a3, b3 = _bump(a2, _W0), _bump(b2, _W1)
    a4, b4 = _bump(a3, _W0), _bump(b3, _W1)
    a5, b5 = _bump(a4, _W0), _bump(b4, _W1)
    a6, b6 = _bump(a5, _W0), _bump(b5, _W1)
    zero = np.uint64(0)
    w1, w2, w3 = advance(words, columns), advance(words, 2 * columns), advance(words, 3 * columns)
    for j in range(columns):
        c = np.uint64(first + j)
        c0, c1, c2, c3 = _round(c & _LOW, c >> _32, zero, zero, k0, k1)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a1, b1)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a2, b2)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a3, b3)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a4, b4)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a5, b5)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a6, b6)
        store(words, j, np.uint32(c0))
        store(w1, j, np.uint32(c1))
        store(w2, j, np.uint32(c2))
        store(w3, j, np.uint32(c3))


_LEAST_SPREAD, _MOST_ALIKE = np.int64(8192), np.int64(6)


@inlined
def is_spread(steps, count):
    """Whether the levels of a group are shifted; see `reference.spreads`."""
    spread, upper, outer = np.int32(0), np.int32(0), np.int32(0)
    for e in range(count):
        t = load(steps, e)
        part = np.int32(np.rint((t - np.float32(np.floor(t))) * np.float32(256.0)))
        spread = np.int32(spread + np.int32(part * np.int32(np.int32(256) - part)))
        upper = np.int32(upper + np.int32(np.int32(part >> np.int32(7)) & np.int32(1)))
        outer = np.int32(outer + np.int32(np.int32(np.int32(part + np.int32(64)) >> np.int32(7)) & np.int32(1)))
    n = np.int64(count)
    a, b = n - 2 * np.int64(upper), n - 2 * np.int64(outer)
    return np.int64(spread) >= n * _LEAST_SPREAD and a * a + b * b <= n * _MOST_ALIKE


@inlined
def shift_to_levels(steps, count, shift, top):
    for e in range(count):
        t = max(load(steps, e) + shift, np.float32(0.0))
        store(steps, e, np.rint(t if t < top else top))


@inlined
def _nearest(t):
    return np.uint32(np.int32(np.rint(t)))


@inlined
def _stochastic(t, bits):
    """floor(t) + ((rint(65536 frac(t)) + bits) >> 16) in one piece: 65536 t is exact, and rint keeps its even part."""
    return np.uint32(np.uint32(np.uint32(np.int32(np.rint(t * np.float32(65536.0)))) + bits) >> np.uint32(16))


@inlined
def _round_at_random(t, columns, random, q):
    for i in range(8):
        words, shift = advance(random, (i & 3) * columns), np.uint32(16 * (i >> 2))
        plane, own = advance(t, i * columns), advance(q, i * columns)
        for j in range(columns):
            bits = np.uint32(np.uint32(load(words, j) >> shift) & np.uint32(0xFFFF))
            store(own, j, np.uint8(_stochastic(load(plane, j), bits)))


@inlined
def write_codes(t, first, count, bit_width, stochastic, k, random, q, codes):
    """Round positions, and write bytes of codes. Scratch: four words per column in `random`, a byte per code in `q`."""
    columns = (count + 7) // 8
    for e in range(count, 8 * columns):
        store(t, e, np.float32(0.0))
    if stochastic:
        column_words(first // 8, columns, k[0], k[1], random)
        if columns == _COLUMNS:  # a constant: loops become a few vectors
            _round_at_random(t, _COLUMNS, random, q)
        else:
            _round_at_random(t, columns, random, q)
    else:
        for e in range(8 * columns):
            store(q, e, np.uint8(_nearest(load(t, e))))
    codes_to_bytes(q, columns, bit_width, advance(codes, first // 8 * bit_width))


@inlined
def codes_to_bytes(codes, columns, bit_width, out):
    """Write the b * W bytes of W columns from 8 * W bytes with codes below 2^b, for any b up to 8."""
    if columns == _COLUMNS:
        _join(codes, _COLUMNS, bit_width, out)
    else:
        _join(codes, columns, bit_width, out)


@inlined
def _join(codes, columns, bit_width, out):
    for k in range(bit_width):
        i = 8 * k // bit_width
        source, own = advance(codes, i * columns), advance(out, k * columns)
        right = np.uint32((8 * k - i * bit_width) & 7)
        for j in range(columns):
            store(own, j, np.uint8(np.uint32(load(source, j)) >> right))
        i += 1
        while i * bit_width < 8 * k + 8 and i < 8:
            source, left = advance(codes, i * columns), np.uint32((i * bit_width - 8 * k) & 7)  # 8-bit lanes for LLVM
            for j in range(columns):
                store(own, j, np.uint8(load(own, j) | np.uint8(np.uint32(load(source, j)) << left)))
            i += 1


@inlined
def bytes_to_codes(source, columns, bit_width, codes):
    """The inverse of `codes_to_bytes`."""
    if columns == _COLUMNS:
        _split(source, _COLUMNS, bit_width, codes)
    else:
        _split(source, columns, bit_width, codes)


@inlined
def _split(source, columns, bit_width, codes):
    mask = np.uint8((np.int64(1) << bit_width) - 1)
    for i in range(8):
        k = i * bit_width // 8
        low, own, right = advance(source, k * columns), advance(codes, i * columns), np.uint32((i * bit_width) & 7)
        if np.int64(right) + bit_width <= 8:
            for j in range(columns):
                store(own, j, np.uint8(np.uint8(np.uint32(load(low, j)) >> right) & mask))
        else:
            high, left = advance(low, columns), np.uint32((8 - np.int64(right)) & 7)
            for j in range(columns):
                byte = np.uint8(np.uint32(load(low, j)) >> right) | np.uint8(np.uint32(load(high, j)) << left)
                store(own, j, np.uint8(byte & mask))


@inlined
def look_up_row(codes, count, row, out):
    """Write the entries of codes."""
    for k in range(count):
        store(out, k, load(row, np.int64(load(codes, k))))


@kernel
def pack_blocks(source, packed, bit_width, block, numel, start, stop):
    codes, mask = u8_scratch(block), np.uint8((np.int64(1) << bit_width) - 1)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        columns = (count + 7) // 8
        for e in range(count, 8 * columns):
            store(codes, e, np.uint8(0))
        given = advance(u8_at(source), first)
        for e in range(count):
            store(codes, e, np.uint8(load(given, e) & mask))
        codes_to_bytes(codes, columns, bit_width, advance(u8_at(packed), first // 8 * bit_width))


@kernel
def unpack_blocks(packed, target, bit_width, block, numel, start, stop):
    codes = u8_scratch(block)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        bytes_to_codes(advance(u8_at(packed), first // 8 * bit_width), (count + 7) // 8, bit_width, codes)
        out = advance(u8_at(target), first)
        for e in range(count):
            store(out, e, load(codes, e))


def pack_codes(codes: Tensor, bit_width: int, block_size: int, packed: Tensor) -> None:
    if block_size > LARGEST_BLOCK or bit_width > 8:
        return NotImplemented
    low, numel = codes.to(torch.uint8), codes.numel()
    arguments = low.data_ptr(), packed.data_ptr(), bit_width, block_size, numel
    share(pack_blocks, arguments, -(-numel // block_size), block_size)


def unpack_codes(packed: Tensor, bit_width: int, block_size: int, codes: Tensor) -> None:
    if block_size > LARGEST_BLOCK or bit_width > 8:
        return NotImplemented
    low, numel = codes if codes.itemsize == 1 else torch.empty_like(codes, dtype=torch.uint8), codes.numel()
    arguments = packed.data_ptr(), low.data_ptr(), bit_width, block_size, numel
    share(unpack_blocks, arguments, -(-numel // block_size), block_size)
    if low is not codes:
        codes.copy_(low)


@kernel
def pack_mask_blocks(source, kind, packed, numel, start, stop):
    bits, scratch = u8_scratch(BLOCK), f32_scratch(BLOCK)
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        columns = (count + 7) // 8
        x = stage(source, kind, first, count, scratch)
        for e in range(count):
            store(bits, e, np.uint8(not load(x, e) <= np.float32(0.0)))
        for e in range(count, 8 * columns):
            store(bits, e, np.uint8(0))
        codes_to_bytes(bits, columns, 1, advance(u8_at(packed), first // 8))


@inlined
def spread_bits(packed, first, count, bits):
    """The bits of a block, one byte each."""
    bytes_to_codes(advance(u8_at(packed), first // 8), (count + 7) // 8, 1, bits)


@kernel
def mask_multiply_blocks(packed, grad, target, kind, slope_bits, numel, start, stop):
    """The slope is given as the bits of a float64; 0.0 gives +0."""
    bits, scratch = u8_scratch(BLOCK), f32_scratch(BLOCK)
    slope = f64_of(slope_bits)
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        spread_bits(packed, first, count, bits)
        g = stage(grad, kind, first, count, scratch)
        if slope == 0.0:
            for e in range(count):
                store(scratch, e, load(g, e) if load(bits, e) else np.float32(0.0))
        else:
            for e in range(count):
                store(scratch, e, load(g, e) * (np.float32(1.0) if load(bits, e) else np.float32(slope)))
        emit(scratch, target, kind, first, count)


def pack_mask(x: Tensor, packed: Tensor) -> None:
    """Types that the kernel does not read are those that quantizers do not take either."""
    if x.dtype is torch.bool:
        return pack_codes(x.view(torch.uint8), 1, BLOCK, packed)
    kind, numel = KINDS.get(x.dtype), x.numel()
    if kind is None:
        return NotImplemented
    arguments = x.data_ptr(), kind, packed.data_ptr(), numel
    share(pack_mask_blocks, arguments, -(-numel // BLOCK), BLOCK)


def unpack_mask(packed: Tensor, mask: Tensor) -> None:
    unpack_codes(packed, 1, BLOCK, mask)


def mask_multiply(packed: Tensor, numel: int, grad: Tensor, negative_slope: float, target: Tensor) -> None:
    kind = KINDS.get(grad.dtype)
    if kind is None:
        return NotImplemented
    (slope_bits,) = struct.unpack("q", struct.pack("d", negative_slope))
    arguments = (packed.data_ptr(), grad.data_ptr(), target.data_ptr(), kind, slope_bits, numel)
    share(mask_multiply_blocks, arguments, -(-numel // BLOCK), BLOCK)
