"""The thesis' quantizer as injectors: its names are settings, and layers train with it."""

from __future__ import annotations

import pytest
import torch
from brevitas import nn as qnn

import brevact
from brevact import (
    SignMagnitudeBackward,
    SignMagnitudeGlobalBackward,
    SignMagnitudeL2Backward,
    SignMagnitudeQuantizer,
    StochBackward4bit,
)
from brevact import nn as bnn


def test_leaves_have_the_defaults_of_the_thesis():
    default = SignMagnitudeQuantizer(
        base_levels=4, bucket=512, use_max=True, mix_levels=16, mix_levels_prob=0.3, rounding="stochastic"
    )
    assert SignMagnitudeQuantizer() == brevact.quantizer(SignMagnitudeBackward) == default
    assert brevact.quantizer(SignMagnitudeL2Backward) == SignMagnitudeQuantizer(use_max=False)
    assert brevact.quantizer(SignMagnitudeGlobalBackward) == SignMagnitudeQuantizer(bucket=None)


def test_names_of_the_thesis_are_settings():
    settings = {"base_levels": 8, "bucket": 64, "use_max": False, "mix_levels": 64, "mix_levels_prob": 0.4}
    expected = SignMagnitudeQuantizer(**settings)
    assert brevact.quantizer(SignMagnitudeBackward, **settings) == expected
    assert brevact.quantizer(SignMagnitudeBackward.let(**settings)) == expected
    layer = bnn.QuantLinear(8, 8, True, act_quant=SignMagnitudeBackward, **{f"act_{k}": v for k, v in settings.items()})
    assert layer.act_quant.settings.quantizer == expected
    stock = qnn.QuantReLU(act_quant=SignMagnitudeBackward, **settings)
    assert stock.act_quant.backward_quant.settings.quantizer == expected


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(TypeError, match="bucket"):
        SignMagnitudeBackward.let(bucket_size=64)
    with pytest.raises(ValueError, match="mix_levels_prob: got 3"):
        brevact.quantizer(SignMagnitudeBackward, mix_levels_prob=3)


def noise(source: type) -> float:
    """Mean square of the error of normal values."""
    x = torch.randn(512 * 200, generator=torch.Generator().manual_seed(0))
    return (brevact.quantizer(source).quantize(x, seed=0).dequantize() - x).square().mean().item()


def test_noise_is_what_the_documentation_says():
    low = SignMagnitudeBackward.let(mix_levels_prob=0)
    assert noise(StochBackward4bit) < noise(low)  # for the same 4 bits
    assert 4 < (noise(SignMagnitudeL2Backward) / noise(SignMagnitudeBackward)) ** 0.5 < 8
