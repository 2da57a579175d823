"""Derived tensors, functions of saved tensors: backward recomputes them from those, so they take no bytes.

A norm packs x^ once. Its output y = gamma x^ + beta, an activation act(y), its derivative act'(y) and the product of
act(y) with a small gate derive from it, and so do their views, paddings and concatenations. The table of known values
(``known_values``) holds such a tensor as an expression over sources: packed tensors, masks, and unpacked small tensors
and weights. An op that saves a derived tensor saves its sources.

Linear functions of stochastically rounded values are unbiased at any width. Nonlinear ones are not,
E[f(x~)] = f(x) + f''(x) Var[x~] / 2 + ..., so they are derived only from sources with enough bits
(``derive_min_bits``). A residual sum reads two packed tensors; a sum of more is stored once, and starts a new chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.call_arguments import CONSTANT_TYPES
from brevact.autograd.decoders import AS_IT_IS
from brevact.autograd.derivations import (
    MOST_ADDED_AGAIN,
    MOST_COMBINED,
    MOST_DECODED,
    DerivationRule,
    derivation,
    function_of,
)
from brevact.autograd.expressions import ByMask, TensorFunction
from brevact.autograd.keeper import Keeper
from brevact.autograd.layer_recompute import MOST_TENSORS, goes_deep
from brevact.autograd.norm_recompute import recomputed_output
from brevact.autograd.normalizing import NormInput, output_of
from brevact.autograd.saved import Saved
from brevact.autograd.store import reported
from brevact.private_names.of_torch import TreeSpec, tree_flatten, tree_unflatten
from brevact.quantizers import is_traced

#: Maximum packed tensors in a concatenation or another :attr:`Kind.MOVE`.
MOST_MOVED = 4
_DIVISIONS = frozenset(("div", "divide", "true_divide", "__truediv__"))
_INVERSIONS = frozenset((Tensor.__rtruediv__, Tensor.__rdiv__))  # the same function
#: Minimum result elements per element of an unpacked factor, which then takes half a bit per result element.
ELEMENTS_OF_SMALL = 64


def derive_output(
    region: Keeper, input: NormInput, kept: Saved | None, out: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Record that a norm's output derives from its input, if that is packed or recomputed."""
    if kept is None or not region.settings.derives:
        return
    known = output_of(input.norm.alignment, kept, out, weight, bias)
    if known is None and region.settings.recompute and not is_traced(out):
        known = recomputed_output(input, kept, out, weight, bias)
    if known is not None:
        region.register(out, known)


def derive(
    region: Keeper,
    out: Tensor,
    function: TensorFunction | ByMask,
    operands: Sequence[tuple[Tensor, Saved | None]],
    *,
    is_curved: bool = False,
    is_pointwise: bool = True,
    most_packed: int = MOST_COMBINED,
    is_jointly_linear: bool = False,
    adds: bool = False,
    is_average: bool = False,
    is_dirty: bool = False,
    is_new: bool = False,
) -> None:
    """Record that ``out`` is a function of an op's operands, if all of them have a saved form.

    Each operand comes with the saved form that the op itself made, or None. ``is_dirty``: an in-place Function modified
    ``out`` and will call ``mark_dirty``. ``is_new``: ``out`` has memory of its own. The other arguments are those of
    :class:`DerivationRule`.
    """
    if not region.settings.derives:
        return
    kept, is_known = [], False
    for x, own in operands:
        operand = _kept_operand(region, x, own, out)
        if operand is None:
            return
        is_known = is_known or operand[1] is not AS_IT_IS
        kept.append(operand)
    if is_known:
        if adds and region.recompute:
            most_packed = MOST_ADDED_AGAIN
        is_deep = goes_deep(region)
        most_decoded = math.inf if is_deep and is_average else MOST_DECODED
        rule = DerivationRule(
            *(function, is_curved, is_pointwise, most_packed, is_jointly_linear, adds),
            enters_layers=not is_deep,
            most_decoded=most_decoded,
        )
        tensors, found = derivation(rule, kept, out)
        if is_deep and adds and len(tensors) > MOST_TENSORS:
            return
        result = found.bind(tensors)
        if result is not None and found.is_worth_it(tensors, out):
            region.register(out, result, is_dirty=is_dirty, is_new=is_new and result[1].stride is not None)


