"""Under `LosslessBackward` every op has torch's own gradient, to the last bit."""

import copy

import brevitas.nn as qnn
import pytest
import torch
from brevitas.graph.calibrate import calibration_mode
from brevitas.quant import Int8ActPerTensorFloat
from torch import nn

import brevact
from brevact import LosslessBackward
from tests.autograd import ops


@pytest.mark.parametrize("op", ops.ALL, ids=lambda op: op.name)
def test_lossless_gradients_are_those_of_torch(op):
    torch.manual_seed(0)
    plain = op.make()
    packed = copy.deepcopy(plain)
    x = torch.randn(op.shape)
    expected, found = gradients(plain, x, None), gradients(packed, x, LosslessBackward)
    assert all(same(a, b) for a, b in zip(expected, found, strict=True))


def test_lossless_gradient_does_not_depend_on_strides_behind_a_mean():
    """SiLU computes dense and expanded gradients by instructions that differ in the last bit."""
    model = nn.Sequential(nn.SiLU(), nn.AdaptiveAvgPool2d(1))
    x = torch.randn(32, 256, 4, 4, generator=torch.Generator().manual_seed(0))
    expected, found = gradients(model, x, None), gradients(model, x, LosslessBackward)
    assert torch.equal(expected[0], found[0])


@pytest.mark.parametrize("reader", [nn.BatchNorm2d(8), nn.GELU(), nn.SiLU()], ids=lambda reader: type(reader).__name__)
def test_ops_keep_the_codes_of_what_they_read(reader):
    """4 bits a code, 2 of what was rounded; per-channel statistics and the packed mask's bytes are the rest."""
    x = torch.randn(4, 8, 16, 16)
    model = nn.Sequential(qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat, bit_width=4), reader)
    with torch.no_grad(), calibration_mode(model):
        model(x)
    brevact.quantize_backward(model, LosslessBackward, residual_bit_width=2)
    assert 6 <= 8 * brevact.memory_report(model, x).saved_bytes / x.numel() < 6.5


def gradients(function, x, policy):
    """Gradients of the input and of the parameters, for a fixed output gradient."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    inner = x * 1
    if policy is None:
        out = function(inner)
    else:
        with brevact.backward_quant(policy, min_numel=0):
            out = function(inner)
    out = out[0] if isinstance(out, tuple) else out
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    return torch.autograd.grad(out, (x, *parameters), weight, allow_unused=True)


def same(a, b):
    return (a is None and b is None) or torch.equal(a.nan_to_num(), b.nan_to_num())
