"""Quantizers that learn their bit width: its gradient is that of stock Brevitas."""

from __future__ import annotations

import copy

import brevitas.nn as qnn
import pytest
import torch
from brevitas.inject.enum import BitWidthImplType
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, Uint8ActPerTensorFloat
from torch import Tensor, nn

import brevact
from brevact import LosslessBackward, StochBackward2bit
from tests.qat.cases import CHANNELS, activation, gradients

LEARNED = {"bit_width_impl_type": BitWidthImplType.PARAMETER, "bit_width": 4}
LAYERS = {
    "identity": lambda: qnn.QuantIdentity(Int8ActPerTensorFloat.let(**LEARNED)),
    "relu": lambda: qnn.QuantReLU(Uint8ActPerTensorFloat.let(**LEARNED)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("policy", [StochBackward2bit, LosslessBackward])
@pytest.mark.parametrize("collects", [True, False])
def test_gradients_of_bit_widths_are_those_of_brevitas(name, policy, collects):
    plain = nn.Sequential(LAYERS[name]()).train()
    if not collects:
        for module in plain.modules():
            if hasattr(module, "collect_stats_steps"):
                module.collect_stats_steps = 0
    quantized = brevact.quantize_backward(copy.deepcopy(plain), policy, min_numel=0)
    for seed in range(2):
        out, of_input, expected = gradients(plain, activation(seed))
        found_out, found_of_input, found = gradients(quantized, activation(seed))
        assert torch.equal(found_out, out) and torch.equal(found_of_input, of_input)
        widths = [key for key in expected if "bit_width" in key]
        assert len(widths) == 1 and isinstance(expected[widths[0]], Tensor)
        assert expected[widths[0]] != 0 and torch.equal(found[widths[0]], expected[widths[0]])


def test_gradients_of_bit_widths_of_weights_are_those_of_brevitas():
    found = []
    for packs in (False, True):
        torch.manual_seed(0)
        layer = qnn.QuantConv2d(CHANNELS, CHANNELS, 3, weight_quant=Int8WeightPerTensorFloat.let(**LEARNED))
        with brevact.backward_quant(StochBackward2bit if packs else LosslessBackward, min_numel=0):
            weight = layer.quant_weight().value
        weight.backward(weight.detach().sign() + 0.5)
        found.append({name: p.grad for name, p in layer.named_parameters() if p.grad is not None})
    assert any("bit_width" in name for name in found[0]) and found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][name], grad) for name, grad in found[0].items())
