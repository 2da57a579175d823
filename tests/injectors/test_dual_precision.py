"""Dual precision as a backward quantizer, and the compression that its paper derives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import brevact
from brevact import DualPrecisionBackward2bit, DualPrecisionBackward4bit, DualPrecisionQuantizer, Rounding, SaveMode
from tests.autograd.measuring import kept_bytes

leaves = pytest.mark.parametrize(
    ("leaf", "bit_width"), [(DualPrecisionBackward2bit, 2), (DualPrecisionBackward4bit, 4)], ids=["2bit", "4bit"]
)


@leaves
def test_leaf_resolves_to_its_quantizer(leaf, bit_width: int):
    assert leaf.quantizer == DualPrecisionQuantizer(bit_width=bit_width, block=8, rounding=Rounding.STOCHASTIC)
    assert leaf.backward_settings.save_mode is SaveMode.SAVE_QUANTIZED


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


def test_gradients_of_a_compiled_model_are_those_of_the_eager_one():
    source = DualPrecisionBackward2bit.let(rounding=Rounding.NEAREST)
    torch.manual_seed(0)
    model, x = conv_norm_relu(8), torch.randn(4, 8, 14, 14)
    brevact.quantize_backward(model, source)
    grads = []
    for forward in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        forward(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for eager, compiled in zip(*grads, strict=True):
        # Sums of 4 * 12 * 12 products of float32 in another order: a graph's norm reads its input centred.
        torch.testing.assert_close(compiled, eager, rtol=0, atol=576 * 2**-24 * float(eager.abs().max()))


def test_gradients_are_unbiased():
    """The mean weight gradient of a convolution over draws, against full precision: 5 standard errors."""
    torch.manual_seed(0)
    conv, x = nn.Conv2d(4, 4, 3), torch.randn(2, 4, 12, 12)
    conv(x).square().sum().backward()
    exact = conv.weight.grad.double()
    brevact.quantize_backward(conv, DualPrecisionBackward2bit.let(min_numel=0))
    draws = []
    for _ in range(200):
        conv.zero_grad()
        conv(x).square().sum().backward()
        draws.append(conv.weight.grad.double())
    found = torch.stack(draws)
    assert found.std(0).min() > 0
    assert ((found.mean(0) - exact).abs() <= 5 * found.std(0) / 200**0.5).all()
