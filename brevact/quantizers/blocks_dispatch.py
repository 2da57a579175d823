"""Block means of maps and back: by compiled kernels, or by the plain torch reference."""

from __future__ import annotations

import torch
from torch import Tensor

from brevact.quantizers import blocks as reference
from brevact.quantizers.blocks import MapBlocks
from brevact.quantizers.dispatch import kernels_for, refuse_wrapped


def split_maps(flat: Tensor, blocks: MapBlocks) -> tuple[Tensor, Tensor]:
    """Block means of maps, and what they leave; see `blocks.split_maps`.

    Args:
        flat: Contiguous floating-point elements, map by map.
        blocks: Their division.

    Returns:
        `(low, residual)`: float16 means, and float32 residual of the length of `flat`.
    """
    low = flat.new_empty(blocks.blocks, dtype=torch.float16)
    residual = flat.new_empty(flat.numel(), dtype=torch.float32)
    if flat.numel() == 0:
        return low, residual
    kernels = kernels_for(flat, low, residual)
    if kernels is not None and kernels.can_split(blocks):
        kernels.split_maps(flat, blocks, low, residual)
    else:
        refuse_wrapped(flat)
        with torch.no_grad():
            reference.split_maps(flat, blocks, low, residual)
    return low, residual


def join_maps(residual: Tensor, blocks: MapBlocks, low: Tensor, other: Tensor | None, target: Tensor) -> None:
    """Add upsampled means, and multiply; see `blocks.join_maps`.

    Args:
        residual: float32 elements, map by map.
        blocks: Their division.
        low: float16 means.
        other: Contiguous factor of the target's type, or None.
        target: Contiguous result of any floating-point type; may be `residual` or `other`.
    """
    kernels = kernels_for(target, low, residual, *(() if other is None else (other,)))
    if kernels is not None and kernels.can_split(blocks):
        kernels.join_maps(residual, blocks, low, other, target)
        return
    with torch.no_grad():
        joined = target if other is None else torch.empty_like(target)
        reference.join_maps(residual, blocks, low, joined)
        if other is not None:
            torch.mul(joined, other, out=target)
