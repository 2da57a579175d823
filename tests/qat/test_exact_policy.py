"""Under `LosslessBackward` gradients are torch's to the last bit; tests/autograd/test_strides.py has all ops."""

import brevitas.nn as qnn
import pytest
import torch
from brevitas.graph.calibrate import calibration_mode
from brevitas.quant import Int8ActPerTensorFloat
from torch import nn

import brevact
from brevact import LosslessBackward


def strided_gradients(function, *inputs, settings):
    """Gradients of all inputs, whose strides stay, for an output gradient with its first two dimensions swapped."""
    variables = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    operands = [x * 1 for x in variables]
    if settings is None:
        out = function(*operands)
    else:
        with brevact.backward_quant(settings, min_numel=0):
            out = function(*operands)
    sizes = (out.shape[1], out.shape[0], *out.shape[2:])
    grad = torch.randn(sizes, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    return torch.autograd.grad(out, variables, grad)


def test_lossless_gradient_does_not_depend_on_strides_behind_a_mean():
    """SiLU computes dense and expanded gradients by instructions that differ in the last bit."""
    model = nn.Sequential(nn.SiLU(), nn.AdaptiveAvgPool2d(1))
    x = torch.randn(32, 256, 4, 4, generator=torch.Generator().manual_seed(0))
    expected, found = (strided_gradients(model, x, settings=each) for each in (None, LosslessBackward))
    assert torch.equal(*expected, *found)


STRIDED = {
    "linear": (nn.functional.linear, torch.randn(16, 64, 192).transpose(0, 1), torch.randn(24, 192), torch.randn(24)),
    "linear_of_columns": (nn.functional.linear, torch.randn(192, 64).t(), torch.randn(24, 192), torch.randn(24)),
    "linear_of_rows": (nn.functional.linear, torch.randn(64, 4, 8), torch.randn(8, 8), torch.randn(8)),
    "product": (torch.mul, *(torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last) for _ in range(2))),
}


@pytest.mark.parametrize("name", STRIDED)
def test_lossless_gradients_of_strided_tensors_are_those_of_torch(name):
    function, *inputs = STRIDED[name]
    expected = strided_gradients(function, *inputs, settings=None)
    found = strided_gradients(function, *inputs, settings=LosslessBackward)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert [a.stride() for a in expected] == [b.stride() for b in found]


@pytest.mark.parametrize("reader", [nn.BatchNorm2d(8), nn.GELU(), nn.SiLU()], ids=lambda reader: type(reader).__name__)
def test_ops_keep_the_codes_of_what_they_read(reader):
    """4 bits a code, 2 for the residual; per-channel statistics and the packed mask's bytes are the rest."""
    x = torch.randn(4, 8, 16, 16)
    model = nn.Sequential(qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat, bit_width=4), reader)
    with torch.no_grad(), calibration_mode(model):
        model(x)
    brevact.quantize_backward(model, LosslessBackward, residual_bit_width=2)
    assert 6 <= 8 * brevact.memory_report(model, x).saved_bytes / x.numel() < 6.5
