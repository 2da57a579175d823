"""Integers in compiled graphs: places in few bits, and QAT, whose integers are saved as other tensors."""

from __future__ import annotations

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8WeightPerTensorFloat, Uint8ActPerTensorFloatMaxInit
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from tests.autograd.measuring import watch_saved

X = torch.randn(8, 8, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [qnn.QuantConv2d(8, 8, 3, padding=1, weight_quant=Int8WeightPerTensorFloat) for _ in range(2)]
    relu = qnn.QuantReLU(act_quant=Uint8ActPerTensorFloatMaxInit, max_val=3.0, bit_width=4)
    return nn.Sequential(layers[0], nn.BatchNorm2d(8), relu, layers[1], nn.Flatten(), nn.Tanh())


def step(model: nn.Module) -> tuple[list[Tensor], int]:
    """Output and gradients of a compiled model, and bytes it keeps from forward to backward."""
    torch.manual_seed(0)
    with watch_saved() as saved:
        y = torch.compile(model, backend="aot_eager", fullgraph=True)(X)
    saved.tensors = [each for each in saved.tensors if each.data_ptr() != X.data_ptr()]
    y.square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], saved.nbytes


def test_qat_is_bit_equal_in_lossless_and_packed_by_other_policies():
    plain, most = step(network())
    exact, nbytes = step(brevact.quantize_backward(network(), brevact.LosslessBackward))
    assert all(map(torch.equal, exact, plain)) and nbytes < most
    found, least = step(brevact.quantize_backward(network(), brevact.DitherBackward4bit.let(min_numel=0)))
    assert torch.equal(found[0], plain[0]) and least < nbytes / 3


@pytest.mark.parametrize("policy", [brevact.LosslessBackward, brevact.StochBackward4bit])
def test_places_are_kept_exactly(policy):
    """The gradient of the input is that of the places that pooling has found."""
    found = []
    for chosen in (None, policy.let(min_numel=0)):
        torch._dynamo.reset()
        x = X.repeat(1, 1, 4, 4).requires_grad_()
        with brevact.backward_quant(chosen), watch_saved() as saved:
            out = torch.compile(lambda x: F.max_pool2d(x, 2), backend="aot_eager")(x)
        saved.tensors = [each for each in saved.tensors if each.numel() != x.numel()]
        found.append((torch.autograd.grad(out.sum(), x)[0], saved.nbytes))
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][1] <= found[0][1] / 3
