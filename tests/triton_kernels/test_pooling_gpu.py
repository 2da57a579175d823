"""Compiled kernels of block means on a real device, and dual precision: the bytes of the CPU, no synchronisation."""

from __future__ import annotations

import pytest
import torch

from brevact.quantizers import DualPrecisionQuantizer
from tests.quantizers.same_values import assert_same_values
from tests.triton_kernels.pooling_checks import DTYPES, check_pooling

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [1, 3, 8, 40, 600])
@pytest.mark.parametrize(
    "sides", [(1, 1, 1), (1, 7, 7), (1, 14, 14), (1, 56, 56), (1, 13, 700), (10, 9, 5), (1, 1, 5001), (16, 32, 1)]
)
def test_split_and_join_maps_bits(sides: tuple[int, int, int], block: int, dtype: torch.dtype):
    for maps in (0, 5, 300):
        check_pooling(maps, sides, block, dtype, "cuda")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_dual_precision_gives_the_bytes_of_the_cpu(dtype: torch.dtype):
    torch.manual_seed(0)
    quantizer = DualPrecisionQuantizer()
    for shape in ((8, 16, 7, 7), (4, 16, 30, 28), (33, 1000), (3, 5, 9, 10, 11)):
        x = (torch.randn(shape) * 3 + 1).to(dtype)
        packed = quantizer.quantize(x, seed=7)
        on_device = quantizer.quantize(x.cuda(), seed=torch.tensor(7, device="cuda"))
        assert torch.equal(on_device.buffer.cpu(), packed.buffer)
        assert_same_values(on_device.dequantize(), packed.dequantize())
        if len(shape) == 4:
            last = quantizer.quantize(x.cuda().contiguous(memory_format=torch.channels_last), seed=7)
            assert torch.equal(last.buffer.cpu(), packed.buffer)
            assert_same_values(last.dequantize_multiply(x.cuda()), packed.dequantize_multiply(x))


def test_dual_precision_does_not_synchronise():
    quantizer = DualPrecisionQuantizer()
    x = torch.randn(4, 16, 30, 28, device="cuda").contiguous(memory_format=torch.channels_last)
    quantizer.quantize(x).dequantize_multiply(x)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in (None, 5, torch.full((), 5, device="cuda")):
            quantizer.quantize(x, seed).dequantize_multiply(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
