"""Learned scales of fake quantizers in few calls: s = max(|v|, least) / t, without the modules that make it.

Source: brevitas.core.scaling.ParameterScaling and ParameterFromRuntimeStatsScaling (behind the steps that collect
statistics), whose gradient this is to the last bit: dL/dv = sgn(v) (dL/ds / t).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from brevact.autograd.ops.base import Saving, load, save


class _LearnedScale(Saving):
    is_brevact = False  # its result is computed from weights
    returns_new = True

    @staticmethod
    def forward(ctx: Any, value: Tensor, threshold: Tensor, least: float | None) -> Tensor:
        save(ctx, exact=(value, threshold))
        magnitude = value.abs()
        return (magnitude if least is None else magnitude.clamp_min_(least)) / threshold

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        value, threshold = load(ctx)
        return (grad / threshold).to(value.dtype).mul_(value.sgn()), None, None


def learned_scale(value: Tensor, threshold: Tensor, least: float | None) -> Tensor:
    """Return scales of a parameter; the tensors that autograd saves are as small as the scales, and stay as they are.

    Args:
        value: parameter.
        threshold: positive number without a gradient, of no dimensions.
        least: smallest magnitude; None for none.
    """
    if value.numel() == 1 and value.is_cpu and (least is None or not abs(value.item()) < least):
        return value.abs() / threshold  # whose gradient in C++ is the same one
    found: Tensor = _LearnedScale.record(value, threshold, least)
    return found
