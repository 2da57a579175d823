"""A row: torch functions that regions treat alike, and their properties."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.keeper import Keeper

_HOMES = (torch, Tensor, F, torch.special, torch.linalg, torch.fft)

#: Texts that several rows of docs/stored.md share, of gradients and of saved tensors.
EXACT, UNBIASED = "exact", "unbiased"
MASKS, NOTHING = "masks, 1 bit an element or a channel", "nothing"


def everywhere(*names: str) -> tuple[Callable, ...]:
    """Return the functions, methods and operators of these names, in place ones too, wherever torch has them."""
    found = [getattr(home, name + suffix, None) for name in names for suffix in ("", "_") for home in _HOMES]
    found += [getattr(Tensor, f"__{prefix}{name}__", None) for name in names for prefix in ("", "i", "r")]
    return tuple(function for function in found if callable(function))


def places_in_first(tensors: Sequence[Tensor]) -> int:
    """Return the number of places in the largest dimension of the first tensor that is none of integers."""
    first = next((x for x in tensors if x.is_floating_point() or x.is_complex()), None)
    return 0 if first is None else max(first.shape, default=1)


class Saves(enum.Enum):
    """Why hooks may pack the tensors of torch's own op: its gradient is known to bear a rounding error.

    Where a torch function has no counterpart for its arguments, saved-tensor hooks could pack its tensors. They do so
    for functions of these kinds alone, and for code that is not torch's: other people's ``autograd.Function``s,
    scripted code, operators of other libraries. A torch function of no kind stores its tensors as they are, a new one
    of a later torch too, since nobody has looked at its gradient. It may be

    - *singular or exponential* in the tensor that it saves (1/x of a logarithm, 1/y of a root, exp(y) of a log-sum-exp,
      a matrix inverse), so that a rounding error, a fraction of the range, is a different gradient and no noise;
    - a *choice* by the tensor that it saves (which element is the largest, between which elements a grid lies);
    - a *loss* or another reduction that is one torch function: nobody sees the ops inside;
    - *attention or a norm* whose counterpart does not know the arguments: a saved log-sum of scores does not belong to
      packed queries and keys, saved statistics not to a packed input.

    ``tests/autograd/test_op_database.py`` runs each op of torch's own database inside a region, so that a wrong kind
    fails there.
    """

    PLACES = "sizes, indices and masks, or nothing: the gradient is the same whatever the elements are"
    FACTORS = "factors: the gradient is linear in each tensor that is saved"
    BOUNDED = "results between 0 and 1, or -1 and 1, in which the gradient is quadratic: a bias of one copy's variance"


class Stored(NamedTuple):
    """A row of the table in docs/stored.md.

    Args:
        op: names of the ops; those of rows that say the same of other ops are put beside them.
        kept: the tensors that are saved for backward.
        gradient: whether it is exact, unbiased, or how large its bias is.
    """

    op: str
    kept: str
    gradient: str


class Op(NamedTuple):
    """Torch functions that regions treat alike. A function may be in several rows, each of which adds to the others.

    Args:
        functions: of torch.
        handler: their counterpart, called as ``handler(region, func, *args, **kwargs)``; it returns ``NotImplemented``
            to let torch run (nothing to store, or an argument that torch should explain).
        stored: their row in the documentation.
        twice: their counterpart where gradients are to be differentiated again, called as ``handler``: it applies no
            Function of ours. None: torch runs.
        saves: why the tensors of torch's own op may be packed; None: hooks leave them as they are.
        must_not_round: says of the arguments of a call whether the tensors of torch's own op must stay as they are.
        is_bit_exact: whether the counterpart's gradient, with nothing rounded, is torch's to the last bit. If not,
            torch runs where a policy is lossless.
        is_layer: whether the result is an activation, even if only a weight went in.
        is_norm: whether they are norms, which make a weight of a weight (weight standardization).
        rounds_forward: whether some quantizers change the result, too (``quantize_forward``).
        is_product: whether they are matrix products, whose factors may be weights or activations.
        looks_up: whether integers beside a tensor are indices.
        places: returns the number of places, of the tensors of a call, where all integers that torch saves are places;
            None: they may be other integers.
        moves: whether they return elements of their arguments, each at least once, and constants that they are given.
        is_sum: whether an element of the result is linear in the elements at its place of all tensors together.
        is_bilinear: whether it is linear in the element at its place of each of two tensors, the other one given.
        is_pointwise: whether an element of the result is a function of the elements at its place of all tensors.
        is_average: whether the result is made of means of elements.
        is_metadata: whether they ask for sizes or a type, or change an integer: a region need not look at all calls.
        is_backward: whether they run a backward pass.
        is_unversioned: whether their caller may change values without the version counter seeing it.
    """

    functions: tuple[Callable, ...]
    handler: Callable[..., Any] | None = None
    stored: Stored | None = None
    twice: Callable[..., Any] | None = None
    saves: Saves | None = None
    must_not_round: Callable[[Keeper, tuple], bool] | None = None
    is_bit_exact: bool = True
    is_layer: bool = False
    is_norm: bool = False
    rounds_forward: bool = False
    is_product: bool = False
    looks_up: bool = False
    places: Callable[[Sequence[Tensor]], int] | None = None
    moves: bool = False
    is_sum: bool = False
    is_bilinear: bool = False
    is_pointwise: bool = False
    is_average: bool = False
    is_metadata: bool = False
    is_backward: bool = False
    is_unversioned: bool = False
