"""Kernels give the reference's bytes, and write every byte: outputs start out filled with a pattern."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from brevact.cpu_kernels import launch
from brevact.quantizers import Granularity, Layout, PackedSpec, Rounding, UniformQuantizer, kernel_ops, reference
from brevact.quantizers.formats.uniform.quantizer import plan_of
from tests.crosses import taking_turns
from tests.quantizers.same_values import assert_same_values
from tests.quantizers.subjects import takes_rounding
from tests.quantizers.uneven_cases import UNEVEN_CASES, uneven_values

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BIT_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)
SEED = -0x123456789ABCDEF


def _with_missing(x: Tensor) -> Tensor:
    """A copy some of whose elements are not finite: in whole stretches too."""
    x = x.clone()
    flat = x.view(-1)
    flat[::97], flat[1::131], flat[2::203] = float("nan"), float("inf"), -float("inf")
    flat[300:420] = float("nan")
    return x


def _filled(length: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose unwritten bytes show."""
    return torch.full((length * dtype.itemsize,), 0xAB, dtype=torch.uint8).view(dtype)


def _assert_same_bytes(quantizer: UniformQuantizer, x: Tensor, threads: int = 1) -> None:
    spec = PackedSpec.of(quantizer, Layout.of(x))
    flat, plan = spec.layout.flatten(x), plan_of(spec)
    seed = SEED if quantizer.is_stochastic else None
    expected, buffer = _filled(spec.nbytes, torch.uint8), _filled(spec.nbytes, torch.uint8)
    values = torch.empty_like(flat)
    other = torch.linspace(-3, 5, flat.numel()).to(x.dtype)
    decoded, product = _filled(flat.numel(), x.dtype), _filled(flat.numel(), x.dtype)
    kernel_ops.quantize_uniform.reference(flat, plan, seed, expected)
    kernel_ops.dequantize_uniform.reference(expected, plan, None, values)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        launch.quantize_uniform(flat, plan, seed, buffer)
        assert torch.equal(buffer, expected), (quantizer, tuple(x.shape))
        launch.dequantize_uniform(buffer, plan, None, decoded)
        launch.dequantize_uniform(buffer, plan, other, product)
    finally:
        torch.set_num_threads(before)
    assert_same_values(decoded, values)
    assert_same_values(product, values * other)


@pytest.mark.parametrize("bit_width", BIT_WIDTHS)
@pytest.mark.parametrize("rounding", Rounding)
def test_quantize_bytes_for_every_bucket_and_length(bit_width: int, rounding: Rounding):
    torch.manual_seed(bit_width)
    for bucket_size in (1, 7, 64, 100, 512, 4096, 5000, None):
        if not takes_rounding(rounding, {"bucket_size": bucket_size}):
            continue
        quantizer = UniformQuantizer(bit_width=bit_width, rounding=rounding, bucket_size=bucket_size)
        for length in (0, 1, 71, 513, 5001):
            _assert_same_bytes(quantizer, torch.randn(length) * 3 + 1)
        _assert_same_bytes(quantizer, _with_missing(torch.randn(5001)))


