"""Launches of lossless packing: integer codes and one-bit masks."""

from __future__ import annotations

from torch import Tensor

from brevact.triton_kernels import masks
from brevact.triton_kernels.codes import pack_codes_kernel, unpack_codes_kernel
from brevact.triton_kernels.launch import Launch, Tiling, tiling
from brevact.triton_kernels.masks import mask_multiply_kernel, pack_mask_kernel, unpack_mask_kernel

MASK_BLOCK = masks.BLOCK.value
"""Elements of a mask's packing block."""


def pack_codes(codes: Tensor, packed: Tensor, bit_width: int, block_size: int) -> Launch:
    """Pack integer codes.

    Args:
        codes: (n,) contiguous integer tensor; bits above bit_width are dropped.
        packed: Packed uint8 codes, written.
        bit_width: Bits a code, 1 to 32.
        block_size: Codes in a block, a multiple of 8.

    Returns:
        The kernel to launch.
    """
    tiles = tiling(codes.numel(), block_size, codes.itemsize)
    constants = _block_constants(bit_width, block_size, tiles)
    return Launch(pack_codes_kernel, (tiles.programs,), (codes, packed, codes.numel()), constants, tiles.threads)


def unpack_codes(packed: Tensor, codes: Tensor, bit_width: int, block_size: int) -> Launch:
    """Unpack integer codes.

    Args:
        packed: Packed uint8 codes.
        codes: (n,) int32 or int64 tensor, written.
        bit_width: Bits a code, 1 to 32.
        block_size: Codes in a block, a multiple of 8.

    Returns:
        The kernel to launch.
    """
    tiles = tiling(codes.numel(), block_size, codes.itemsize)
    constants = _block_constants(bit_width, block_size, tiles)
    return Launch(unpack_codes_kernel, (tiles.programs,), (packed, codes, codes.numel()), constants, tiles.threads)


def pack_mask(x: Tensor, packed: Tensor) -> Launch:
    """Pack bools, or the mask `~(x <= 0)` of floats.

    Args:
        x: Dense tensor of n elements: uint8 (0 or not), or floating point.
        packed: uint8 mask, written.

    Returns:
        The kernel to launch.
    """
    tiles = tiling(x.numel(), MASK_BLOCK, x.itemsize)
    return Launch(pack_mask_kernel, (tiles.programs,), (x, packed, x.numel()), {"ROWS": tiles.rows}, tiles.threads)


def unpack_mask(packed: Tensor, target: Tensor) -> Launch:
    """Unpack a mask to bools.

    Args:
        packed: uint8 mask.
        target: (n,) uint8 tensor, written with 0 and 1.

    Returns:
        The kernel to launch.
    """
    n = target.numel()
    tiles = tiling(n, MASK_BLOCK, target.itemsize)
    return Launch(unpack_mask_kernel, (tiles.programs,), (packed, target, n), {"ROWS": tiles.rows}, tiles.threads)


def mask_multiply(packed: Tensor, grad: Tensor, target: Tensor, negative_slope: float, numel: int) -> Launch:
    """where(mask, grad, negative_slope * grad).

    Args:
        packed: uint8 mask.
        grad: float32, bfloat16 or float16 gradient, dense in the mask's memory order.
        target: Dense result of its type, written; may be `grad`.
        negative_slope: Factor where the mask is unset; 0 gives +0.
        numel: Number of elements.

    Returns:
        The kernel to launch.
    """
    tiles = tiling(numel, MASK_BLOCK, grad.itemsize)
    constants = {"ROWS": tiles.rows, "HAS_SLOPE": negative_slope != 0}
    arguments = (packed, grad, target, float(negative_slope), numel)
    return Launch(mask_multiply_kernel, (tiles.programs,), arguments, constants, tiles.threads)


def _block_constants(bit_width: int, block_size: int, tiles: Tiling) -> dict[str, int | bool]:
    return {"BIT_WIDTH": bit_width, "BLOCK": block_size, "ROWS": tiles.rows, "COLUMNS_2": tiles.columns}
