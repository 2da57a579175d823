"""Counterparts of torch functions that store packed activations: one file an op family.

``HANDLERS`` maps a torch function to its counterpart, called as ``handler(region, func, *args, **kwargs)``; it returns
``NotImplemented`` to let torch run (nothing to store, or an argument that torch should explain). ``FORWARD_QUANTIZED``
are those that some quantizers change in the forward pass, too. ``REARRANGED`` are those whose gradient, with nothing
rounded, is torch's but for the last bits, or whose counterpart rounds by itself: where a policy is exact, torch runs
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from brevact.autograd.keeper import Keeper
from brevact.autograd.ops import (
    attention,
    convolution,
    dropout,
    elementwise,
    linear,
    lookups,
    losses,
    multi_head,
    normalization,
    piecewise_linear,
    pooling,
    powers,
    probabilities,
    products,
    rectifiers,
    selections,
    smooth,
    vector_norms,
)

__all__ = ["FORWARD_QUANTIZED", "HANDLERS", "NORMS", "REARRANGED", "run_counterpart"]

FORWARD_QUANTIZED = normalization.FORWARD_QUANTIZED
#: A norm of a weight (weight standardization) makes a weight of it.
NORMS = frozenset(normalization.HANDLERS)

HANDLERS: dict[Callable, Callable] = {
    **convolution.HANDLERS,
    **linear.HANDLERS,
    **normalization.HANDLERS,
    **piecewise_linear.HANDLERS,
    **dropout.HANDLERS,
    **rectifiers.HANDLERS,
    **smooth.HANDLERS,
    **pooling.HANDLERS,
    **elementwise.HANDLERS,
    **products.HANDLERS,
    **attention.HANDLERS,
    **multi_head.HANDLERS,
    **powers.HANDLERS,
    **probabilities.HANDLERS,
    **lookups.HANDLERS,
    **selections.HANDLERS,
    **losses.HANDLERS,
    **vector_norms.HANDLERS,
}

REARRANGED: frozenset[Callable] = frozenset().union(
    *(
        module.HANDLERS
        for module in (
            *(normalization, smooth, products, attention, multi_head, powers, probabilities, losses, vector_norms),
        )
    )
)


def run_counterpart(handler: Callable, region: Keeper, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a counterpart; NotImplemented for arguments that it does not have (``out=``), too few or too many.

    Torch knows them, or explains what is wrong. NotImplemented, too, where a policy is exact and torch's own gradient
    has other last bits.
    """
    if region.settings.is_exact and func in REARRANGED:
        return NotImplemented
    try:
        return handler(region, func, *args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:  # not of this call
            raise
    return NotImplemented
