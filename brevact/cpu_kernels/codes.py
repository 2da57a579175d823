"""Kernels that pack and unpack integer codes of 1 to 32 bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.memory import (
    advance,
    i64_at,
    inlined,
    kernel,
    load,
    store,
    u8_at,
    u16_at,
    u32_at,
    u32_scratch,
)
from brevact.cpu_kernels.planes import bytes_to_codes, codes_to_bytes
from brevact.cpu_kernels.teams import share
from brevact.geometry import LARGEST_BLOCK


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
