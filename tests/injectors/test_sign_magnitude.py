"""The thesis' quantizer as injectors: its names are settings, and layers train with it."""

from __future__ import annotations

import pytest
import torch
from brevitas import nn as qnn
from torch import nn

import brevact
from brevact import (
    SignMagnitudeBackward,
    SignMagnitudeGlobalBackward,
    SignMagnitudeL2Backward,
    SignMagnitudeQuantizer,
    StochBackward4bit,
)
from brevact import nn as bnn
from brevact.injectors import NearestRounding


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


def test_rounding_composes():
    class Nearest(NearestRounding, SignMagnitudeBackward):
        mix_levels_prob = 0

    assert not brevact.quantizer(Nearest).is_stochastic


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(TypeError, match="bucket"):
        SignMagnitudeBackward.let(bucket_size=64)
    with pytest.raises(ValueError, match="mix_levels_prob: got 3"):
        brevact.quantizer(SignMagnitudeBackward, mix_levels_prob=3)


@pytest.mark.parametrize(
    "source", [SignMagnitudeBackward, SignMagnitudeL2Backward, SignMagnitudeGlobalBackward], ids=lambda x: x.__name__
)
def test_gradients_are_unbiased(source):
    torch.manual_seed(0)
    layer, x, draws = nn.Linear(32, 8), torch.randn(64, 32), 300
    brevact.quantize_backward(layer, source, min_numel=0)
    weights = torch.randn(64, 8)
    found = [torch.autograd.grad((layer(x) * weights).sum(), layer.weight)[0] for _ in range(draws)]
    samples = torch.stack(found).double()
    expected = weights.double().t() @ x.double()
    # 5 standard errors of 256 entries, each a sum of 64 independent errors.
    assert ((samples.mean(0) - expected).abs() <= 5 * samples.std(0) / draws**0.5 + 1e-4).all()


def noise(source: type) -> float:
    """Mean square of the error of normal values."""
    x = torch.randn(512 * 200, generator=torch.Generator().manual_seed(0))
    return (brevact.quantizer(source).quantize(x, seed=0).dequantize() - x).square().mean().item()


def test_noise_is_what_the_documentation_says():
    low = SignMagnitudeBackward.let(mix_levels_prob=0)
    assert noise(StochBackward4bit) < noise(low)  # for the same 4 bits
    assert 4 < (noise(SignMagnitudeL2Backward) / noise(SignMagnitudeBackward)) ** 0.5 < 8
