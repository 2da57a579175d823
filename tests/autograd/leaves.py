"""Backward quantizers of each kind, and nets to run them on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import brevact
from brevact import (
    DualPrecisionBackward2bit,
    L4Backward,
    L4ForwardBackward,
    SignMagnitudeBackward,
    StochBackward2bit,
    StochBackward2bit4bitMix,
    StochL4Backward,
    WeibullBackward2bit,
)

LEAVES = (
    StochBackward2bit,
    StochBackward2bit4bitMix,
    SignMagnitudeBackward,
    WeibullBackward2bit,
    L4Backward,
    StochL4Backward,
    L4ForwardBackward,
    DualPrecisionBackward2bit,
)


every_leaf = pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)


def wide(count: int = 3) -> nn.Sequential:
    """Layers whose weights are larger than their activations."""
    return nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(256, 256), nn.GELU())])


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))


every_noisy_leaf = pytest.mark.parametrize("leaf", LEAVES[:4], ids=lambda leaf: leaf.__name__)


def packs(leaf: object) -> object:
    return brevact.injectors.backward_settings_from(leaf, min_numel=0)
