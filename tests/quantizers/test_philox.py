"""Philox4x32 against the vectors published with it, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from brevact.quantizers import draw_seed
from brevact.quantizers.reference import ROUNDS, column_bits, philox4x32
from tests.cpu_kernels.example_kernels import draw_words

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
ONES = (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2
ZEROS = (0,) * 4, (0,) * 2
KNOWN_ANSWERS = [  # Random123, kat_vectors, philox4x32
    (7, *ZEROS, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, *ONES, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, *PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, *ZEROS, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, *ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, *PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox4x32_known_answers(rounds, counter, key, expected):
    words = philox4x32(
        tuple(torch.tensor([word]) for word in counter), torch.tensor(_signed(key[0] | key[1] << 32)), rounds
    )
    assert tuple(int(word) for word in words) == expected


@pytest.mark.parametrize("first", [0, 12345, 2**32 - 20, 2**40 + 1])
@pytest.mark.parametrize("key", [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF), PI[1]])
def test_column_words_equals_the_reference(first: int, key: tuple[int, int]):
    columns = 37
    out = torch.zeros(4, columns, dtype=torch.int32)
    draw_words(columns, *key, out.data_ptr(), first, first + columns)
    index = torch.arange(first, first + columns)
    counter = (index & 0xFFFFFFFF, index >> 32, index * 0, index * 0)
    seed = torch.tensor(_signed(key[0] | key[1] << 32))
    assert torch.equal(out.to(torch.int64) & 0xFFFFFFFF, torch.stack(philox4x32(counter, seed, ROUNDS)))


def test_column_bits_takes_halves_of_words_in_order():
    seed, index = torch.tensor(11), torch.arange(5)
    words = philox4x32((index, index * 0, index * 0, index * 0), seed, ROUNDS)
    bits = column_bits(index, seed)
    for element in range(8):
        assert torch.equal(bits[element], words[element & 3] >> (16 * (element >> 2)) & 0xFFFF)


def test_column_bits_are_uniform_and_uncorrelated():
    """Mean and variance of 2^18 draws, and correlations of neighbours in both directions, within 5 standard errors."""
    bits = (column_bits(torch.arange(2**15), torch.tensor(3)).double() + 0.5) / 65536 - 0.5
    n = bits.numel()
    assert abs(bits.mean()) < 5 * (1 / 12 / n) ** 0.5
    assert abs(bits.var() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    for left, right in ((bits[:, 1:], bits[:, :-1]), (bits[1:], bits[:-1]), (bits[4:], bits[:4])):
        assert abs((left * right).mean()) < 5 / 12 / left.numel() ** 0.5


def test_draw_seed_follows_the_default_generator():
    torch.manual_seed(3)
    first, second = draw_seed(), draw_seed("cpu")
    assert first.dtype == torch.int64 and first.dim() == 0 and first != second
    torch.manual_seed(3)
    assert draw_seed() == first
