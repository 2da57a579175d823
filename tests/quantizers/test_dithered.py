"""Laws of dithered rounding. Those of all quantizers, and equal bytes of all implementations, are tested elsewhere."""

import math

import pytest
import torch
from torch import Tensor

from brevact.quantizers import Rounding, UniformQuantizer
from brevact.quantizers.reference import LEAST_SPREAD, MOST_ALIKE

DRAWS, BUCKET = 2000, 512


def shifted_buckets(count: int, bit_width: int) -> Tensor:
    """Normal values, in as many buckets; those left out round stochastically, one of twenty."""
    x = torch.randn(2 * count + 8, BUCKET)
    settings = {"rounding": Rounding.DITHERED, "bucket_size": BUCKET, "scale_dtype": torch.float32}
    quantizer = UniformQuantizer(bit_width=bit_width, **settings)
    moved = quantizer.quantize(x, seed=0).minimum != x.amin(1)
    assert moved.sum() >= count
    return x[moved][:count]


def errors(x: Tensor, rounding: Rounding, bit_width: int, draws: int = DRAWS) -> Tensor:
    """(draws, n) errors in steps, one row per seed."""
    quantizer = UniformQuantizer(bit_width=bit_width, rounding=rounding, bucket_size=BUCKET, scale_dtype=torch.float32)
    packs = [quantizer.quantize(x, seed=seed) for seed in range(draws)]
    step = packs[0].scale.double().repeat_interleave(BUCKET)[: x.numel()]
    return torch.stack([(packed.dequantize().double() - x.double()) / step for packed in packs])


@pytest.mark.parametrize("bit_width", [2, 4, 8])
def test_errors_are_spread_evenly_over_a_step_wherever_an_element_lies(bit_width: int):
    """Mean 0, variance 1/12 and largest error 1/2, each element by itself, within 5 standard errors (and 2^-16 steps of
    float32 arithmetic)."""
    torch.manual_seed(bit_width)
    found = errors(shifted_buckets(2, bit_width).flatten(), Rounding.DITHERED, bit_width)
    assert found.abs().max() <= 0.5 + 2**-16 * 2**bit_width
    assert found.mean(0).abs().max() <= 5 * (1 / 12 / DRAWS) ** 0.5
    # The fourth moment of even errors is 1/80.
    deviation = ((1 / 80 - 1 / 144) / DRAWS) ** 0.5
    assert (found.square().mean(0) - 1 / 12).abs().max() <= 5 * deviation


def test_the_variance_is_half_of_that_of_stochastic_rounding():
    torch.manual_seed(0)
    x = shifted_buckets(4, 4).flatten()
    dithered, stochastic = (
        errors(x, rounding, 4).square().mean() for rounding in (Rounding.DITHERED, Rounding.STOCHASTIC)
    )
    # t (1 - t) is 1/6 on average with a deviation of 0.0745: five standard errors of its mean over the elements.
    assert abs(stochastic / dithered - 2) <= 12 * 5 * 0.0745 / x.numel() ** 0.5


@pytest.mark.parametrize(
    "kind",
    ["zeros behind a ReLU", "one-hot", "probabilities", "constant", "not finite", "dropout", "border", "few values"],
)
def test_buckets_of_values_on_levels_or_of_equal_values_round_stochastically(kind: str):
    torch.manual_seed(0)
    x = {
        "zeros behind a ReLU": torch.randn(3 * BUCKET).sub(0.5).relu(),
        "one-hot": torch.nn.functional.one_hot(torch.randint(64, (24,)), 64).flatten().float(),
        "probabilities": torch.softmax(8 * torch.randn(24, 64), 1).flatten(),
        "constant": torch.full((3 * BUCKET,), 2.5),
        "dropout": torch.dropout(torch.randn(3 * BUCKET), 0.3, True),
        "border": torch.randn(3, BUCKET).index_fill(1, torch.arange(0, BUCKET, 5), 0.3).flatten(),
        "few values": torch.tensor([-1.7, -0.4, 0.1, 0.6, 1.9])[torch.randint(5, (3 * BUCKET,))],
        "not finite": torch.randn(3, BUCKET).index_fill(1, torch.tensor([7]), torch.inf).flatten(),
    }[kind]
    dithered, stochastic = (
        UniformQuantizer(bit_width=4, rounding=rounding).quantize(x, seed=5).buffer
        for rounding in (Rounding.DITHERED, Rounding.STOCHASTIC)
    )
    assert torch.equal(dithered, stochastic)


def test_a_bucket_shifts_its_levels_from_a_spread_of_three_quarters_on():
    """Positions between two levels count 16384, those on levels 0; a half of the former is the least spread."""
    assert LEAST_SPREAD == 16384 // 2
    quantizer = UniformQuantizer(bit_width=4, rounding=Rounding.DITHERED, scale_dtype=torch.float32)
    for between in (BUCKET // 2 - 1, BUCKET // 2):
        x = torch.full((BUCKET,), 16.0)
        x[0] = 1.0
        x[1 : 1 + between] = 8.5
        moved = quantizer.quantize(x, seed=0).minimum.item() != 1.0
        assert moved == (between == BUCKET // 2)


def test_a_bucket_with_a_zero_keeps_it():
    torch.manual_seed(0)
    x = shifted_buckets(4, 4)
    x[:2, 7] = 0.0
    packed = UniformQuantizer(bit_width=4, rounding=Rounding.DITHERED).quantize(x, seed=0)
    rounded = UniformQuantizer(bit_width=4).quantize(x, seed=0)
    assert (packed.dequantize()[:2, 7] == 0).all()
    assert torch.equal(packed.dequantize()[:2], rounded.dequantize()[:2])
    assert (packed.minimum[2:] != rounded.minimum[2:]).all()


def test_buckets_are_shifted_by_numbers_of_their_own():
    torch.manual_seed(0)
    x = shifted_buckets(1, 4).flatten().repeat(400)
    packed = UniformQuantizer(bit_width=4, rounding=Rounding.DITHERED, scale_dtype=torch.float32).quantize(x, seed=1)
    shift = ((x[:BUCKET].min() - packed.minimum) / packed.scale).double()
    assert ((shift >= -0.5 - 2**-18) & (shift <= 0.5 + 2**-18)).all()
    assert len(shift.unique()) > 390
    assert abs(shift.mean()) <= 5 * (1 / 12 / len(shift)) ** 0.5
    assert abs((shift[1:] * shift[:-1]).mean()) <= 5 / 12 / len(shift) ** 0.5


def test_values_that_are_spread_at_random_shift_their_levels_but_for_one_bucket_of_twenty():
    """A^2 + B^2 over n is distributed like the squared length of a normal vector in the plane, exp(-c / 2) beyond c."""
    torch.manual_seed(0)
    buckets = 2000
    x = torch.rand(buckets, BUCKET)
    packed = UniformQuantizer(bit_width=4, rounding=Rounding.DITHERED, bucket_size=BUCKET).quantize(x, seed=0)
    share = (packed.minimum == x.amin(1)).double().mean()
    expected = math.exp(-MOST_ALIKE / 2)
    assert abs(share - expected) <= 5 * (expected * (1 - expected) / buckets) ** 0.5
