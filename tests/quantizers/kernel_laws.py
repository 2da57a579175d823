"""Laws of the kernels of every backend: the reference's bytes, and every byte of the results written.

The modules of backends import these tests, and define the fixture `backend`. Tensors are small: each program takes
Triton's interpreter half a second.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from brevact.geometry import DEFAULT_BLOCK, Grid, packed_bytes
from brevact.quantizers import (
    Layout,
    PackedSpec,
    Rounding,
    UniformQuantizer,
    kernel_ops,
    normalize,
    normalizing,
    reference,
)
from brevact.quantizers.formats.uniform import plan_of
from tests.crosses import taking_turns
from tests.quantizers.grid_cases import GridCase, buckets, random_grid, values_around
from tests.quantizers.kernel_op_cases import NAMES, SEED, check_kernel_op
from tests.quantizers.same_values import assert_same_values
from tests.quantizers.subjects import takes_rounding
from tests.quantizers.test_normalizing import ORDERS, sample
from tests.quantizers.uneven_cases import UNEVEN_CASES, uneven_values

BIT_WIDTHS = range(1, 9)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 71, 513, 1095, 5001)


@dataclass(frozen=True)
class Backend:
    """Launchers of kernels, the device that they run on, and whether they are interpreted, which takes long."""

    launchers: ModuleType
    device: str = "cpu"
    is_interpreted: bool = False

    def all_of(self, values: Sequence[Any], chosen: Any) -> Sequence[Any]:
        """All of some values, or the one that interpreted kernels get."""
        return [chosen] if self.is_interpreted else values

    def filled(self, length: int, dtype: torch.dtype) -> Tensor:
        """A tensor whose unwritten bytes show: NaN in every floating-point type."""
        return torch.full((length * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=self.device).view(dtype)

    def check_quantizer(self, quantizer: UniformQuantizer, x: Tensor, multiply: bool = True) -> None:
        spec = PackedSpec.of(quantizer, Layout.of(x))
        plan, flat = plan_of(spec), spec.layout.flatten(x)
        seed = SEED if quantizer.is_stochastic else None
        expected, values = torch.zeros(spec.nbytes, dtype=torch.uint8), torch.empty_like(flat, device="cpu")
        kernel_ops.quantize_uniform.reference(flat.cpu(), plan, seed, None, None, None, expected)
        kernel_ops.dequantize_uniform.reference(expected, plan, *[None] * 5, values)
        buffer = self.filled(spec.nbytes, torch.uint8)
        self.launchers.quantize_uniform(flat.to(self.device), plan, seed, None, None, None, buffer)
        for name, got, want in zip(
            ("codes", "minimum", "scale"), plan.split(buffer), plan.split(expected), strict=True
        ):
            assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)), (name, quantizer, spec.layout)
        for multiplies in self.all_of((False, True), multiply):
            target = self.filled(flat.numel(), x.dtype)
            if multiplies:
                target.copy_(torch.linspace(-3, 5, flat.numel()))
                values = values * target.cpu()
            other = target if multiplies else None
            self.launchers.dequantize_uniform(buffer, plan, None, None, None, other, None, target)
            assert_same_values(target, values)

    def check_grid(self, case: GridCase) -> None:
        geometry, grid, dtype = case.geometry, case.grid, case.x.dtype
        expected, values = torch.empty(geometry.code_bytes, dtype=torch.uint8), torch.empty_like(case.x)
        kernel_ops.quantize_grid.reference(case.x, geometry, grid, case.seed, expected)
        kernel_ops.dequantize_grid.reference(expected, geometry, grid, None, values)
        bounds = None if grid.bounds is None else grid.bounds.to(self.device)
        there = Grid(grid.levels.to(self.device), bounds, marks=grid.marks)
        codes = self.filled(expected.numel(), torch.uint8)
        self.launchers.quantize_grid(case.x.to(self.device), geometry, there, case.seed, codes)
        assert torch.equal(codes.cpu(), expected), (geometry, case.seed, dtype)
        target = self.filled(geometry.numel, dtype)
        if case.multiply:
            target.copy_(torch.linspace(-3, 5, geometry.numel))
            values = values * target.cpu()
        self.launchers.dequantize_grid(codes, geometry, there, target if case.multiply else None, target)
        assert_same_values(target, values)


def few_interpreted(cases: list, most: int) -> list:
    """The cases; of the quick ones so many in `make test` where kernels are interpreted, which takes seconds."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return cases
    quick = [case for case in cases if not case.marks][:most]
    return [case if case in quick else pytest.param(*case.values, marks=pytest.mark.exhaustive) for case in cases]


