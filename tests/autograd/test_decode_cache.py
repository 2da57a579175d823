"""A small tensor is decoded once for the readers that follow each other in the backward pass."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import brevact
from brevact.autograd.deriving.cache import MOST_HELD, Cache, decoded


class _Decoder:
    def __init__(self) -> None:
        self.count = 0

    def decode(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        self.count += 1
        return tensors[0].float() * tensors[1]


def _kept() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(8, dtype=torch.uint8), torch.full((1,), 2.0)


@pytest.mark.parametrize("change", ["codes", "factor", "decoder", "result", "other codes", "other factor"])
def test_decoded_asks_again_after_a_change(change: str) -> None:
    decoder, kept = _Decoder(), _kept()
    first = decoded(decoder, kept, decoder.decode)
    asked = decoder
    if change == "codes":
        kept[0].add_(1)
    elif change == "factor":
        kept[1].mul_(2)
    elif change == "result":
        first.zero_()
    elif change == "decoder":
        asked = _Decoder()
    elif change == "other codes":
        kept = kept[0].clone(), kept[1]
    else:
        kept = kept[0], kept[1].clone()
    second = decoded(asked, kept, asked.decode)
    assert second is not first
    assert torch.equal(second, kept[0].float() * kept[1])


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_norms_of_one_tensor_read_their_own_rows_of_a_parameter(norm) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    x, grad = torch.randn(128, 64, requires_grad=True), torch.randn(128, 64)
    weights = nn.Parameter(torch.stack([torch.ones(64), torch.full((64,), -3.0)]))
    layers = [nn.Linear(64, 64, bias=False) for _ in weights]
    with brevact.backward_quant(brevact.StochBackward8bit):
        outs = [layer(norm(x, (64,), row)) for layer, row in zip(layers, weights, strict=True)]
    first, second = torch.autograd.grad(outs, [layer.weight for layer in layers], [grad, grad])
    # The inputs of both layers derive from one normalized tensor.
    assert torch.allclose(second, first * -3, rtol=1e-4, atol=1e-4)


def test_norms_with_equal_numbers_and_sizes_decode_as_themselves() -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(8, 16, 8, 8, requires_grad=True), torch.randn(8, 16, 8, 8)
    weight = nn.Parameter(torch.randn(16))

    def by_groups() -> torch.Tensor:
        return F.group_norm(x, 1, weight)

    def by_constants() -> torch.Tensor:  # with the eps of 1 that the other has groups
        return F.batch_norm(x, torch.zeros(16), torch.linspace(1, 10, 16), weight, eps=1.0)

    for norm in (by_groups, by_constants, by_groups):
        exact = torch.autograd.grad(norm(), [x, weight], grad)
        with brevact.backward_quant(brevact.StochBackward8bit):
            out = norm()
        for found, expected in zip(torch.autograd.grad(out, [x, weight], grad), exact, strict=True):
            assert float((found - expected).norm() / expected.norm()) < 0.05  # 5 steps of 8 bits


def _chain(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.SiLU(), nn.Conv2d(width, width, 1))


@pytest.mark.parametrize("size", [8, 96])  # held, and too large to be held
@pytest.mark.parametrize("function", [F.silu, F.gelu, F.mish, nn.GELU(approximate="tanh"), F.softplus])
def test_chain_of_any_size_has_the_gradient_of_its_decoded_norm(size: int, function) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    x = torch.randn(2, 16, size, size)
    assert (x.numel() > MOST_HELD) == (size == 96)
    weight, bias = torch.randn(16), torch.randn(16)
    scale = nn.Parameter(torch.ones(16))

    y = F.batch_norm(x, None, None, weight=weight, bias=bias, training=True)
    grad = torch.randn_like(x)
    # With 8 bits, y differs from its decoded values by a step of each bucket at most.
    leaf = x.clone().requires_grad_()
    with brevact.backward_quant(brevact.StochBackward8bit):
        norm = F.batch_norm(leaf, None, None, weight=scale * weight, bias=bias, training=True)
        norm.retain_grad()
        function(norm).backward(grad)
    exact = y.clone().requires_grad_()
    function(exact).backward(grad)
    steps = (y.abs().max() * 2) / 255
    bound = 1.2 * float(steps) * grad.abs()  # no second derivative of these exceeds 1.2
    assert norm.grad is not None and exact.grad is not None
    assert ((norm.grad - exact.grad).abs() <= bound + 1e-6).all()


def test_a_cache_holds_no_more_elements_than_its_budget() -> None:
    cache, decoder, references, held = Cache(4 * MOST_HELD), _Decoder(), [], []
    codes = [(torch.zeros(MOST_HELD, dtype=torch.uint8), torch.ones(MOST_HELD)) for _ in range(12)]
    for kept in codes:
        references.append(weakref.ref(cache.decoded(decoder, kept, decoder.decode)))
        held.append(sum(each() is not None for each in references))
    assert max(held) == 4