def _kept_operand(region: Keeper, x: Tensor, own: Saved | None, out: Tensor) -> Saved | None:
    """Return an operand's saved form; a small one is saved unpacked, a weight as a copy, since both may change."""
    kept = own if own is not None and own[1] is not AS_IT_IS else region.find_kept(x)
    if kept is not None:
        return kept
    if x.numel() * ELEMENTS_OF_SMALL > out.numel():
        return None
    if own is not None and not region.is_weight(x):
        return (own[0][0].detach(),), AS_IT_IS  # not a view that would hold a larger storage
    return (x.detach() if is_traced(x) else x.detach().clone(),), AS_IT_IS


def keep_smooth(
    function: TensorFunction, sources: Sequence[Saved], like: Tensor, *, is_pointwise: bool = True
) -> Saved | None:
    """Save and report a smooth function, such as a derivative, of a source (:func:`keep_source`) and of masks."""
    kept = function_of(function, sources, like, is_curved=True, is_pointwise=is_pointwise)
    return kept if kept is None else reported(kept)


def keep_source(region: Keeper, x: Tensor) -> Saved | None:
    """Save a smooth function's input to derive the function and its derivative; None if the derivative is saved."""
    known, settings = region.find_known(x), region.settings
    if known is not None:
        return known if known[1].quality.serves(settings, bends=True) else None
    if not settings.derives_curved or x.numel() < settings.min_numel:
        return None
    kept = region.keep(x)
    return None if kept[1] is AS_IT_IS else kept


class _BoundCall(NamedTuple):
    """A torch function call as a function of its tensor arguments."""

    function: Callable[..., Tensor]
    leaves: tuple[Any, ...]
    spec: TreeSpec

    def __call__(self, *tensors: Tensor) -> Tensor:
        given = iter(tensors)
        leaves = [next(given) if leaf is Tensor else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


class _PositionalCall(NamedTuple):
    """A torch function call with positional tensors and constants only, as a function of its tensors."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]

    def __call__(self, *tensors: Tensor) -> Tensor:
        given = iter(tensors)
        return self.function(*[next(given) if arg is Tensor else arg for arg in self.args])


def as_function(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TensorFunction:
    if not kwargs:
        flat = tuple([Tensor if isinstance(arg, Tensor) else arg for arg in args])
        constants = [type(arg) for arg in flat if arg is not Tensor]
        if CONSTANT_TYPES.issuperset(constants):
            return _PositionalCall(func, flat) if constants else func
    leaves, spec = tree_flatten((args, kwargs))
    return _BoundCall(func, tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec)


class Kind(Enum):
    """How a tracked function's result depends on its arguments."""

    SUM = "an element is linear in those at its place of all tensors together"
    BILINEAR = "an element is linear in that at its place of each of two tensors, the other one given"
    AVERAGE = "an element is the mean of some"
    MOVE = "elements of the arguments, in another order"


def operands_of(region: Keeper, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Saved | None]] | None:
    """Return a tracked call's arguments with their saved forms; None if a large argument has none.

    Call it before the function, which may overwrite its arguments.
    """
    if not tensors or not region.settings.derives:
        return None
    largest = max([x.numel() for x in tensors])
    operands = []
    for x in tensors:
        kept = region.find_kept(x)
        if kept is None and x.numel() * ELEMENTS_OF_SMALL > largest:
            return None
        operands.append((x, kept))
    return operands


def track_derived(
    region: Keeper,
    func: Callable[..., Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Tensor,
    operands: list[tuple[Tensor, Saved | None]],
    kind: Kind,
) -> None:
    """Record that an out-of-place torch function's result is that function of ``operands`` (:func:`operands_of`)."""
    if not out.is_floating_point():
        return
    for x, _ in operands:
        if x.device != out.device and x.dim():
            return  # a copy on another device starts a new chain
    if func in _INVERSIONS or kwargs.get("rounding_mode") is not None or isinstance(kwargs.get("alpha"), Tensor):
        return
    if func.__name__ in _DIVISIONS and any(kept and not kept[1].quality.is_exact for _, kept in operands[1:]):
        return
    is_elementwise = kind in (Kind.SUM, Kind.BILINEAR)
    if is_elementwise and "memory_format" in kwargs:  # meaningless for parts that are decoded separately
        kwargs = {**kwargs, "memory_format": torch.preserve_format}  # the result's strides are recorded separately
    derive(
        *(region, out, as_function(func, args, kwargs), operands),
        is_pointwise=is_elementwise and all([x.shape == out.shape for x, _ in operands]),  # sizes may be symbolic
        most_packed=MOST_MOVED if kind is Kind.MOVE else MOST_COMBINED,
        is_jointly_linear=kind is not Kind.BILINEAR,
        adds=kind is Kind.SUM and len(operands) > 1,
        is_average=kind is Kind.AVERAGE,
    )