@pytest.mark.parametrize("bit_width, rounding, dtype", taking_turns(BIT_WIDTHS, list(Rounding), DTYPES), ids=str)
def test_quantize_bytes_for_every_bit_width(backend, bit_width, rounding, dtype):
    torch.manual_seed(bit_width)
    for each in backend.all_of(list(Rounding), rounding):
        for length in backend.all_of(LENGTHS, 1095):
            x = (torch.randn(length) * 3 + 1).to(dtype)
            backend.check_quantizer(UniformQuantizer(bit_width=bit_width, rounding=each), x, each is Rounding.NEAREST)


@pytest.mark.parametrize("bit_width, rounding, dtype", taking_turns((1, 2, 4, 6, 8), list(Rounding), DTYPES), ids=str)
def test_quantize_bytes_beside_zeros(backend, bit_width, rounding, dtype):
    """One bucket with elements of both signs, one with NaN as well, one with negative elements alone."""
    torch.manual_seed(bit_width)
    x = torch.randn(2 * 512 + 71)
    x[::9] = 0.0
    x[700], x[1024:] = float("nan"), -x[1024:].abs()
    for bucket_size in backend.all_of((512, 1, 7, 100), 512):
        quantizer = UniformQuantizer(bit_width=bit_width, rounding=rounding, bucket_size=bucket_size)
        backend.check_quantizer(quantizer, x.to(dtype), multiply=False)


@pytest.mark.parametrize(
    "bit_width, rounding, dtype",
    few_interpreted(taking_turns((4, 2, 3, 5, 6), [Rounding.DITHERED, Rounding.STOCHASTIC], DTYPES), most=3),
    ids=str,
)
def test_quantize_bytes_of_many_buckets(backend, bit_width, rounding, dtype):
    """Positions at the ends of ranges, between all levels, and on them; buckets that shift their levels, or do not."""
    torch.manual_seed(bit_width)
    x = torch.randn(40, 512) * 10 ** torch.linspace(-3, 3, 40)[:, None]
    x[::3] += 3 * x[::3].abs().amax(1, keepdim=True)  # no range with zero
    x[1::3] = torch.rand(x[1::3].shape) * 7 + 1
    x[2::6] = x[2::6].clamp(-2, 1.5)
    x[5] = torch.randint(0, 2**bit_width, (512,)) * 1.25 + 1
    backend.check_quantizer(UniformQuantizer(bit_width=bit_width, rounding=rounding), x.to(dtype), multiply=False)


def test_quantize_bytes_of_parts_of_steps_that_lie_apart(backend):
    """A bucket that shifts its levels, in which all elements of eight columns are in the upper and middle half."""
    torch.manual_seed(0)
    parts = torch.cat(
        [torch.randint(low, high, (n,)) for low, high, n in ((64, 128, 192), (192, 256, 192), (0, 64, 64))]
    )
    parts = torch.cat([torch.randint(128, 192, (8, 8)), parts.view(8, 56)], 1).flatten()
    x = torch.randint(0, 15, (512,)) + parts / 256 + 1
    x[511], x[510] = 1.0, 16.0
    backend.check_quantizer(UniformQuantizer(bit_width=4, rounding=Rounding.DITHERED), x, multiply=False)


#: The quick ones, and a tenth of the others.
SOME_UNEVEN_CASES = [case for turn, case in enumerate(UNEVEN_CASES) if not case.marks or turn % 10 == 0]


@pytest.mark.parametrize("bit_width, bucket_size, rounding, dtype", few_interpreted(SOME_UNEVEN_CASES, most=1), ids=str)
def test_quantize_bytes_of_uneven_buckets(backend, bit_width, bucket_size, rounding, dtype):
    quantizer = UniformQuantizer(bit_width=bit_width, bucket_size=bucket_size, rounding=rounding)
    backend.check_quantizer(quantizer, uneven_values(bucket_size, dtype), multiply=rounding is Rounding.NEAREST)


