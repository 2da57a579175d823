"""A row of the op table: torch functions that regions treat alike, and their properties."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.deriving.derived import Kind

_HOMES = (torch, Tensor, F, torch.special, torch.linalg, torch.fft)

#: Texts of gradients and saved tensors that several rows of docs/how.md share.
EXACT, UNBIASED = "exact", "unbiased"
MASKS, NOTHING = "masks, 1 bit per element or channel", "nothing"


def everywhere(*names: str) -> tuple[Callable, ...]:
    """Return all torch functions, methods and operators with these names, parted by spaces, and in-place ones."""
    names = tuple(" ".join(names).split())
    found = [getattr(home, name + suffix, None) for name in names for suffix in ("", "_") for home in _HOMES]
    found += [getattr(Tensor, f"__{prefix}{name}__", None) for name in names for prefix in ("", "i", "r")]
    return tuple(function for function in found if callable(function))


def places_in_first(tensors: Sequence[Tensor]) -> int:
    """Return the largest dimension's size in the first floating-point or complex tensor, the number of places."""
    first = next((x for x in tensors if x.is_floating_point() or x.is_complex()), None)
    return 0 if first is None else max(first.shape, default=1)


class Saves(enum.Enum):
    """Why hooks may pack the tensors of torch's own op: its gradient is known to tolerate a rounding error.

    If a torch function has no counterpart for its arguments, saved-tensor hooks could pack its tensors. They do so only
    for functions of these kinds and for code outside torch: third-party ``autograd.Function``s, scripted code,
    operators of other libraries. A torch function without a kind saves its tensors unpacked, as does one that a later
    torch adds, since nobody has checked its gradient, which may be

    - *singular or exponential* in the tensor that it saves (1/x of a logarithm, 1/y of a root, a matrix
      inverse): a rounding error, a fraction of the range, changes the gradient instead of adding noise;
    - a *choice* by the saved tensor (which element is the largest, between which elements a grid point lies);
    - a *loss* or another reduction in one torch function, which hides the ops inside;
    - *attention or a norm* whose counterpart does not support the arguments: a saved log-sum of scores does not match
      packed queries and keys, nor do saved statistics match a packed input.

    ``tests/autograd/test_op_database.py`` runs each op of torch's own database inside a region; wrong kinds fail there.
    """

    PLACES = "sizes, indices and masks, or nothing: the gradient is the same whatever the elements are"
    SIZES = "sizes of floating-point tensors, which take no bytes, and indices and masks"
    FACTORS = "factors: the gradient is linear in each tensor that is saved"
    BOUNDED = "results between 0 and 1, or -1 and 1, in which the gradient is quadratic: a bias of one copy's variance"


class Stored(NamedTuple):
    """A row of the table in docs/how.md; rows with equal texts are merged. ``kept``: tensors saved for backward."""

    op: str
    kept: str
    gradient: str


@dataclass(frozen=True)
class Op:
    """Torch functions that regions treat alike.

    A function may be in several rows of families, whose properties add up to its one row in ``rows.ROWS``, which alone
    has the fields from ``name`` on.

    Args:
        functions: torch functions.
        handler: their counterpart, called as ``handler(region, func, *args, **kwargs)``; it returns ``NotImplemented``
            to let torch run (nothing to save, or an argument that torch rejects with an error).
        stored: their row in the documentation.
        twice: whether the counterpart also serves double backward, for which it applies none of our Functions.
        saves: why the tensors of torch's own op may be packed; None: hooks leave them unpacked.
        must_not_round: takes a region and a call's arguments, returns whether the tensors of torch's own op must stay
            unpacked.
        is_bit_exact: whether the counterpart's gradient, with nothing rounded, equals torch's bit for bit. If not,
            torch runs under a lossless policy.
        is_layer: whether the result is an activation even if all inputs are weights.
        is_norm: whether they are norms, which turn a weight into a weight (weight standardization).
        rounds_forward: whether some quantizers also change the result (``quantize_forward``).
        looks_up: whether integers next to a tensor are indices.
        places: returns the number of places from a call's tensors, if all integers that torch saves are places;
            None: they may be other integers.
        kind: how results derive from arguments; None: they are not tracked.
        is_pointwise: whether each result element is a function of the elements at its place of all tensors.
        is_metadata: whether they query sizes or a dtype, or change an integer: a region may skip such calls.
        is_backward: whether they run a backward pass.
        is_unversioned: whether their caller may change values without bumping the version counter.
        name: by which rules know the function; None if no rule applies to it.
        reads_sizes: whether its gradient reads only the sizes of floating-point tensors.
        overwrites: whether it may overwrite an argument of a tracked result: the region looks up that argument's saved
            form before the call.
        written: returns the tensors of a call whose values an operator may change behind the version counter.
        makes_weight: whether the result is always a weight: it has no batch, and parametrizations add it.
        takes_tensors: whether it accepts a plain tensor in place of a subclass's that shares its storage: its saved
            tensors are known, and it changes no attribute of an argument.
        replaces: whether the result does not depend on the first argument, which is overwritten.
        picks_extremes: whether its gradient goes to the smallest or the largest elements alone.
        is_tracked: whether its result may be recorded as a function of its arguments.
    """

    functions: tuple[Callable, ...] = ()
    handler: Callable[..., Any] | None = None
    stored: Stored | None = None
    twice: bool = False
    saves: Saves | None = None
    must_not_round: Callable[[Any, tuple], bool] | None = None
    is_bit_exact: bool = True
    is_layer: bool = False
    is_norm: bool = False
    rounds_forward: bool = False
    looks_up: bool = False
    places: Callable[[Sequence[Tensor]], int] | None = None
    kind: Kind | None = None
    is_pointwise: bool = False
    is_metadata: bool = False
    is_backward: bool = False
    is_unversioned: bool = False
    name: str | None = None
    reads_sizes: bool = False
    overwrites: bool = False
    written: Callable[[tuple, dict[str, Any]], list[Tensor]] | None = None
    makes_weight: bool = False
    takes_tensors: bool = False
    replaces: bool = False
    picks_extremes: bool = False
    is_tracked: bool = False
