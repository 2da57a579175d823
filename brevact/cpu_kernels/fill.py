"""Kernel that overwrites the elements of a tensor where a mask is set."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.memory import advance, i32_at, i64_at, kernel, load, store, u8_at, u16_at
from brevact.cpu_kernels.teams import share

BLOCK = 512

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@kernel
def fill_blocks(target, mask, itemsize, value, numel, start, stop):
    """Elements have 2, 4 or 8 bytes; `value` is bits."""
    first = start * BLOCK
    count = min(stop * BLOCK, numel) - first
    bits = advance(u8_at(mask), first)
    if itemsize == 4:
        y32, value32 = advance(i32_at(target), first), np.int32(value)
        for e in range(count):
            store(y32, e, value32 if load(bits, e) else load(y32, e))
    elif itemsize == 8:
        y64 = advance(i64_at(target), first)
        for e in range(count):
            store(y64, e, value if load(bits, e) else load(y64, e))
    else:
        y16, value16 = advance(u16_at(target), first), np.uint16(value)
        for e in range(count):
            store(y16, e, value16 if load(bits, e) else load(y16, e))


def fill(x: Tensor, mask: Tensor, value: float) -> None:
    numel, integers = x.numel(), _INTEGERS.get(x.itemsize)
    if integers is None:
        return NotImplemented
    bits = int(torch.tensor(value, dtype=x.dtype).view(integers))
    arguments = (x.data_ptr(), mask.data_ptr(), x.itemsize, bits, numel)
    share(fill_blocks, arguments, -(-numel // BLOCK), BLOCK, torch.get_num_threads())
