"""Codes of a block to eight-plane bytes and back."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.memory import inlined, load, store

_U1, _U8, _U31 = np.uint32(1), np.uint32(8), np.uint32(31)


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
