"""Mixing of two widths: how often, where, and what it costs."""

from __future__ import annotations

import pytest
import torch

from brevact.quantizers import Granularity, MixedQuantizer, Rounding, UniformQuantizer, unpack_codes


def placed(packed) -> torch.Tensor:
    """Whether each bucket is high."""
    return unpack_codes(packed.tensors[2], 1, -(-packed.quantizer.numel // packed.quantizer.size)).bool()


@pytest.mark.parametrize(
    ("low", "high", "probability"), [(2, 4, 0.5), (2, 6, 0.3), (3, 6, 0.4), (4, 8, 0.2), (1, 3, 0.9)]
)
def test_stored_bytes_follow_the_mixture(low, high, probability):
    quantizer = MixedQuantizer(bit_width=low, mix_bit_width=high, mix_prob=probability)
    x = torch.randn(512 * 20_000)
    expected = (1 - probability) * low + probability * high + 49 / 512
    # 5 standard errors of the drawn width on 20,000 buckets are 0.02 of these averages at most.
    error = 5 * (high - low) * (probability * (1 - probability) / 20_000) ** 0.5
    assert error <= 0.02 * expected
    assert abs(8 * quantizer.quantize(x, seed=0).nbytes / x.numel() - expected) <= error


def test_a_mixture_of_tensors_follows_the_probability():
    quantizer = MixedQuantizer(granularity=Granularity.TENSOR, mix_prob=0.3)
    draws = 2000
    high = sum(quantizer.quantize(torch.zeros(8), seed=seed).quantizer.high for seed in range(draws))
    assert abs(high / draws - 0.3) <= 5 * (0.3 * 0.7 / draws) ** 0.5


def test_every_bucket_is_equally_likely_to_be_high():
    quantizer, draws = MixedQuantizer(bucket_size=8, mix_prob=0.25), 2000
    x = torch.zeros(8 * 30 + 3)
    counts = sum(placed(quantizer.quantize(x, seed=seed)).double() for seed in range(draws))
    # 30 buckets: 5 standard errors each.
    assert ((counts / draws - 0.25).abs() <= 5 * (0.25 * 0.75 / draws) ** 0.5).all()
    tails = sum(quantizer.quantize(x, seed=seed).quantizer.high_tail for seed in range(draws))
    assert abs(tails / draws - 0.25) <= 5 * (0.25 * 0.75 / draws) ** 0.5


def test_buckets_are_drawn_independently():
    # Var of the number of high buckets is that of a binomial: n p (1 - p), with a standard error of 2 / draws.
    quantizer, draws, n = MixedQuantizer(bucket_size=8), 2000, 40
    numbers = torch.tensor([float(quantizer.sized(8 * n, seed).high) for seed in range(draws)])
    assert abs(numbers.var() / (n / 4) - 1) <= 5 * (2 / draws) ** 0.5


@pytest.mark.parametrize("rounding", Rounding)
def test_each_bucket_is_stored_as_the_uniform_quantizer_of_its_width_does(rounding):
    quantizer = MixedQuantizer(bucket_size=64, rounding=rounding)
    x = torch.randn(64 * 50)
    packed = quantizer.quantize(x, seed=5)
    rows, high = x.view(50, 64), placed(packed)
    decoded = packed.dequantize().view(50, 64)
    for width, chosen in ((2, ~high), (4, high)):
        uniform = UniformQuantizer(bit_width=width, rounding=rounding, bucket_size=64)
        expected = uniform.quantize(rows[chosen].reshape(-1), seed=5).dequantize().view(-1, 64)
        if rounding is Rounding.NEAREST or width == 2:  # the high buckets have a key of their own
            assert torch.equal(decoded[chosen], expected)
        assert chosen.any()


def test_low_and_high_buckets_do_not_share_noise():
    quantizer = MixedQuantizer(bit_width=2, mix_bit_width=2, bucket_size=512)
    x = torch.rand(512).repeat(40)
    packed = quantizer.quantize(x, seed=1)
    rows, high = packed.dequantize().view(40, 512), placed(packed)
    assert not torch.equal(rows[~high][0], rows[high][0])


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"mix_prob": 1.5}, "mix_prob: got 1.5"),
        ({"mix_prob": -0.1}, "mix_prob"),
        ({"mix_bit_width": 9}, "mix_bit_width: got 9"),
        ({"bit_width": 32}, "bit_width: got 32"),
        ({"granularity": "channel"}, "granularity"),
        ({"bucket_size": 0}, "bucket_size"),
        ({"rounding": "up"}, "rounding"),
    ],
)
def test_settings_out_of_range_raise(setting, error):
    with pytest.raises(ValueError, match=error):
        MixedQuantizer(**setting)


@pytest.mark.parametrize("setting", [{"mix_prob": "half"}, {"mix_prob": True}, {"mix_bit_width": 4.0}])
def test_settings_of_a_wrong_type_raise(setting):
    with pytest.raises(TypeError, match=next(iter(setting))):
        MixedQuantizer(**setting)
