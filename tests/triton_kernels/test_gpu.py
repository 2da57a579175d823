"""Compiled kernels on a real device: the reference's bytes, and no synchronisation."""

from __future__ import annotations

import pytest
import torch

from brevact import triton_kernels
from brevact.geometry import Geometry
from brevact.quantizers import (
    DualPrecisionQuantizer,
    Granularity,
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
from tests.quantizers.grid_cases import GridCase, buckets, channels, random_grid, values_around
from tests.quantizers.kernel_op_cases import NAMES, check_kernel_op
from tests.quantizers.same_values import assert_same_values
from tests.triton_kernels.checks import (
    SEED,
    check_codes,
    check_grid,
    check_mask,
    check_quantizer,
    check_statistics,
)

pytestmark = pytest.mark.gpu

BIT_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 71, 513, 16384, 100_003)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("bit_width", BIT_WIDTHS)
def test_quantize_bytes_for_every_bit_width(bit_width: int, rounding: Rounding, dtype: torch.dtype):
    torch.manual_seed(bit_width)
    for length in LENGTHS:
        x = (torch.randn(length, device="cuda") * 3 + 1).to(dtype)
        check_quantizer(UniformQuantizer(bit_width=bit_width, rounding=rounding), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bucket_size", [1, 8, 16, 64, 128, 256, 1024, 4096, 8192, 16384, 7, 100, 600, 5000, None])
def test_quantize_bytes_for_every_bucket_size(bucket_size: int | None, dtype: torch.dtype):
    torch.manual_seed(0)
    for length in LENGTHS:
        check_quantizer(UniformQuantizer(bit_width=3, bucket_size=bucket_size), torch.randn(length).to("cuda", dtype))


@pytest.mark.parametrize("granularity", [Granularity.CHANNEL, Granularity.SAMPLE, Granularity.TENSOR])
@pytest.mark.parametrize("shape", [(8, 64, 56, 56), (8, 48, 7, 7), (3, 6, 9, 11), (500, 3, 1, 1)], ids=str)
def test_quantize_bytes_for_every_granularity(granularity: Granularity, shape: tuple[int, ...]):
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda")
    for dtype in DTYPES:
        for memory_format in (torch.contiguous_format, torch.channels_last):
            quantizer = UniformQuantizer(bit_width=4, granularity=granularity)
            check_quantizer(quantizer, x.to(dtype).contiguous(memory_format=memory_format))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [None, SEED], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("bit_width", range(1, 9))
def test_quantize_grid_bytes_for_every_bit_width(bit_width: int, seed: int | None, dtype: torch.dtype):
    torch.manual_seed(bit_width)
    for length in LENGTHS[1:]:
        for size in {1 << bit_width, max(3 << bit_width >> 2, 2)}:
            geometry = buckets(length, bit_width, 1000)
            grid = random_grid(geometry.groups, size)
            check_grid(GridCase(values_around(grid, length, dtype), geometry, grid, seed, multiply=True), "cuda")


GRID_DIVISIONS = [
    *(buckets(100_003, 4, size) for size in (1, 64, 100, 512, 4096, 16384, 100_003)),
    *(channels(8, 64, inner, 4) for inner in (1, 49, 64, 56 * 56)),
    channels(5000, 48, 1, 4),
    channels(3, 6, 99, 4),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("geometry", GRID_DIVISIONS, ids=str)
def test_quantize_grid_bytes_for_every_way_to_divide_a_tensor(geometry: Geometry, dtype: torch.dtype):
    torch.manual_seed(0)
    for seed in (None, SEED):
        for flags in range(8):
            names = ("has_bounds", "has_offset", "has_scale")
            grid = random_grid(geometry.groups, 16, **{name: bool(flags >> i & 1) for i, name in enumerate(names)})
            x = values_around(grid, geometry.numel, dtype)
            check_grid(GridCase(x, geometry, grid, seed, multiply=bool(flags & 1)), "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "geometry", [*GRID_DIVISIONS, buckets(1 << 22, 4, 1 << 22), channels(64, 3, 12544, 4)], ids=str
)
def test_statistics_of_groups_equal_the_reference(geometry: Geometry, dtype: torch.dtype):
    torch.manual_seed(0)
    x = (torch.randn(geometry.numel) * 3).to(dtype)
    check_statistics(x, geometry, "cuda")
    x[::997], x[1::1013], x[2::1019] = float("nan"), float("inf"), -float("inf")
    check_statistics(x, geometry, "cuda")


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


def test_codes_and_masks_equal_the_reference():
    torch.manual_seed(0)
    for length in LENGTHS:
        for bit_width in (1, 3, 8, 13, 31, 32):
            for block_size in (8, 512, 600):
                check_codes(torch.randint(-(2**31), 2**31, (length,), device="cuda"), bit_width, block_size)
        for dtype in DTYPES:
            for slope in (0.0, 0.01):
                check_mask(torch.randn(length).to("cuda", dtype), torch.randn(length).to("cuda", dtype), slope)


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


@pytest.mark.parametrize("name", NAMES)
def test_kernel_op_equals_its_reference(name: str):
    check_kernel_op(name, triton_kernels, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [0, 1, 8])
def test_launches_that_are_found_again_write_the_reference_bytes(start: int, dtype: torch.dtype):
    """Of the same sizes, at other addresses, some of them not aligned, in another stream, with another seed."""
    torch.manual_seed(0)
    quantizer = UniformQuantizer(bit_width=4, rounding=Rounding.DITHERED)
    for _ in range(3):
        check_quantizer(quantizer, torch.randn(9000, device="cuda").to(dtype)[start : start + 8192])
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
