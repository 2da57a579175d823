"""Launches of lossless packing: integer codes and one-bit masks."""

from __future__ import annotations

import torch
from torch import Tensor

from brevact.geometry import LARGEST_BLOCK
from brevact.triton_kernels import masks
from brevact.triton_kernels.codes import pack_codes_kernel, unpack_codes_kernel
from brevact.triton_kernels.launch import Launch, Tiling, tiling
from brevact.triton_kernels.masks import mask_multiply_kernel, pack_mask_kernel, unpack_mask_kernel

MASK_BLOCK = masks.BLOCK.value
"""Elements of a mask's packing block."""
_MASKED = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.bool))


def pack_codes(codes: Tensor, bit_width: int, block_size: int, packed: Tensor) -> None:
    """The kernel's tiles are limited, and it does not extend signs."""
    if block_size > LARGEST_BLOCK or (codes.dtype != torch.uint8 and bit_width > 8 * codes.itemsize):
        return NotImplemented
    tiles = tiling(codes.numel(), block_size, codes.itemsize)
    constants = _block_constants(bit_width, block_size, tiles)
    Launch(pack_codes_kernel, (tiles.programs,), (codes, packed, codes.numel()), constants, tiles.threads).run()


def unpack_codes(packed: Tensor, bit_width: int, block_size: int, codes: Tensor) -> None:
    """The kernel's tiles are limited."""
    if block_size > LARGEST_BLOCK:
        return NotImplemented
    tiles = tiling(codes.numel(), block_size, codes.itemsize)
    constants = _block_constants(bit_width, block_size, tiles)
    Launch(unpack_codes_kernel, (tiles.programs,), (packed, codes, codes.numel()), constants, tiles.threads).run()


def pack_mask(x: Tensor, packed: Tensor) -> None:
    """The kernel reads bools as bytes."""
    if x.dtype not in _MASKED:
        return NotImplemented
    x = x.detach().view(torch.uint8) if x.dtype == torch.bool else x.detach()
    tiles = tiling(x.numel(), MASK_BLOCK, x.itemsize)
    Launch(pack_mask_kernel, (tiles.programs,), (x, packed, x.numel()), {"ROWS": tiles.rows}, tiles.threads).run()


def unpack_mask(packed: Tensor, mask: Tensor) -> None:
    """The kernel writes bools as bytes."""
    tiles = tiling(mask.numel(), MASK_BLOCK, mask.itemsize)
    arguments = (packed, mask.view(torch.uint8), mask.numel())
    Launch(unpack_mask_kernel, (tiles.programs,), arguments, {"ROWS": tiles.rows}, tiles.threads).run()


def mask_multiply(packed: Tensor, numel: int, grad: Tensor, negative_slope: float, target: Tensor) -> None:
    """See the reference."""
    if grad.dtype not in _MASKED:
        return NotImplemented
    tiles = tiling(numel, MASK_BLOCK, grad.itemsize)
    constants = {"ROWS": tiles.rows, "HAS_SLOPE": negative_slope != 0}
    arguments = (packed, grad, target, float(negative_slope), numel)
    Launch(mask_multiply_kernel, (tiles.programs,), arguments, constants, tiles.threads).run()


def _block_constants(bit_width: int, block_size: int, tiles: Tiling) -> dict[str, int | bool]:
    return {"BIT_WIDTH": bit_width, "BLOCK": block_size, "ROWS": tiles.rows, "COLUMNS_2": tiles.columns}
