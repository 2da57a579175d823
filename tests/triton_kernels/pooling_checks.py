"""What the launches of block means have to do, on any device."""

from __future__ import annotations

import torch

from brevact import triton_kernels
from brevact.geometry import MapBlocks
from brevact.quantizers import kernel_ops
from tests.quantizers.same_values import assert_same_values
from tests.triton_kernels.checks import filled

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_pooling(maps: int, sides: tuple[int, int, int], block: int, dtype: torch.dtype, device: str) -> None:
    """Means, residual, sum and product equal the reference, with NaN, infinities and large values among them.

    Args:
        maps: Number of maps.
        sides: Depth, height and width of a map.
        block: Side of a block.
        dtype: Type of the elements.
        device: Where to check.
    """
    torch.manual_seed(0)
    blocks = MapBlocks(maps, sides, tuple(min(side, block) for side in sides))
    flat = (torch.randn(maps * blocks.elements) * 3 + 1).to(dtype)
    if maps >= 3:
        values = flat.view(maps, -1)
        values[0, 0], values[1, -1], values[2] = float("nan"), float("-inf"), torch.finfo(dtype).max
    expected = torch.empty(blocks.blocks, dtype=torch.float16), torch.empty(flat.numel())
    kernel_ops.split_maps.reference(flat, blocks, *expected)
    x = flat.to(device)
    low, residual = filled(blocks.blocks, torch.float16, device), filled(flat.numel(), torch.float32, device)
    triton_kernels.split_maps(x, blocks, low, residual)
    assert torch.equal(low.cpu().view(torch.int16), expected[0].view(torch.int16))
    assert_same_values(residual, expected[1])
    whole = torch.empty_like(flat)
    kernel_ops.join_maps.reference(expected[1], blocks, expected[0], None, whole)
    target = filled(flat.numel(), dtype, device)
    triton_kernels.join_maps(residual, blocks, low, None, target)
    assert_same_values(target, whole)
    factor = torch.linspace(-3, 5, flat.numel()).to(dtype)
    target.copy_(factor)
    triton_kernels.join_maps(residual, blocks, low, target, target)
    assert_same_values(target, whole * factor)
