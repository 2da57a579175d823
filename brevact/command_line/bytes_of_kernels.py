"""Kernels against the plain torch references: the same bytes for the same seed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from brevact import injectors
from brevact.policy.attach import quantizer
from brevact.quantizers.backends import kernels_for, without_kernels

#: Quantizers whose kernels differ, by name.
_NAMES = (
    *(f"StochBackward{bits}bit" for bits in (1, 2, 3, 4, 8)),
    "NearestBackward4bit",
    "StochBackward2bit4bitMix",
    "StochBackward2bitPerSample",
    "WeibullBackward3bit",
    "L4Backward",
    "StochU5Backward",
    "DualPrecisionBackward2bit",
    "SignMagnitudeBackward",
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernels_of(device: torch.device) -> str | None:
    """Return the name of the kernels' compiler on a device; None if plain torch runs."""
    if kernels_for((torch.zeros(64, device=device),)) is None:
        return None
    return "Numba" if device.type == "cpu" else "Triton"


def differing(device: torch.device) -> tuple[list[str], int]:
    """Return the cases in which kernels and references differ in bytes or values, and the number of cases."""
    wrong, count = [], 0
    for name in _NAMES:
        for dtype in _DTYPES:
            x = torch.randn(4, 8, 24, 24, generator=torch.Generator().manual_seed(1)).to(device, dtype)
            count += 1
            if not same_without_kernels(functools.partial(_written, name, x)):
                wrong.append(f"{name} of {str(dtype).removeprefix('torch.')}")
    return wrong, count


def _written(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    packed = quantizer(getattr(injectors, name)).quantize(x, seed=7)
    return packed.buffer, packed.dequantize()


def same_without_kernels(run: Callable[[], tuple[Tensor, ...]]) -> bool:
    """Return whether a function returns the same bytes with kernels and without."""
    found = run()
    with without_kernels():
        expected = run()
    return all(
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip(found, expected, strict=True)
    )
