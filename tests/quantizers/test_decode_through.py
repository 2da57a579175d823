"""Decoding through an affine map and a function: a table's values, or those of the decoded tensor, as the sizes say."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.quantizers import (
    Granularity,
    UniformQuantizer,
    WeibullQuantizer,
    decode_affine,
    decode_through,
    normalizing,
    point_functions,
)
from brevact.quantizers.formats.uniform import plan_of
from tests.crosses import taking_turns
from tests.quantizers.test_normalizing import ORDERS, sample

TYPES = (torch.float32, torch.bfloat16, torch.float16)
AFFINE = ("both", "scale", "shift", None)


def bend(x: Tensor) -> Tensor:
    """A function without transcendental parts: a number's result has the same bits in any tensor."""
    return x * x.clamp(-1, 2)


def silu_derivative(x: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(torch.ones_like(x), x)


def reference(packed, function, scale, shift, dtype, grad=None) -> Tensor:
    """The definition, operation by operation."""
    z = packed.dequantize()
    y = z.to(torch.promote_types(z.dtype, torch.float32))
    y = y if scale is None else y * scale
    y = y if shift is None else y + shift
    y = y.clamp(-65504, 65504) if dtype is torch.float16 else y
    y = function(y.to(dtype))
    return y if grad is None else grad * y


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype is expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def is_looked_up(packed, scale: Tensor | None) -> bool:
    place = None if scale is None else normalizing.find_place(packed.layout, tuple(scale.shape))[0]
    return point_functions._long_segments(plan_of(packed.spec), place) is not None


@pytest.mark.parametrize("name, stored", taking_turns(list(ORDERS), [*TYPES, torch.float64]), ids=str)
def test_values_are_those_of_the_reference(name, stored):
    x, shift, scale = sample(name, stored)
    scale = scale.clamp(max=2)
    for number, (bits, bucket) in enumerate(((4, 512), (3, 100), (8, 64), (1, 1000), (4, None))):
        x[(0,) * x.dim()] = (0.5, float("nan"))[number % 2]
        packed = UniformQuantizer(bit_width=bits, bucket_size=bucket).quantize(x, 3)
        types = (torch.float64,) if stored is torch.float64 else TYPES
        for which, dtype in zip(AFFINE, itertools.cycle(types), strict=False):
            affine = scale if which in ("both", "scale") else None, shift if which in ("both", "shift") else None
            same(decode_through(packed, bend, *affine, dtype), reference(packed, bend, *affine, dtype))
            for grad_dtype in (*TYPES, torch.float64):
                grad = torch.randn_like(x).to(grad_dtype)
                found = decode_through(packed, bend, *affine, dtype, grad)
                same(found, reference(packed, bend, *affine, dtype, grad))
                assert found.stride() == x.stride()


@pytest.mark.parametrize("function", [F.silu, silu_derivative, F.gelu, torch.sigmoid, F.hardswish, torch.relu])
@pytest.mark.parametrize("shape", [(2, 4, 32, 32), (4, 3, 14, 14), (7, 1023)])
def test_table_holds_the_function_of_each_level(function, shape):
    """Up to float32 rounding, which in torch may depend on an element's place."""
    stat = (1, shape[1], 1, 1) if len(shape) == 4 else (shape[0], 1)
    packed = UniformQuantizer(bit_width=4).quantize(torch.randn(shape) * 3, 0)
    scale, shift = torch.rand(stat) + 0.5, torch.randn(stat)
    assert is_looked_up(packed, scale)
    levels = decode_affine(packed, scale, shift, torch.float32)
    found = decode_through(packed, function, scale, shift, torch.float32)
    torch.testing.assert_close(found, function(levels.double()).float(), rtol=2e-5, atol=1e-6)
    grad = torch.randn(shape)
    same(decode_through(packed, function, scale, shift, torch.float32, grad), grad * found)


@pytest.mark.parametrize("granularity", [Granularity.CHANNEL, Granularity.SAMPLE, Granularity.TENSOR])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_other_granularities(granularity, memory_format):
    x = torch.randn(4, 6, 14, 14).to(memory_format=memory_format)
    packed = UniformQuantizer(bit_width=3, granularity=granularity).quantize(x, 1)
    scale, shift = torch.rand(1, 6, 1, 1), torch.randn(1, 6, 1, 1)
    for affine in ((scale, shift), (None, None)):
        same(decode_through(packed, bend, *affine, torch.float32), reference(packed, bend, *affine, torch.float32))


@pytest.mark.parametrize("shape", [(), (0, 5), (1,), (3, 7)])
@pytest.mark.parametrize("bits", [2, 4, 12, 32])
def test_small_tensors(shape, bits):
    x = torch.randn(shape)
    packed = UniformQuantizer(bit_width=bits).quantize(x, 1)
    scale = torch.full([1] * len(shape), 0.5)
    for affine in ((scale, None), (None, scale), (None, None)):
        for grad in (None, torch.randn(shape)):
            found = decode_through(packed, bend, *affine, torch.bfloat16, grad)
            same(found, reference(packed, bend, *affine, torch.bfloat16, grad))


def test_layouts_that_are_not_dense_and_other_formats():
    scale, shift = torch.rand(1, 6, 1, 1), torch.randn(1, 6, 1, 1)
    whole = torch.randn(8, 6, 16, 16)
    expanded = torch.randn(8, 6, 16, 1).expand(8, 6, 16, 16)
    for x in (
        whole[:, :, ::2],
        whole.transpose(1, 3).contiguous().transpose(1, 3),
        expanded,
        whole.permute(3, 1, 2, 0),
    ):
        for quantizer in (UniformQuantizer(bit_width=4), WeibullQuantizer(bit_width=4)):
            packed = quantizer.quantize(x, 1)
            for grad in (None, torch.randn(x.shape), torch.randn_like(x), torch.randn(1).expand(x.shape)):
                for affine in ((scale, shift), (None, None)):
                    found = decode_through(packed, bend, *affine, torch.float32, grad)
                    same(found, reference(packed, bend, *affine, torch.float32, grad))
            if packed.layout.is_dense:
                assert decode_through(packed, bend, scale, shift, torch.float32).stride() == x.stride()


def test_functions_that_give_other_types_and_views():
    packed = UniformQuantizer(bit_width=4).quantize(torch.randn(4096), 0)
    for function in (
        lambda x: x > 0,
        lambda x: x.double(),
        lambda x: x.new_ones(()).expand_as(x),
        lambda x: x,
        lambda x: x.bfloat16(),
    ):
        for affine, grad in itertools.product(((None, None), (torch.rand(4096), None)), (None, torch.randn(4096))):
            same(
                decode_through(packed, function, *affine, torch.float32, grad),
                reference(packed, function, *affine, torch.float32, grad),
            )


def test_gradients_that_are_part_of_a_graph():
    packed = UniformQuantizer(bit_width=4).quantize(torch.randn(1024), 0)
    grad = torch.randn(1024, requires_grad=True)
    decode_through(packed, bend, None, None, torch.float32, grad).sum().backward()
    same(grad.grad, decode_through(packed, bend, None, None, torch.float32))
