"""Dual precision as a backward quantizer, and the compression that its paper derives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import brevact
from brevact import DualPrecisionBackward2bit, DualPrecisionQuantizer, Rounding
from tests.autograd.measuring import kept_bytes


def test_settings_of_the_leaf_are_those_of_the_quantizer():
    injector = DualPrecisionBackward2bit.let(block=4, bit_width=3, rounding=Rounding.NEAREST)
    assert injector.quantizer == DualPrecisionQuantizer(bit_width=3, block=4, rounding=Rounding.NEAREST)
    assert brevact.quantizer(DualPrecisionBackward2bit, block=16).block == 16
    with pytest.raises(TypeError, match=r"blocks=4 is not a setting of .*; did you mean block\?"):
        DualPrecisionBackward2bit.let(blocks=4)
    with pytest.raises(TypeError, match="bucket_size=64 is not a setting"):
        DualPrecisionBackward2bit.let(bucket_size=64)
    with pytest.raises(ValueError, match="block: got 0"):
        brevact.quantizer(DualPrecisionBackward2bit, block=0)


def conv_norm_relu(channels: int) -> nn.Sequential:
    layers = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    return nn.Sequential(*layers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("side", [7, 8, 14, 28, 32, 56])
def test_compression_of_a_conv_norm_relu_block_is_that_of_the_paper(side: int):
    """Theorem 3A: 4 bytes for the inputs of conv and BN and 1 byte for ReLU's mask, over two packs, bits and deviation.

    The formula gives 10.346 for maps of 7 by 7, which the paper rounds to 10.35; the 15-bit scale makes up for more
    than the statistics of a batch of 64. Where 8 does not divide the side, there are more blocks than one per 64
    pixels.
    """
    batch, channels = 64, 16
    model = conv_norm_relu(channels)
    brevact.quantize_backward(model, DualPrecisionBackward2bit)
    x = torch.randn(batch, channels, side, side)
    compression = 9 * x.numel() / kept_bytes(model, lambda: model(x))
    assert compression >= 10.35
    blocks = (-(-side // 8)) ** 2
    formula = 9 / (4 * blocks / side**2 + 2 / 4 + 8 / side**2 + 1 / 8)
    saved, statistics = 2 / 8 / side**2, 4 / batch / side**2  # bytes an element; the sign of two scales a map
    assert compression == pytest.approx(9 / (9 / formula - saved + statistics), rel=1e-6)


def test_compression_of_a_linear_relu_block_is_that_of_the_paper():
    """Theorem 3B, but for the scale's sign."""
    features, rows = 512, 64
    model = nn.Sequential(nn.Linear(features, features), nn.ReLU())
    brevact.quantize_backward(model, DualPrecisionBackward2bit)
    x = torch.randn(rows, features)
    formula = 5 / (2 / 8 + 2 / 8 + 4 / features + 1 / 8 - 1 / 8 / features)
    assert 5 * x.numel() / kept_bytes(model, lambda: model(x)) == pytest.approx(formula, rel=1e-6)
