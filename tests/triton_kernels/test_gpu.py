"""Compiled kernels on a real device: the laws of all backends, large tensors, and no synchronisation."""

from __future__ import annotations

import pytest
import torch

from brevact import triton_kernels
from brevact.quantizers import (
    DualPrecisionQuantizer,
    Layout,
    NormalizedFormat,
    NormalizedQuantizer,
    Rounding,
    UniformQuantizer,
    mask_multiply,
    pack_codes,
    pack_mask,
    unpack_codes,
    unpack_mask,
)
from tests.quantizers.grid_cases import GridCase, buckets, random_grid, values_around
from tests.quantizers.kernel_laws import *  # noqa: F403
from tests.quantizers.kernel_laws import DTYPES, SEED, Backend
from tests.quantizers.same_values import assert_same_values

pytestmark = pytest.mark.gpu


@pytest.fixture
def backend() -> Backend:
    return Backend(triton_kernels, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bucket_size", [8, 512, 16384, 100])
def test_quantize_bytes_of_large_tensors(backend: Backend, bucket_size: int, dtype: torch.dtype):
    torch.manual_seed(0)
    for rounding in (Rounding.NEAREST, Rounding.STOCHASTIC):
        quantizer = UniformQuantizer(bit_width=3, rounding=rounding, bucket_size=bucket_size)
        for length in (16384, 100_003):
            backend.check_quantizer(quantizer, torch.randn(length).to("cuda", dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_grid_bytes_of_large_tensors(backend: Backend, dtype: torch.dtype):
    torch.manual_seed(0)
    geometry, grid = buckets(100_003, 4, 512), random_grid(16, has_bounds=True)
    for seed in (None, SEED):
        x = values_around(grid, geometry.numel, dtype)
        backend.check_grid(GridCase(x, geometry, grid, seed, multiply=seed is None))


def test_normalized_quantizer_gives_the_bytes_of_the_cpu_and_does_not_synchronise():
    torch.manual_seed(0)
    x = torch.randn(8, 48, 14, 14)
    for name in NormalizedFormat:
        for rounding in Rounding:
            quantizer = NormalizedQuantizer(format=name, rounding=rounding)
            packed, there, key = quantizer.quantize(x, seed=7), x.cuda(), torch.tensor(7, device="cuda")
            quantizer.quantize(there, seed=key).dequantize()  # compiles
            torch.cuda.set_sync_debug_mode("error")
            try:
                on_device = quantizer.quantize(there, seed=key)
                values = on_device.dequantize()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(on_device.buffer.cpu(), packed.buffer)
            assert_same_values(values, packed.dequantize())


def test_quantize_and_decode_do_not_synchronise():
    x, quantizer = torch.randn(100_003, device="cuda"), UniformQuantizer(bit_width=2)
    quantizer.quantize(x).dequantize()  # compiles
    unpack_codes(pack_codes(torch.zeros(9, dtype=torch.uint8, device="cuda"), 3), 3, 9)
    packed = pack_mask(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in (None, 5, torch.full((), 5, device="cuda")):
            quantizer.quantize(x, seed).dequantize_multiply(x)
        unpack_mask(pack_mask(x), Layout.of(x))
        mask_multiply(packed, Layout.of(x), x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_quantize_reads_the_seed_when_a_graph_is_replayed():
    x, quantizer = torch.randn(5000, device="cuda"), UniformQuantizer(bit_width=2)
    seed = torch.full((), 1, device="cuda")
    quantizer.quantize(x, seed)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer = quantizer.quantize(x, seed).buffer
    for value in (1, 2):
        seed.fill_(value)
        graph.replay()
        assert torch.equal(buffer, quantizer.quantize(x, value).buffer)


def test_quantize_more_than_two_to_the_31_elements():
    """The last bucket, of other values than the rest, comes out as it does alone."""
    n, quantizer = 2**31 + 512 + 9, UniformQuantizer(bit_width=2, rounding=Rounding.NEAREST)
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.fail("needs 12 GiB of device memory")
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    x[-521:] = torch.linspace(-1, 1, 521, device="cuda")
    packed, alone = quantizer.quantize(x), quantizer.quantize(x[-521:].clone())
    assert torch.equal(packed.codes[-alone.codes.numel() :], alone.codes)
    assert torch.equal(packed.dequantize()[-521:], alone.dequantize())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [0, 1, 8])
def test_launches_that_are_found_again_write_the_reference_bytes(backend: Backend, start: int, dtype: torch.dtype):
    """Calls have equal sizes and other addresses, some of them not aligned, another stream and another seed."""
    torch.manual_seed(0)
    quantizer = UniformQuantizer(bit_width=4, rounding=Rounding.DITHERED)
    for _ in range(3):
        backend.check_quantizer(quantizer, torch.randn(9000, device="cuda").to(dtype)[start : start + 8192])
    stream = torch.cuda.Stream()
    x = torch.randn(8192, device="cuda").to(dtype)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        mine = quantizer.quantize(x, 7).buffer.clone()
    torch.cuda.synchronize()
    assert torch.equal(mine, quantizer.quantize(x, 7).buffer)
    assert not torch.equal(mine, quantizer.quantize(x, 8).buffer)


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
