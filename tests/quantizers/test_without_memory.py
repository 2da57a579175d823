"""Tensors of plain type that have no memory of their own, which the compiled kernels must not read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import brevact
import brevact.quant
from brevact.quantizers import Layout, UniformQuantizer, mask_multiply, pack_codes, pack_mask, unpack_codes, unpack_mask

QUANTIZER = UniformQuantizer(bit_width=4)


def _there_and_back(x: Tensor) -> Tensor:
    packed = QUANTIZER.quantize(x, seed=0)
    return packed.dequantize_multiply(x) + packed.dequantize()


def _masked(x: Tensor) -> Tensor:
    mask, layout = pack_mask(x), Layout.of(x)
    return mask_multiply(mask, layout, x) + unpack_mask(mask, layout)


def _codes(x: Tensor) -> Tensor:
    codes = x.reshape(-1).abs().to(torch.int32)
    return unpack_codes(pack_codes(codes, 7), 7, codes.numel())


functions = pytest.mark.parametrize("function", [_there_and_back, _masked, _codes])


@functions
def test_zero_tensors_count_as_zeros(function):
    zeros = torch._efficientzerotensor((8, 64))
    assert torch.equal(function(zeros), function(torch.zeros(8, 64)))


def test_multiply_by_a_zero_tensor_gives_zeros():
    x, zeros = torch.randn(8, 64), torch._efficientzerotensor((8, 64))
    assert not QUANTIZER.quantize(x, seed=0).dequantize_multiply(zeros).any()
    assert not mask_multiply(pack_mask(x), Layout.of(x), zeros).any()


@functions
def test_functionalized_tensors_give_the_same_values(function):
    x = torch.randn(8, 64)
    assert torch.equal(torch.func.functionalize(function)(x), function(x))
    assert torch.equal(torch.func.functionalize(lambda y: function(x) + 0 * y)(torch.zeros(())), function(x))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.jacrev])
def test_transformed_tensors_are_refused(transform):
    x = torch.randn(8, 64)
    with pytest.raises(TypeError, match=r"x: got a tensor of a torch\.func transform"):
        transform(lambda y: QUANTIZER.quantize(y, seed=0).dequantize().sum())(x)
    with pytest.raises(TypeError, match=r"x: got a tensor of a torch\.func transform"):
        transform(lambda y: unpack_mask(pack_mask(y), Layout.of(y)).float().sum())(x)


@pytest.mark.parametrize("function", [_there_and_back, _codes])
def test_plain_tensors_inside_a_transform_give_the_same_values(function):
    x = torch.randn(8, 64)
    result = torch.func.grad(lambda y: (y * function(x)).sum())(torch.tensor(1.0))
    torch.testing.assert_close(result, function(x).sum().to(result.dtype))


@functions
def test_plain_tensors_under_fake_tensor_mode_give_fake_ones(function):
    x = torch.randn(8, 64)
    with FakeTensorMode(allow_non_fake_inputs=True):
        result = function(x)
    assert isinstance(result, FakeTensor) and result.numel() == x.numel()


@pytest.mark.parametrize("source", ["StochBackward4bit", "U5Backward", "WeibullBackward2bit", "SignMagnitudeBackward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_dtype_changes_nothing(source, dtype):
    """Lightning trains in float64 by it."""
    quantizer, x = brevact.quantizer(getattr(brevact.quant, source)), torch.randn(4, 600).to(dtype)
    torch.set_default_dtype(torch.float64)
    try:
        packed = quantizer.quantize(x, seed=0)
        decoded = packed.dequantize()
    finally:
        torch.set_default_dtype(torch.float32)
    expected = quantizer.quantize(x, seed=0)
    assert torch.equal(packed.buffer, expected.buffer) and torch.equal(decoded, expected.dequantize())