@pytest.mark.parametrize(
    "bit_width, rounding, dtype", few_interpreted(taking_turns((4, 2, 8, 5), list(Rounding), DTYPES), most=3), ids=str
)
def test_bytes_of_stretched_elements(backend, bit_width, rounding, dtype):
    """Even buckets, shifted or not, beside zeros, and uneven ones of the largest numbers, infinities and NaN."""
    torch.manual_seed(bit_width)
    x = torch.randn(12 * 512 + 71) * 10 ** torch.linspace(-6, 5, 12 * 512 + 71)
    x[1024:1536], x[2048:2560:7] = x[1024:1536].abs() + 3, 0.0
    for place, value in enumerate((float("inf"), -float("inf"), float("nan"), torch.finfo(dtype).max, 65504.0, 1e10)):
        x[512 * (place + 2) + 100] = value
    for bucket_size in backend.all_of((512, 100, 8), 512):
        quantizer = UniformQuantizer(bit_width=bit_width, rounding=rounding, bucket_size=bucket_size).for_smooth
        backend.check_quantizer(quantizer, x.to(dtype), multiply=rounding is Rounding.NEAREST)


@pytest.mark.parametrize("bit_width", [2, 8])
def test_quantize_rounds_to_the_nearest_and_halves_to_even(backend, bit_width):
    """Every position is a quarter of an integer, two, three or four."""
    x = (torch.arange(1024) / 4).clamp(max=2**bit_width - 1)
    quantizer = UniformQuantizer(bit_width=bit_width, rounding=Rounding.NEAREST, bucket_size=1024)
    backend.check_quantizer(quantizer, x, multiply=False)


