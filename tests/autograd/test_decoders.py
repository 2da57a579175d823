from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import brevact
from brevact import DitherBackward4bit, L4Backward, NearestBackward4bit, StochBackward4bit
from brevact.autograd.saving.saved import decoder_of_packed
from brevact.quantizers.backends import without_kernels
from tests.quantizers.same_values import assert_same_values


def hard_values(shape: tuple[int, ...]) -> torch.Tensor:
    """Outliers, sentinels, zeros, and what is not finite, each in some buckets of their own."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat = x.view(-1)
    for bucket, value in enumerate((1e9, -1e9, 3e38, torch.inf, -torch.inf, torch.nan, 0.0, 65505.0, 1e-40)):
        flat[512 * bucket + 7 : 512 * bucket + 7 + 30 * bucket % 61 : 3] = value
    flat[512 * 10 : 512 * 11] = 0.1  # a constant bucket
    return x


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_tensor_is_decoded_to_the_type_of_its_reader(bits, order):
    x = hard_values((4, 16, 16, 16)).to(memory_format=order)
    for leaf in (StochBackward4bit, NearestBackward4bit, DitherBackward4bit, L4Backward):
        if leaf is DitherBackward4bit and bits in (1, 32):
            continue
        quantizer = brevact.quantizer(leaf, **({} if leaf is L4Backward else {"bit_width": bits}))
        packed = quantizer.quantize(x, seed=1)
        decoder = decoder_of_packed(packed.spec)
        exact = decoder.decode((packed.buffer,))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for kernels in (nullcontext, without_kernels):
                with kernels():
                    found = decoder.decode_as((packed.buffer,), dtype)
                assert found.dtype is dtype and found.stride() == exact.stride()
                assert_same_values(found, exact.to(dtype))


def test_a_number_beyond_bfloat16_is_its_largest():
    x = torch.randn(4096)
    x[5] = torch.finfo(torch.float32).min
    packed = brevact.quantizer(NearestBackward4bit).quantize(x, seed=1)
    decoder = decoder_of_packed(packed.spec)
    assert decoder.decode((packed.buffer,))[5] == x[5]
    assert decoder.decode_as((packed.buffer,), torch.bfloat16)[5] == torch.finfo(torch.bfloat16).min