@pytest.mark.parametrize("bit_width", BIT_WIDTHS)
@pytest.mark.parametrize("rounding", Rounding)
def test_quantize_bytes_beside_zeros(bit_width: int, rounding: Rounding):
    """In groups of either sign or both, of which some hold what is not finite, and some no zero."""
    torch.manual_seed(bit_width)
    x = torch.randn(6, 8, 70)
    x[0], x[1] = x[0].abs(), -x[1].abs()
    x[2] += 3
    x[:5][torch.rand(5, 8, 70) < 0.02] = 0.0
    x[3, 0, 7], x[1, 2, 9], x[4, 0, 0] = float("nan"), float("inf"), -0.0
    ways = (
        *({"bucket_size": size} for size in (1, 7, 100, 512, None)),
        *({"granularity": granularity} for granularity in (Granularity.CHANNEL, Granularity.SAMPLE)),
    )
    for place, way in enumerate(ways):
        metadata = {"scale_dtype": (torch.bfloat16, torch.float32)[place % 2]}
        metadata["minimum_dtype"] = (torch.float32, torch.bfloat16)[place // 2 % 2]
        if rounding is Rounding.DITHERED:
            metadata["minimum_dtype"] = torch.float32
        if takes_rounding(rounding, way | metadata):
            quantizer = UniformQuantizer(bit_width=bit_width, rounding=rounding, **way, **metadata)
            _assert_same_bytes(quantizer, x)
            _assert_same_bytes(quantizer, x.bfloat16().transpose(1, 2).contiguous().transpose(1, 2), threads=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", [Rounding.NEAREST, Rounding.STOCHASTIC])
def test_quantize_bytes_for_every_dtype_and_granularity(dtype: torch.dtype, rounding: Rounding):
    torch.manual_seed(0)
    x = torch.randn(3, 6, 9, 11).to(dtype)
    for bit_width in (2, 7, 8, 16):
        for granularity in Granularity:
            for channel_dim in (1, -1):
                quantizer = UniformQuantizer(
                    bit_width=bit_width, rounding=rounding, granularity=granularity, channel_dim=channel_dim
                )
                for y in (x, _with_missing(x)):
                    _assert_same_bytes(quantizer, y)
                    _assert_same_bytes(quantizer, y.to(memory_format=torch.channels_last))


@pytest.mark.parametrize(
    "dtype, scale_dtype, minimum_dtype", taking_turns(DTYPES, *[(torch.float32, torch.bfloat16)] * 2), ids=str
)
def test_quantize_bytes_of_extreme_values(dtype, scale_dtype, minimum_dtype):
    torch.manual_seed(0)
    info = torch.finfo(dtype)
    rows = [
        torch.randn(64),
        torch.zeros(64),
        -torch.zeros(64),
        torch.tensor([0.0, -0.0]).repeat(32),
        torch.tensor([info.max, -info.max]).repeat(32),
        torch.tensor([info.max, 0.0]).repeat(32),
        torch.linspace(0.4, 0.5, 64, dtype=torch.float64) * info.max,
        torch.linspace(-1, 1, 64, dtype=torch.float64) * info.tiny,
        torch.linspace(0, 1, 64, dtype=torch.float64) * info.tiny * info.eps,
        torch.linspace(1, 1 + 1e-6, 64, dtype=torch.float64),
        torch.linspace(-1000.01, -999.99, 64),
        torch.tensor([1.0] * 63 + [float("nan")]),
        torch.tensor([float("inf")] + [1.0] * 63),
        torch.tensor([-float("inf")] * 64),
    ]
    x = torch.stack([row.to(dtype) for row in rows])
    for rounding in Rounding:
        for bucket_size in (64, None):
            metadata = {"bucket_size": bucket_size, "scale_dtype": scale_dtype, "minimum_dtype": minimum_dtype}
            if not takes_rounding(rounding, metadata):
                continue
            for bit_width in (1, 2, 8, 12):
                quantizer = UniformQuantizer(bit_width=bit_width, rounding=rounding, **metadata)
                _assert_same_bytes(quantizer, x)
                for row in x:
                    _assert_same_bytes(quantizer, row)


@pytest.mark.parametrize("bit_width, bucket_size, rounding, dtype", UNEVEN_CASES, ids=str)
def test_quantize_bytes_of_uneven_buckets(bit_width: int, bucket_size: int, rounding: Rounding, dtype: torch.dtype):
    quantizer = UniformQuantizer(bit_width=bit_width, bucket_size=bucket_size, rounding=rounding)
    _assert_same_bytes(quantizer, uneven_values(bucket_size, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("granularity", Granularity)
def test_quantize_bytes_on_several_threads(dtype: torch.dtype, granularity: Granularity):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 13331).to(dtype)  # three shares of 2^16 elements
    for bucket_size in (512, 5000) if granularity is Granularity.BUCKET else (512,):
        quantizer = UniformQuantizer(bit_width=3, bucket_size=bucket_size, granularity=granularity)
        for y in (x, _with_missing(x)):
            _assert_same_bytes(quantizer, y, threads=4)


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


@pytest.mark.parametrize("bit_width", [1, 2, 3, 5, 8, 9, 13, 24, 31, 32])
def test_pack_codes_bytes(bit_width: int):
    torch.manual_seed(bit_width)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        for length in (0, 1, 9, 513, 3001):
            codes = torch.randint(info.min, info.max, (length,), dtype=dtype)
            if dtype != torch.uint8 and bit_width > info.bits:
                continue
            for block_size in (8, 512, 600):
                expected = reference.pack(codes, bit_width, block_size)
                packed = torch.full_like(expected, 0xAB)
                launch.pack_codes(codes, bit_width, block_size, packed)
                assert torch.equal(packed, expected)
                unpacked = torch.full((length,), -1, dtype=torch.int64)
                launch.unpack_codes(packed, bit_width, block_size, unpacked)
                assert torch.equal(unpacked, codes.to(torch.int64) & ((1 << bit_width) - 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_equal_torch(dtype: torch.dtype):
    torch.manual_seed(0)
    info = torch.finfo(dtype)
    special = [0.0, -0.0, info.tiny, -info.tiny, info.tiny * info.eps, info.max, float("inf"), -float("inf")]
    for length in (0, 1, 7, 513, 4099):
        x = torch.randn(length).to(dtype)
        x[: len(special)] = torch.tensor(special, dtype=dtype)[:length]
        mask, grad = ~(x <= 0), torch.randn(length).to(dtype)
        expected = reference.pack(mask.to(torch.uint8), 1, 512)
        for source in (x, mask):
            packed = torch.full_like(expected, 0xAB)
            launch.pack_mask(source, packed)
            assert torch.equal(packed, expected)
        unpacked = torch.full((length,), 0xAB, dtype=torch.uint8)
        launch.unpack_mask(packed, unpacked)
        assert torch.equal(unpacked, mask.to(torch.uint8))
        for slope in (0.0, 0.01, -0.3):
            result = torch.full_like(grad, float("nan"))
            launch.mask_multiply(packed, length, grad, slope, result)
            assert torch.equal(result, torch.where(mask, grad, grad * slope if slope else torch.zeros_like(grad)))
