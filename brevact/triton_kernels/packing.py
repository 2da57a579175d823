"""Lossless packing: integer codes of 1 to 32 bits, and one-bit masks, in blocks of any multiple of 8."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from brevact.geometry import DEFAULT_BLOCK, LARGEST_BLOCK, Geometry
from brevact.triton_kernels.floats import cast, widen
from brevact.triton_kernels.launch import Program, over_blocks
from brevact.triton_kernels.tiles import element_mask, load_bytes, load_planes, plane_of, store_codes, tile, unpack_code


@triton.jit(do_not_specialize=["numel"])
def pack_codes_kernel(
    x_ptr, packed_ptr, numel,
    BIT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr,
):  # fmt: skip
    for RAGGED in tl.static_range(ROWS == 0, 2):
        at = tile(numel, BLOCK, ROWS, COLUMNS_2, RAGGED)
        if at[4] > 0:
            planes, codes = load_planes(x_ptr, at, BLOCK, RAGGED), ()
            for i in tl.static_range(8):
                if planes[i].dtype.is_floating():
                    code = tl.where(widen(planes[i]) <= 0.0, 0, 1)
                else:
                    code = planes[i].to(tl.uint32) & ((1 << BIT_WIDTH) - 1)
                if RAGGED:
                    code = tl.where(element_mask(i, at, RAGGED), code, 0)
                codes += (code,)
            store_codes(packed_ptr, codes, at, BLOCK, BIT_WIDTH, RAGGED)


@triton.jit(do_not_specialize=["numel"])
def unpack_codes_kernel(
    packed_ptr, target_ptr, numel,
    BIT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr,
):  # fmt: skip
    for RAGGED in tl.static_range(ROWS == 0, 2):
        at = tile(numel, BLOCK, ROWS, COLUMNS_2, RAGGED)
        if at[4] > 0:
            packed = load_bytes(packed_ptr, at, BLOCK, BIT_WIDTH, RAGGED)
            for i in tl.static_range(8):
                code = unpack_code(packed, i, BIT_WIDTH).to(target_ptr.dtype.element_ty)
                tl.store(plane_of(target_ptr, i, at, BLOCK), code, mask=element_mask(i, at, RAGGED))


@triton.jit(do_not_specialize=["numel"])
def mask_multiply_kernel(
    packed_ptr, grad_ptr, target_ptr, slope, numel,
    HAS_SLOPE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr,
):  # fmt: skip
    for RAGGED in tl.static_range(ROWS == 0, 2):
        at = tile(numel, BLOCK, ROWS, COLUMNS_2, RAGGED)
        if at[4] > 0:
            packed, planes = load_bytes(packed_ptr, at, BLOCK, 1, RAGGED), load_planes(grad_ptr, at, BLOCK, RAGGED)
            for i in tl.static_range(8):
                if HAS_SLOPE:
                    other = cast(widen(planes[i]) * slope, planes[i].dtype)
                else:
                    other = tl.zeros_like(planes[i])
                found = tl.where(unpack_code(packed, i, 1) != 0, planes[i], other)
                tl.store(plane_of(target_ptr, i, at, BLOCK), found, mask=element_mask(i, at, RAGGED))


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
