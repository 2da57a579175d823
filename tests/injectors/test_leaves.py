"""The docstring of every leaf states its rounding and its measured bytes."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from brevact import BackwardSettings, UniformQuantizer
from brevact.policy.files import LEAVES
from brevact.quantizers import Rounding

SIZES = re.compile(
    r"(nearest|stochastic|dithered) rounding: ([\d.]+) bits an element(?: \(.*\))?, ([\d.]+)x smaller than float32\."
)
VARIANT = re.compile(r"^(?:The levels of )?`(\w+)`")
DRAWS = 50


@functools.cache
def measured(leaf: type) -> tuple[float, float]:
    """Bits an element of samples with sixteen maps of 56 by 56, and five standard errors of the mean."""
    quantizer = leaf.quantizer
    draws, samples = (DRAWS, 2) if hasattr(quantizer, "probability") else (2, 16)
    x = torch.randn(samples, 16, 56, 56, generator=torch.Generator().manual_seed(0))
    bits = torch.tensor([8.0 * quantizer.quantize(x, seed=seed).nbytes / x.numel() for seed in range(draws)])
    return bits.mean().item(), 5 * bits.std().item() / draws**0.5


@pytest.mark.parametrize("name", sorted(LEAVES.keys() - {"LosslessBackward"}))
def test_docstring_says_what_is_stored(name: str):
    leaf = LEAVES[name]
    bits, error = measured(leaf)
    variant = VARIANT.match(leaf.__doc__)
    if variant:  # of another leaf, which says it: up to the scales of 32 bits that 512 elements share
        base_bits, base_error = measured(LEAVES[variant[1]])
        assert abs(bits - base_bits) <= error + base_error + 32 / 512
        return
    rounding, stated, ratio = SIZES.search(leaf.__doc__).groups()
    assert leaf.quantizer.rounding is Rounding(rounding)
    assert abs(bits - float(stated)) <= error + 0.005
    assert abs(32 / float(ratio) - bits) <= error + 32 * 0.05 / float(ratio) ** 2 + 1e-3  # rounded to a tenth


@pytest.mark.parametrize("bit_width", range(1, 9))
@pytest.mark.parametrize(
    ("word", "rounding"), [("Nearest", "nearest"), ("Stoch", "stochastic"), ("Dither", "dithered")]
)
def test_uniform_leaves_have_the_settings_of_their_names(word: str, rounding: str, bit_width: int):
    quantizer = UniformQuantizer(bit_width=bit_width, rounding=rounding)
    assert LEAVES[f"{word}Backward{bit_width}bit"].backward_settings == BackwardSettings(quantizer)
