"""Normalized inputs: kernels that normalize on the way give the reference's bytes and values, whatever the order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from brevact.quantizers import (
    Granularity,
    Rounding,
    UniformQuantizer,
    WeibullQuantizer,
    denormalize,
    normalize,
    quantize_normalized,
)
from brevact.quantizers.layout import Layout
from brevact.quantizers.normalizing import find_place
from tests.crosses import taking_turns

#: Shape and memory order (dimensions, slowest first) of a tensor, and the dimensions along which groups differ.
ORDERS = {
    "rows": ((5, 7, 96), (0, 1, 2), (0, 1)),
    "rows of two dimensions": ((6, 4, 12, 12), (0, 1, 2, 3), (0, 1)),
    "channels": ((3, 4, 12, 12), (0, 1, 2, 3), (1,)),
    "channels last": ((3, 40, 6, 6), (0, 2, 3, 1), (1,)),
    "samples and channels last": ((3, 40, 6, 6), (0, 2, 3, 1), (0, 1)),
    "rows of channels": ((3, 6, 6, 40), (0, 3, 1, 2), (0, 1, 2)),
    "vectors": ((75, 37), (0, 1), (1,)),
    "transposed rows": ((5, 7, 96), (1, 0, 2), (0, 1)),
    "everything": ((2, 600), (0, 1), ()),
    "every element": ((2, 600), (0, 1), (0, 1)),
    "no order that kernels know": ((3, 4, 5, 6, 7), (0, 1, 2, 3, 4), (0, 2, 4)),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def sample(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor whose groups differ in scale and mean, means and inverse deviations."""
    shape, order, groups = ORDERS[name]
    sizes = [size if dim in groups else 1 for dim, size in enumerate(shape)]
    deviation, mean = 10 ** torch.empty(sizes).uniform_(-3, 2), torch.randn(sizes)
    inverse = [order.index(dim) for dim in range(len(order))]
    x = torch.randn([shape[dim] for dim in order]).permute(inverse)
    x = (x * deviation + mean).to(dtype)
    stat_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    return x, mean.to(stat_dtype), deviation.to(stat_dtype).reciprocal()


@pytest.mark.parametrize("name, dtype, has_mean", taking_turns(list(ORDERS), DTYPES, [True, False]), ids=str)
def test_bytes_and_values_are_those_of_the_reference(name, dtype, has_mean):
    x, mean, invstd = sample(name, dtype)
    mean = mean if has_mean else None
    for bit_width, rounding, bucket in ((2, Rounding.STOCHASTIC, 512), (8, Rounding.NEAREST, 100), (3, "nearest", 64)):
        quantizer = UniformQuantizer(bit_width=bit_width, rounding=rounding, bucket_size=bucket)
        packed = quantize_normalized(quantizer, x, mean, invstd, 7)
        z = normalize(x, mean, invstd)
        reference = quantizer.quantize(z, 7)
        assert torch.equal(packed.buffer, reference.buffer)
        decoded = reference.dequantize()
        for offset in {mean, None}:
            expected = decoded * invstd.reciprocal()
            expected = expected if offset is None else expected + offset
            if dtype is torch.float16:
                expected = expected.clamp(-65504, 65504)
            found = denormalize(packed, offset, invstd, dtype)
            assert found.dtype is dtype and found.stride() == x.stride()
            assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("name", ORDERS)
def test_places_of_statistics(name):
    x, mean, _ = sample(name, torch.float32)
    found = find_place(Layout.of(x), tuple(mean.shape))
    assert (found is None) == (name == "no order that kernels know")
    if found is not None:
        (outer, row, inner, run), _ = found
        element = torch.arange(x.numel())
        index = element // outer * row + element % inner // run
        groups = torch.arange(mean.numel()).view(mean.shape).expand(x.shape).permute(ORDERS[name][1]).reshape(-1)
        # The same partition of the elements in memory order.
        assert torch.unique(torch.stack([index, groups]), dim=1).shape[1] == mean.numel()


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 2)])
def test_expanded_tensors_store_their_distinct_elements(dims):
    sizes = [1 if dim in dims else size for dim, size in enumerate((6, 8, 64))]
    x = torch.randn(sizes).expand(6, 8, 64)
    mean, invstd = x.mean(-1, keepdim=True), torch.rand(6, 8, 1).add(0.5)[:1, :1].expand(6, 8, 1)
    quantizer = UniformQuantizer(bit_width=8, rounding=Rounding.NEAREST)
    packed = quantize_normalized(quantizer, x, mean, invstd, None)
    assert packed.layout.numel == x.numel() // torch.tensor([x.shape[dim] for dim in dims]).prod()
    found = denormalize(packed, mean, invstd, torch.float32)
    assert found.stride() == x.stride()
    step = packed.scale.float().max() / invstd.min()
    eps = torch.finfo(torch.float32).eps
    assert ((found - x).abs() <= step / 2 * 1.001 + 4 * eps * (x.abs() + mean.abs())).all()


def test_normalized_values_lie_in_the_order_of_the_tensor():
    """Also where the strides of the statistics along an expanded dimension suggest another one."""
    x = torch.randn(5, 1, 16).half().permute(2, 1, 0).expand(16, 33, 5)
    mean, invstd = torch.randn(16, 1, 1).repeat(1, 33, 1), torch.ones(16, 33, 1)
    assert normalize(x, mean, invstd).stride() == x.stride() == (1, 0, 16)
    q = UniformQuantizer(bit_width=2, rounding=Rounding.NEAREST, bucket_size=64)
    fused = quantize_normalized(q, x, mean, invstd, 0)
    assert torch.equal(fused.buffer, q.quantize(normalize(x, mean, invstd)).buffer)


@pytest.mark.parametrize(
    "quantizer",
    [
        WeibullQuantizer(bit_width=3),
        UniformQuantizer(granularity=Granularity.CHANNEL),
        UniformQuantizer(bucket_size=None),
        UniformQuantizer(bucket_size=1000),
    ],
    ids=str,
)
def test_other_groups_and_formats_have_the_same_reference(quantizer):
    x, mean, invstd = sample("channels", torch.bfloat16)
    packed = quantize_normalized(quantizer, x, mean, invstd, 3)
    assert torch.equal(packed.buffer, quantizer.quantize(normalize(x, mean, invstd), 3).buffer)
    expected = (packed.dequantize() * invstd.reciprocal() + mean).bfloat16()
    assert torch.equal(denormalize(packed, mean, invstd, torch.bfloat16), expected)


def test_large_means_leave_the_normalized_value_its_precision():
    x = (1000 + torch.randn(64, 512) * 0.01).double()
    mean, invstd = x.mean(1, keepdim=True), x.std(1, keepdim=True).reciprocal()
    exact = (x - mean) * invstd
    found = normalize(x.float(), mean.float(), invstd.float())
    # x and its mean are rounded to the spacing of float32 at 1000, which is 2^-14: half of it each, over a deviation.
    assert (found - exact).abs().max() <= 2**-14 * invstd.max() * (1 + 2**-10)
