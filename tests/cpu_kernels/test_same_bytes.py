"""Kernels on the CPU: the laws of all backends; threads and roundings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from brevact.cpu_kernels import launch
from brevact.quantizers import UniformQuantizer
from tests.quantizers.kernel_laws import *  # noqa: F403
from tests.quantizers.kernel_laws import Backend
from tests.quantizers.same_values import assert_same_values


@pytest.fixture
def backend() -> Backend:
    return Backend(launch)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_quantize_bytes_on_several_threads(backend: Backend, four_threads: None):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 13331)  # three shares of 2^16 elements
    x.view(-1)[::97], x.view(-1)[300:420] = float("inf"), float("nan")
    for dtype in (torch.float32, torch.bfloat16):
        backend.check_quantizer(UniformQuantizer(bit_width=3), x.to(dtype))


def test_quantize_rounds_every_bfloat16_and_float16_as_torch_does():
    """Bucket size 1 stores each value in the minimum; so decoding it shows both conversions, for all finite values."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = every.view(dtype)
        x = x[torch.isfinite(x)]
        y = UniformQuantizer(bit_width=1, bucket_size=1).quantize(x).dequantize()
        assert torch.equal(y, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dequantize_multiply_rounds_as_torch_does(dtype: torch.dtype):
    """Products cover halves, subnormal results, overflow, infinity and NaN."""
    torch.manual_seed(0)
    info = torch.finfo(dtype)
    x = torch.randn(1 << 14).to(dtype)
    other = torch.randint(-(2**15), 2**15, x.shape, dtype=torch.int16).view(dtype)
    other[:4] = torch.tensor([info.max, info.tiny, info.tiny * info.eps, float("inf")], dtype=dtype)
    packed = UniformQuantizer(bit_width=8).quantize(x, seed=0)
    expected = packed.dequantize() * other
    assert_same_values(packed.dequantize_multiply(other), expected)
