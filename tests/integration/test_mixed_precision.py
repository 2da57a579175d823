"""Autocast with a gradient scaler; channels_last."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from brevact import (
    DualPrecisionBackward2bit,
    L4Backward,
    NearestBackward4bit,
    SignMagnitudeBackward,
    StochBackward2bit,
    StochBackward2bit4bitMix,
    StochBackward8bit,
    WeibullBackward2bit,
)
from tests.integration.models import X, codes, mlp, quantized, twins

LEAVES = (
    *(StochBackward2bit, StochBackward8bit, NearestBackward4bit, StochBackward2bit4bitMix, L4Backward),
    *(SignMagnitudeBackward, WeibullBackward2bit, DualPrecisionBackward2bit),
)


def scaled_step(model: nn.Module, dtype: torch.dtype, scale: float, x: Tensor = X) -> tuple[bool, float]:
    """Run a step; return whether the weights changed, and the factor from its scale to the next."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast("cpu", dtype=dtype):
        packed, _, out = codes(model, x)
    assert len(packed) > 1
    scaler.scale(out.float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    changed = not all(map(torch.equal, before, model.parameters()))
    return changed, scaler.get_scale() / scale


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_steps_train(leaf, dtype):
    assert scaled_step(quantized(mlp(), leaf), dtype, 2.0**6) == (True, 1)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_an_overflowing_gradient_reaches_the_scaler(leaf):
    # the loss times 2^40 fits float32, its gradient in float16 does not
    assert scaled_step(quantized(mlp(), leaf), torch.float16, 2.0**40) == (False, 0.5)


class Saturated(nn.Module):
    """An activation overflows float16, and no output shows it: ReLU6 maps Inf to 6, and passes no gradient on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        with torch.no_grad():
            self.first.weight.abs_().mul_(1e5)
            self.second.weight.abs_()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu6(self.second(self.first(x)))


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_an_overflowing_activation_reaches_the_scaler(leaf):
    x = X.abs()
    plain, model = twins(Saturated, leaf)
    with torch.autocast("cpu", dtype=torch.float16):
        assert plain.first(x).isinf().any() and plain(x).isfinite().all()
    assert scaled_step(model, torch.float16, 2.0**6, x) == (False, 0.5)
    assert not model.second.weight.grad.isfinite().all()