@pytest.mark.parametrize(
    ("bucket_size", "length"),
    [
        *((1, 520), (64, 1095), (1024, 1500), (4096, 4097), (100, 1291), (600, 1201), (512, 0), (512, 1)),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((256, 1000), (7, 600))),
        (512, 4096 + 512),  # a second tile of one block
        (512, 4096 + 9),  # a second tile of a ragged block alone
    ],
)
def test_quantize_bytes_for_every_way_to_divide_a_tensor(backend, bucket_size, length):
    """Some groups have non-finite values, and some zeros."""
    torch.manual_seed(length)
    x = torch.randn(length)
    x[length // 3 :: 1201], x[length // 2 :: 777], x[length // 5 :: 990] = float("nan"), -float("inf"), 0.0
    for bit_width in backend.all_of((1, 3, 8), 3):
        for rounding in backend.all_of(list(Rounding), Rounding.STOCHASTIC):
            settings = {"bit_width": bit_width, "bucket_size": bucket_size}
            if takes_rounding(rounding, settings):
                backend.check_quantizer(UniformQuantizer(**settings, rounding=rounding), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_bytes_of_extreme_values(backend, dtype):
    """One bucket a row; the last is ragged."""
    torch.manual_seed(0)
    info = torch.finfo(dtype)
    rows = [
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
        torch.tensor([-float("nan")] + [-1.0] * 63),
        torch.tensor([float("inf")] + [1.0] * 63),
        torch.tensor([-float("inf")] * 64),
        torch.tensor([float("nan")] * 5),
    ]
    x = torch.cat([row.to(dtype) for row in rows])
    for rounding in backend.all_of(list(Rounding), Rounding.STOCHASTIC):
        for bit_width in backend.all_of((1, 2, 8), 2):
            backend.check_quantizer(UniformQuantizer(bit_width=bit_width, bucket_size=64, rounding=rounding), x)
    for row in backend.all_of(rows, x[:256]):
        backend.check_quantizer(UniformQuantizer(bit_width=8, bucket_size=2048), row.to(dtype))


@pytest.mark.parametrize("bit_width, seed", taking_turns(range(1, 9), [None, SEED]))
def test_quantize_grid_bytes_for_every_bit_width(backend, bit_width, seed):
    torch.manual_seed(bit_width)
    geometry = buckets(DEFAULT_BLOCK + 71, bit_width, 256)
    for dtype in backend.all_of(DTYPES, DTYPES[(bit_width + (seed is None)) % 3]):
        for size in backend.all_of({2, (1 << bit_width) - 1, 1 << bit_width} - {1}, 1 << bit_width):
            grid = random_grid(size, marks=bit_width % 2 == 0 and size > 2)
            x = values_around(grid, geometry.numel, dtype)
            backend.check_grid(GridCase(x, geometry, grid, seed, multiply=seed is None))


@pytest.mark.parametrize("numel, block_size", [(520, 512), (4096 + 520, 512), (4096 + 9, 512), (1095, 64), (1300, 600)])
def test_quantize_grid_bytes_for_every_way_to_divide_a_tensor(backend, numel: int, block_size: int):
    torch.manual_seed(numel)
    geometry = buckets(numel, 3, block_size, block_size)
    for flags in backend.all_of(range(4), 2):
        grid = random_grid(8, has_bounds=bool(flags & 1), marks=bool(flags & 2))
        for seed in backend.all_of((None, SEED), SEED):
            x = values_around(grid, numel, DTYPES[(flags + 2) % 3])
            backend.check_grid(GridCase(x, geometry, grid, seed, multiply=bool(flags & 1)))


FORMATS = (
    (torch.float32, 512, Rounding.STOCHASTIC),
    (torch.bfloat16, 64, Rounding.NEAREST),
    (torch.float32, 64, Rounding.DITHERED),
    (torch.float16, 100, Rounding.DITHERED),  # blocks that are no power of two
    (torch.float16, 100, Rounding.STOCHASTIC),
)


def _check_normalized(backend: Backend, quantizer, x: Tensor, mean: Tensor | None, invstd: Tensor) -> None:
    layout = Layout.of(x)
    packed = quantizer.quantize(normalize(x, mean, invstd), SEED)
    plan = plan_of(packed.spec)
    there = [None if part is None else part.to(backend.device) for part in (mean, invstd, invstd.reciprocal())]
    of_statistics = normalizing.plan_of_statistics(quantizer, layout, invstd.shape)
    buffer, seed = backend.filled(packed.spec.nbytes, torch.uint8), SEED if quantizer.is_stochastic else None
    flat = layout.flatten(x).to(backend.device)
    assert backend.launchers.quantize_uniform(flat, plan, seed, *of_statistics.groups(*there[:2]), buffer) is None
    for part, want in zip(plan.split(buffer), plan.split(packed.buffer), strict=True):
        assert torch.equal(part.cpu().view(torch.uint8), want.view(torch.uint8)), (quantizer, layout)
    for shift in {there[0], None}:
        target = backend.filled(layout.numel, x.dtype)
        norm = of_statistics.groups(shift, there[2])
        assert backend.launchers.dequantize_uniform(buffer, plan, *norm, None, None, target) is None
        values = packed.dequantize() * invstd.reciprocal()
        values = values if shift is None else values + mean
        values = values.clamp(-65504, 65504) if x.dtype is torch.float16 else values
        assert_same_values(target, layout.flatten(values.to(x.dtype).as_strided(layout.shape, values.stride())))


@pytest.mark.parametrize(
    "name, chosen",
    few_interpreted(taking_turns([name for name in ORDERS if not name.startswith("no order")], FORMATS), most=5),
    ids=str,
)
def test_normalized_bytes_and_values_are_those_of_the_reference(backend, name, chosen):
    dtype, bucket_size, rounding = chosen
    x, mean, invstd = sample(name, dtype)
    quantizer = UniformQuantizer(bit_width=3, bucket_size=bucket_size, rounding=rounding)
    _check_normalized(backend, quantizer, x, None if bucket_size == 64 else mean, invstd)


@pytest.mark.parametrize("shape", [(8, 512), (3, 1024)])
def test_normalized_rows_that_hold_whole_planes(backend, shape):
    x = torch.randn(shape) * 10 ** torch.linspace(-2, 2, shape[0])[:, None]
    mean, invstd = x.mean(1, keepdim=True), x.std(1, keepdim=True).reciprocal()
    _check_normalized(backend, UniformQuantizer(bit_width=2), x.bfloat16(), mean, invstd)


def test_normalized_values_that_are_not_finite(backend):
    x, mean, invstd = sample("rows", torch.float32)
    invstd[2, 3] = float("nan")
    x[1, 1, 5], x[4, 0, 7] = float("inf"), float("nan")
    _check_normalized(backend, UniformQuantizer(bit_width=2), x, mean, invstd)


@pytest.mark.parametrize(
    "bit_width", [1, 3, 8, 13, 32, *(pytest.param(width, marks=pytest.mark.exhaustive) for width in (2, 5, 9, 24, 31))]
)
def test_pack_codes_bytes_for_every_bit_width(backend, bit_width):
    torch.manual_seed(bit_width)
    for dtype in backend.all_of((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.int64):
        info = torch.iinfo(dtype)
        if dtype is not torch.uint8 and bit_width > info.bits:
            continue
        for length in backend.all_of((0, 1, 9, 513, 3001), 1095):
            codes = torch.randint(info.min, info.max, (length,), dtype=dtype)
            for block_size in backend.all_of((8, 512, 600), 512):
                expected = reference.pack(codes, bit_width, block_size)
                packed = backend.filled(packed_bytes(length, bit_width, block_size), torch.uint8)
                found = backend.launchers.pack_codes(codes.to(backend.device), bit_width, block_size, packed)
                if found is NotImplemented:  # the reference runs
                    assert bit_width > 8
                    continue
                assert torch.equal(packed.cpu(), expected)
                for own in (torch.int32, torch.int64)[bit_width == 32 :]:
                    unpacked = backend.filled(length, own)
                    backend.launchers.unpack_codes(packed, bit_width, block_size, unpacked)
                    assert torch.equal(unpacked.cpu(), (codes.to(torch.int64) & ((1 << bit_width) - 1)).to(own))


@pytest.mark.parametrize(
    "dtype, case",
    [*taking_turns(DTYPES, ((1100, -0.3), (513, 0.0))), *((dtype, (0, 0.0)) for dtype in DTYPES)],
    ids=str,
)
def test_masks_equal_torch(backend, dtype, case):
    """Masks of a tensor, packed from it or from bools, unpacked and multiplied, equal torch."""
    length, slope = case
    torch.manual_seed(length)
    info = torch.finfo(dtype)
    special = [0.0, -0.0, info.tiny, -info.tiny, info.max, float("inf"), -float("inf"), float("nan")]
    x, grad = torch.randn(length).to(dtype), torch.randn(length).to(dtype)
    x[: len(special)] = torch.tensor(special, dtype=dtype)[:length]
    grad[8 : 8 + len(special)] = torch.tensor(special, dtype=dtype)[: max(length - 8, 0)]
    x, grad = x.to(backend.device), grad.to(backend.device)
    mask = ~(x <= 0)
    expected = reference.pack(mask.cpu().to(torch.uint8), 1, DEFAULT_BLOCK)
    for source in (x, mask):
        packed = backend.filled(expected.numel(), torch.uint8)
        backend.launchers.pack_mask(source, packed)
        assert torch.equal(packed.cpu(), expected)
    unpacked = backend.filled(length, torch.bool)
    backend.launchers.unpack_mask(packed, unpacked)
    assert torch.equal(unpacked.cpu().view(torch.uint8), mask.cpu().to(torch.uint8))
    result = backend.filled(length, dtype)
    backend.launchers.mask_multiply(packed, length, grad, slope, result)
    other = grad * slope if slope else torch.zeros_like(grad)
    assert_same_values(result, torch.where(mask, grad, other).cpu())
    backend.launchers.mask_multiply(packed, length, result, slope, result)
    assert_same_values(result, torch.where(mask, grad, other * slope if slope else other).cpu())


@pytest.mark.parametrize("name", NAMES)
def test_kernel_op_equals_its_reference(backend, name):
    """For interpreted kernels, types, bucket sizes, runs of segments and results take turns."""
    check_kernel_op(name, backend.launchers, backend.device, most=8 if backend.is_interpreted else None)
