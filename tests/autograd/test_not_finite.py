"""Non-finite values of a saved tensor stay in place: gradients are NaN exactly where plain ones are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brevact
from brevact import (
    DualPrecisionBackward2bit,
    L4Backward,
    NearestBackward4bit,
    StochBackward2bit,
    StochBackward2bit4bitMix,
    WeibullBackward2bit,
)
from brevact.autograd import region
from tests.autograd.leaves import every_leaf, every_noisy_leaf, packs

INFINITY = torch.inf
STOCH_8BIT = StochBackward2bit.let(bit_width=8)
FORMATS = {
    "2 bits": StochBackward2bit,
    "8 bits": STOCH_8BIT,
    "nearest": NearestBackward4bit,
    "mixed": StochBackward2bit4bitMix,
    "Weibull": WeibullBackward2bit,
    "L4": L4Backward,
    "dual precision": DualPrecisionBackward2bit,
}

torch.manual_seed(0)
KEEP = torch.rand(64, 4, 64) > 0.3
KEEP[:, 1], KEEP[5, 2] = False, False  # rows with every key masked
VALUES = torch.randn(64, 64, 16)


def _attention(scores: Tensor) -> Tensor:
    weights = scores.masked_fill(~KEEP, -INFINITY).softmax(-1)
    return weights.masked_fill(~KEEP, 0.0)


def _masked(function: Callable[[Tensor], Tensor], value: float) -> Callable[[Tensor], Tensor]:
    """The function of scores with a value at masked places, where its result is set to 0."""
    return lambda scores: function(scores.masked_fill(~KEEP, value)).masked_fill(~KEEP, 0.0)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda scores: _attention(scores) @ VALUES,
    "attention weights": _attention,
    "masked.softmax": lambda scores: torch.masked.softmax(scores, -1, mask=KEEP),
    "masked.softmin": lambda scores: torch.masked.softmin(scores, -1, mask=KEEP),
    "masked.log_softmax": lambda scores: torch.masked.log_softmax(scores, -1, mask=KEEP),
    "log_softmax": _masked(lambda x: x.log_softmax(-1), -INFINITY),
    "gelu": _masked(F.gelu, -INFINITY),
    "silu": _masked(F.silu, -INFINITY),
    "mish": _masked(F.mish, -INFINITY),
    "sin": _masked(torch.sin, -INFINITY),
    "tanh": _masked(torch.tanh, -INFINITY),
    "exp": _masked(torch.exp, INFINITY),
    "sigmoid": _masked(torch.sigmoid, torch.nan),
    "square": _masked(torch.square, INFINITY),
    "product": lambda scores: (scores.masked_fill(~KEEP, INFINITY) * scores).masked_fill(~KEEP, 0.0),
    "matmul": lambda scores: scores.masked_fill(~KEEP, torch.nan) @ VALUES,
    "linear": lambda scores: F.linear(scores.masked_fill(~KEEP, INFINITY), VALUES[0].t()),
}


def _gradients(case: Callable[[Tensor], Tensor], source: type | None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 4, 64, generator=generator).requires_grad_()
    weight = torch.randn(64, 64, generator=generator).div(8).requires_grad_()
    if source is None:
        out = case(x @ weight)
    else:
        with brevact.backward_quant(source):
            out = case(x @ weight)
    return torch.autograd.grad(out, (x, weight), torch.randn(out.shape, generator=generator))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_nan_where_plain_ones_are_and_nowhere_else(case: Callable[[Tensor], Tensor]):
    plain = _gradients(case, None)
    for name, source in FORMATS.items():
        for got, want in zip(_gradients(case, source), plain, strict=True):
            assert torch.equal(got.isfinite(), want.isfinite()), name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_beside_what_is_not_finite_are_those_of_8_bits(case: Callable[[Tensor], Tensor]):
    for got, want in zip(_gradients(case, STOCH_8BIT), _gradients(case, None), strict=True):
        finite = want.isfinite()
        assert (got - want)[finite].norm() <= 0.1 * want[finite].norm()


@pytest.mark.parametrize("value", [1e30, -1e30, torch.finfo(torch.float32).min, INFINITY, -INFINITY, torch.nan])
@pytest.mark.parametrize("function", [torch.square, lambda x: x * x, F.elu, F.glu, lambda x: x * (x * 2).sigmoid()])
def test_rows_of_a_sentinel_have_gradients_as_near_as_others(function, value):
    """Where the result is masked, DEFAULT's gradients of the other elements have its noise, whatever stands there."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 64, generator=generator).requires_grad_()
    mask = torch.zeros(128, 64, dtype=torch.bool)
    mask[::16, 3] = mask[::16, 35] = True

    def gradient(context) -> Tensor:
        with context:
            out = function((x * 2).masked_fill(mask, value))
            out = torch.where(out.abs() < 1e15, out, 0.0)
        return torch.autograd.grad(out.sum(), x)[0]

    want, got = gradient(nullcontext()), gradient(brevact.backward_quant())
    finite = want.isfinite()
    assert got[finite].isfinite().all()
    assert (got - want)[finite].norm() < 0.25 * want[finite].norm()


@every_leaf
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen_in_the_gradient(leaf, value):
    layer, x = brevact.quantize_backward(nn.Linear(64, 8), leaf, min_numel=0), torch.randn(64, 64)
    x[5, 7] = value
    layer(x)[:5].sum().backward()
    assert not torch.isfinite(layer.weight.grad[:, 7]).any()


@every_noisy_leaf
def test_a_nan_stays_one_in_gradients_of_each_kind(leaf):
    x = torch.randn(4, 4096)
    x[1, 7] = float("nan")
    weight = torch.randn(8, 4096, requires_grad=True)
    with region(packs(leaf)):
        out = F.linear(x, weight)[1]
    assert torch.autograd.grad(out.sum(), weight)[0][:, 7].isnan().all()
