"""Mixing of two widths: how often, where, and its cost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from brevact.quantizers import (
    Granularity,
    MixedQuantizer,
    MixingQuantizer,
    PackedActivation,
    Rounding,
    SignMagnitudeQuantizer,
    UniformQuantizer,
    unpack_codes,
)
from tests.crosses import taking_turns
from tests.quantizers.subjects import DTYPES


def placed(packed) -> torch.Tensor:
    if isinstance(packed.quantizer, UniformQuantizer):  # all are alike
        buckets = -(-packed.layout.numel // packed.quantizer.bucket_size)
        return torch.full((buckets,), packed.quantizer.bit_width > 2)
    return unpack_codes(packed.tensors[1], 1, -(-packed.quantizer.numel // packed.quantizer.size)).bool()


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
    high = sum(quantizer.quantize(torch.zeros(8), seed=seed).quantizer == quantizer.high for seed in range(draws))
    assert abs(high / draws - 0.3) <= 5 * (0.3 * 0.7 / draws) ** 0.5


def test_every_bucket_is_equally_likely_to_be_high():
    quantizer, draws = MixedQuantizer(bucket_size=8, mix_prob=0.25), 2000
    x = torch.zeros(8 * 30 + 3)
    counts = torch.stack([placed(quantizer.quantize(x, seed=seed)) for seed in range(draws)]).double().sum(0)
    # 31 buckets, the ragged one among them: 5 standard errors each.
    assert ((counts / draws - 0.25).abs() <= 5 * (0.25 * 0.75 / draws) ** 0.5).all()


def test_buckets_are_drawn_independently():
    # Var of the number of high buckets is that of a binomial: n p (1 - p), with a standard error of 2 / draws.
    quantizer, draws, n = MixedQuantizer(bucket_size=8), 2000, 40
    numbers = torch.tensor([float(quantizer.with_drawn_size(8 * n, seed).high_count) for seed in range(draws)])
    assert abs(numbers.var() / (n / 4) - 1) <= 5 * (2 / draws) ** 0.5


def test_low_and_high_buckets_do_not_share_noise():
    quantizer = MixedQuantizer(bit_width=2, mix_bit_width=2, bucket_size=512)
    x = torch.rand(512).repeat(40)
    packed = quantizer.quantize(x, seed=1)
    rows, high = packed.dequantize().view(40, 512), placed(packed)
    assert not torch.equal(rows[~high][0], rows[high][0])


def parts_of(packed: PackedActivation) -> tuple[list[PackedActivation], tuple[Tensor, Tensor]]:
    """The packed low and high elements, and where each kind lies in memory."""
    sized = packed.quantizer
    is_high = placed(packed).repeat_interleave(sized.size)[: sized.numel]
    return [own for own, _ in sized.packs(packed)], (~is_high, is_high)


def assert_each_kind_is_stored_as_its_quantizer_does(quantizer: MixingQuantizer, x: Tensor, seed: int) -> None:
    packed = quantizer.quantize(x, seed=seed)
    own, places = parts_of(packed)
    flat, decoded, other = x.reshape(-1), packed.dequantize().reshape(-1), torch.randn(x.shape).to(x.dtype)
    product = packed.dequantize_multiply(other)
    kinds = (quantizer.low, seed), (quantizer.high, seed + 0x5851F42D4C957F2D)  # the high ones have a key of their own
    for part, where, (kind, key) in zip(own, places, kinds, strict=True):
        alone = kind.quantize(flat[where], seed=key)
        assert torch.equal(part.buffer, alone.buffer)
        values = alone.dequantize()
        assert values.numel()
        torch.testing.assert_close(decoded[where], values, rtol=0, atol=0, equal_nan=True)
        expected = values * other.reshape(-1)[where]
        torch.testing.assert_close(product.reshape(-1)[where], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size, dtype", taking_turns([1, 7, 64, 100, 512, 1000, 5000], DTYPES), ids=str)
def test_kernels_find_buckets_where_they_lie(size: int, dtype: torch.dtype):
    torch.manual_seed(size)
    for length in (11 * size, 10 * size + max(size // 3, 1), 35_001 + 4 * size):
        x = torch.randn(length).mul(3).add(1).to(dtype)
        x[length // 2] = float("nan")
        for quantizer in (
            MixedQuantizer(bucket_size=size),
            MixedQuantizer(bucket_size=size, bit_width=8, mix_bit_width=12, minimum_dtype=torch.bfloat16),
        ):
            assert_each_kind_is_stored_as_its_quantizer_does(quantizer, x, seed=5)


class Wrapped(Tensor):
    """A tensor that the kernels do not take."""


def test_plain_torch_gives_the_bytes_and_values_of_the_kernels():
    torch.manual_seed(0)
    for size, length in ((64, 6400), (100, 12_345), (5000, 52_001)):
        quantizer, x = MixedQuantizer(bucket_size=size), torch.randn(length)
        packed, plain = quantizer.quantize(x, seed=9), quantizer.quantize(x.as_subclass(Wrapped), seed=9)
        assert torch.equal(packed.buffer, plain.buffer.as_subclass(Tensor))
        assert torch.equal(plain.dequantize().as_subclass(Tensor), packed.dequantize())
        other = torch.randn(length)
        product = packed.dequantize_multiply(other.as_subclass(Wrapped)).as_subclass(Tensor)
        assert torch.equal(product, packed.dequantize_multiply(other))


@pytest.mark.exhaustive
def test_large_tensors_are_decoded_in_runs_of_whole_buckets():
    x = torch.randn(6_000_123)
    quantizer = SignMagnitudeQuantizer(bucket=1000, base_levels=1, mix_levels=3, mix_levels_prob=0.1)
    assert_each_kind_is_stored_as_its_quantizer_does(quantizer, x, seed=1)


@pytest.mark.parametrize("rounding", Rounding)
def test_buckets_that_are_all_alike_are_stored_as_without_mixing(rounding):
    x = torch.randn(70, 33)
    for settings, width in (({"mix_prob": 0}, 2), ({"mix_prob": 1}, 4), ({"granularity": "tensor", "mix_prob": 1}, 4)):
        if rounding is Rounding.DITHERED and "granularity" in settings:
            continue  # levels are shifted in buckets alone
        packed = MixedQuantizer(**settings, rounding=rounding).quantize(x, seed=3)
        settings.pop("mix_prob")
        plain = UniformQuantizer(bit_width=width, rounding=rounding, **settings).quantize(x, seed=3)
        assert packed.nbytes == plain.nbytes and torch.equal(packed.buffer, plain.buffer)


def test_without_chance_no_seed_is_drawn():
    for probability in (0.0, 1.0):
        quantizer = MixedQuantizer(mix_prob=probability, rounding=Rounding.NEAREST)
        assert not quantizer.is_stochastic
        state = torch.get_rng_state()
        quantizer.quantize(torch.randn(2000, generator=torch.Generator().manual_seed(0)))
        assert torch.equal(state, torch.get_rng_state())
    assert MixedQuantizer(rounding=Rounding.NEAREST).is_stochastic


def test_another_probability_is_another_quantizer():
    mixed, signs = MixedQuantizer(bit_width=3), SignMagnitudeQuantizer(bucket=64)
    assert mixed.with_probability(0.25) == MixedQuantizer(bit_width=3, mix_prob=0.25)
    assert signs.with_probability(0.25) == SignMagnitudeQuantizer(bucket=64, mix_levels_prob=0.25)
    assert signs.with_probability(0.25).probability == 0.25
    with pytest.raises(ValueError, match="mix_levels_prob: got 2"):
        signs.with_probability(2)


def test_a_tensor_of_another_size_than_was_drawn_for_raises():
    sized = MixedQuantizer(bucket_size=64).with_drawn_size(6400, 0)
    with pytest.raises(ValueError, match="6464 distinct elements"):
        sized.quantize(torch.randn(6464))


def test_fake_tensors_are_quantized_to_fake_bytes():
    with FakeTensorMode():
        for quantizer in (MixedQuantizer(), SignMagnitudeQuantizer()):
            for seed in (None, 1):
                x = torch.randn(3000)
                packed = quantizer.quantize(x, seed=seed)
                assert packed.dequantize().shape == packed.dequantize_multiply(x).shape == x.shape
    packed = SignMagnitudeQuantizer(mix_levels_prob=0).quantize(torch.ones(8))  # no fake levels have stayed behind
    assert packed.dequantize().tolist() == [1.0] * 8
