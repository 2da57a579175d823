import math

import pytest
import torch

from brevact.quantizers import ElementsQuantizer, LosslessQuantizer, ResidualQuantizer, UniformQuantizer


@pytest.mark.parametrize("bit_width", [2, 3, 8])
def test_decoding_is_unbiased_and_off_by_less_than_a_step(bit_width):
    quantizer = ResidualQuantizer(bit_width=bit_width)
    x = torch.linspace(-0.5, 0.5, 333)
    draws = torch.stack([quantizer.quantize(x, seed=seed).dequantize() for seed in range(400)])
    step = 1 / (2**bit_width - 2)
    assert ((draws - x).abs() <= step * (1 + 1e-5)).all()
    assert ((draws.mean(0) - x).abs() <= 5 * step / 2 / math.sqrt(len(draws)) + 1e-6).all()


def test_clipped_elements_stay_apart_and_levels_are_exact():
    quantizer = ResidualQuantizer(bit_width=2)
    x = torch.tensor([-0.5, 0.0, 0.5, quantizer.clipped]).repeat(100)
    for seed in range(3):
        packed = quantizer.quantize(x, seed=seed)
        assert torch.equal(packed.dequantize(), x)
        assert packed.nbytes == len(x) // 4


def test_empty_tensors_and_other_shapes():
    for x in (torch.zeros(0, 3), torch.zeros(()), torch.zeros(2, 3, 4).transpose(0, 2)):
        decoded = ResidualQuantizer().quantize(x, seed=0).dequantize()
        assert torch.equal(decoded, x)
        assert decoded.stride() == x.stride()


@pytest.mark.parametrize("quantizer", [LosslessQuantizer(), ElementsQuantizer(), UniformQuantizer(bit_width=32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_exact_quantizers_are_the_identity(quantizer, dtype):
    x = torch.randn(3, 5, dtype=dtype).t()
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    packed, expected = quantizer.quantize(x), x.clone()
    other = torch.randn(5, 3, dtype=dtype)
    x.zero_()
    found = packed.dequantize_multiply(other), packed.dequantize()
    for values, wanted in zip(found, (expected * other, expected), strict=True):
        torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)
    assert found[1].stride() == x.stride()
    assert packed.nbytes == x.nbytes
