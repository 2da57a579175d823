"""Rows of torch functions, which regions read: one file per op family, whose ``OPS`` are its rows (:class:`~.op.Op`).

The tables below follow from the rows. ``HANDLERS`` maps a torch function to its counterpart, which saves packed codes.
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
    elementwise_losses,
    grouped_products,
    linear,
    lookups,
    losses,
    metadata,
    moves,
    multi_head,
    piecewise_linear,
    pooling,
    powers,
    probabilities,
    products,
    rectifiers,
    recurrent,
    saved_by_torch,
    scattering,
    selections,
    smooth,
    torch_fake_quantization,
    vector_norms,
)
from brevact.autograd.ops.norm import calls as norms
from brevact.autograd.ops.op import Op

#: All rows, in the order of docs/stored.md.
OPS: tuple[Op, ...] = (
    *convolution.OPS,
    *linear.OPS,
    *norms.OPS,
    *smooth.OPS,
    *powers.OPS,
    *piecewise_linear.OPS,
    *rectifiers.OPS,
    *dropout.OPS,
    *selections.OPS,
    *pooling.OPS,
    *products.OPS,
    *grouped_products.OPS,
    *attention.OPS,
    *multi_head.OPS,
    *probabilities.OPS,
    *losses.OPS,
    *elementwise_losses.OPS,
    *vector_norms.OPS,
    *recurrent.OPS,
    *lookups.OPS,
    *scattering.OPS,
    *moves.OPS,
    *elementwise.OPS,
    *torch_fake_quantization.OPS,
    *saved_by_torch.OPS,
    *metadata.OPS,
)


def _functions(holds: Callable[[Op], bool]) -> frozenset[Callable]:
    """Return the functions of all rows for which ``holds`` is true."""
    return frozenset(func for op in OPS if holds(op) for func in op.functions)


HANDLERS: dict[Callable, Callable] = {func: op.handler for op in OPS if op.handler for func in op.functions}
#: Counterparts without a Function of ours, whose gradients support double backward.
TWICE: dict[Callable, Callable] = {func: op.twice for op in OPS if op.twice for func in op.functions}
LAYERS = _functions(lambda op: op.is_layer)
NORMS = _functions(lambda op: op.is_norm)
PRODUCTS = _functions(lambda op: op.is_product)
ROUNDS_FORWARD = _functions(lambda op: op.rounds_forward)
_NOT_BIT_EXACT = _functions(lambda op: not op.is_bit_exact)


def run_counterpart(handler: Callable, region: Keeper, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a counterpart; NotImplemented for arguments that it does not support (``out=``), too few or too many.

    Torch then handles them or raises the error. NotImplemented, too, if a policy is lossless and torch's own gradient
    differs in the last bits, and for double backward, which Functions of ours do not support.
    """
    if region.settings.leaves_ops_to_torch:
        if region.settings.is_exact and func in _NOT_BIT_EXACT:
            return NotImplemented
        if region.settings.double_backward:
            if func not in TWICE:
                return NotImplemented
            handler = TWICE[func]
    try:
        return handler(region, func, *args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:  # raised inside the handler
            raise
    return NotImplemented
