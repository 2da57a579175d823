"""Scales of fake quantizers in few calls: s = max(|v|, least) / t, without the modules that compute them.

Gradients are those of the modules to the last bit. For a learned scale (brevitas.core.scaling.ParameterScaling, and
ParameterFromRuntimeStatsScaling after its steps of collecting statistics): dL/dv = sgn(v) (dL/ds / t). For statistics
that are magnitudes (StatsFromParameterScaling), whose bound passes gradients straight through:
dL/dv = sgn(max(v, least)) (dL/ds / t), which is 0 for NaN.
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
    """Return scales of a parameter; ``threshold``: positive, 0-d; ``least``: smallest magnitude, None for none."""
    if value.numel() == 1 and value.is_cpu and (least is None or not abs(value.item()) < least):
        return value.abs() / threshold  # its gradient in C++ is the same
    found: Tensor = _LearnedScale.record(value, threshold, least)
    return found


class _ScaleOfMagnitudes(Saving):
    is_brevact = False  # its result is computed from weights
    returns_new = True

    @staticmethod
    def forward(ctx: Any, magnitudes: Tensor, threshold: Tensor, least: float) -> Tensor:
        bounded = magnitudes.clamp_min(least)
        save(ctx, exact=(bounded, threshold))
        return bounded / threshold

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        bounded, threshold = load(ctx)
        return (grad / threshold).mul_(bounded.sgn()), None, None


def scale_of_magnitudes(magnitudes: Tensor, threshold: Tensor, least: float) -> Tensor:
    """Return scales of nonnegative statistics, NaN for NaN; ``threshold``: positive, 0-d, of the same dtype."""
    found: Tensor = _ScaleOfMagnitudes.record(magnitudes, threshold, least)
    return found
