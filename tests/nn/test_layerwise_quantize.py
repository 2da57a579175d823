"""Brevitas' own model rewriting with our layers and injectors in its map."""

import copy

import brevitas.nn as qnn
import torch
from brevitas.graph.quantize import layerwise_quantize
from torch import nn

import brevact.nn as bnn
from brevact.injectors import NearestBackward8bit, StochBackward2bit

LAYER_MAP = {
    nn.Conv2d: (bnn.QuantConv2d, {"act_quant": StochBackward2bit, "weight_quant": None}),
    nn.BatchNorm2d: (bnn.BatchNorm2d, {"act_quant": StochBackward2bit, "act_bit_width": 4}),
    nn.ReLU: (qnn.QuantReLU, {"act_quant": StochBackward2bit}),
    nn.MaxPool2d: (bnn.MaxPool2d, {"act_quant": StochBackward2bit}),
    nn.Linear: (bnn.QuantLinear, {"act_quant": NearestBackward8bit, "weight_quant": None}),
}


def build_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16, eps=1e-3),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(16, 16, 3, dilation=2, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )
    for _ in range(2):
        model(torch.randn(8, 3, 32, 32))
    return model


def test_layerwise_quantize_keeps_forward_weights_and_arguments():
    model = build_model()
    quantized = layerwise_quantize(copy.deepcopy(model), LAYER_MAP)
    assert [type(layer) for layer in quantized] == [
        bnn.QuantConv2d,
        bnn.BatchNorm2d,
        qnn.QuantReLU,
        bnn.MaxPool2d,
        bnn.QuantConv2d,
        qnn.QuantReLU,
        nn.Flatten,
        bnn.QuantLinear,
    ]
    assert quantized[1].eps == 1e-3
    assert quantized[1].act_quant.settings.quantizer.bit_width == 4
    assert quantized[0].bias is None
    assert quantized.state_dict().keys() == model.state_dict().keys()
    x = torch.randn(8, 3, 32, 32)
    assert torch.equal(quantized(x), model(x))
    assert torch.equal(quantized.eval()(x), model.eval()(x))
