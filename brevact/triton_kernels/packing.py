"""Launches of lossless packing: integer codes and one-bit masks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from brevact.geometry import DEFAULT_BLOCK, LARGEST_BLOCK, Geometry
from brevact.triton_kernels.codes import mask_multiply_kernel, pack_codes_kernel, unpack_codes_kernel
from brevact.triton_kernels.launch import Program, over_blocks

_MASKED = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.bool))


def pack_codes(codes: Tensor, bit_width: int, block_size: int, packed: Tensor) -> None:
    """The kernel's tiles are limited, and it does not extend signs."""
    if block_size > LARGEST_BLOCK or (codes.dtype != torch.uint8 and bit_width > 8 * codes.itemsize):
        return NotImplemented
    _program(pack_codes_kernel, codes.numel(), codes.itemsize, bit_width, block_size).run(codes, packed)


def unpack_codes(packed: Tensor, bit_width: int, block_size: int, codes: Tensor) -> None:
    if block_size > LARGEST_BLOCK:
        return NotImplemented
    _program(unpack_codes_kernel, codes.numel(), codes.itemsize, bit_width, block_size).run(packed, codes)


def pack_mask(x: Tensor, packed: Tensor) -> None:
    if x.dtype not in _MASKED:
        return NotImplemented
    x = x.detach().view(torch.uint8) if x.dtype == torch.bool else x
    _program(pack_codes_kernel, x.numel(), x.itemsize).run(x, packed)


def unpack_mask(packed: Tensor, mask: Tensor) -> None:
    _program(unpack_codes_kernel, mask.numel(), 1).run(packed, mask.view(torch.uint8))


def mask_multiply(packed: Tensor, numel: int, grad: Tensor, negative_slope: float, target: Tensor) -> None:
    if grad.dtype not in _MASKED:
        return NotImplemented
    program = _program(mask_multiply_kernel, numel, grad.itemsize, slope=float(negative_slope))
    program.run(packed, grad, target)


@functools.lru_cache(maxsize=4096)
def _program(
    kernel: Any, numel: int, itemsize: int, bit_width: int = 1, block_size: int = DEFAULT_BLOCK, slope: float = 0.0
) -> Program:
    geometry = Geometry(numel, bit_width, block_size, max(numel, 1), 1, True)
    return over_blocks(kernel, geometry, itemsize, slope=slope, HAS_SLOPE=slope != 0)
