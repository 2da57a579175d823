"""Counterparts of torch functions that store packed activations: one file an op family.

``HANDLERS`` maps a torch function to its counterpart, called as ``handler(region, func, *args, **kwargs)``; it returns
``NotImplemented`` to let torch run (nothing to store, or an argument that torch should explain).
"""

from __future__ import annotations

from collections.abc import Callable

from brevact.autograd.functions import (
    convolution,
    elementwise,
    linear,
    norm_calls,
    piecewise_linear,
    pooling,
    smooth,
)

__all__ = ["FORWARD_QUANTIZED", "HANDLERS"]

FORWARD_QUANTIZED = norm_calls.FORWARD_QUANTIZED

HANDLERS: dict[Callable, Callable] = {
    **convolution.HANDLERS,
    **linear.HANDLERS,
    **norm_calls.HANDLERS,
    **piecewise_linear.HANDLERS,
    **smooth.HANDLERS,
    **pooling.HANDLERS,
    **elementwise.HANDLERS,
}
