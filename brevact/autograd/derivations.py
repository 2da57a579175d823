"""Derivations: build the decoder of an op's result from its operands' saved forms, cached across training steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.decoders import AS_IT_IS
from brevact.autograd.expressions import ByMask, Call, Derived, Restrided, TensorFunction
from brevact.autograd.known_values import View
from brevact.autograd.quality import EXACT
from brevact.autograd.saved import Decoder, Saved
from brevact.private_names.of_torch import TreeSpec
from brevact.quantizers import Layout, is_traced

#: Maximum calls in an expression: decoding costs no more than a few passes over memory.
MOST_CALLS = 24
#: Maximum decoded elements per result element: for means and maxima of more, a code costs less.
MOST_DECODED = 4
#: Maximum packed tensors in a derived sum or product; a sum of more is stored, and starts a new chain.
MOST_COMBINED = 2
#: The same for sums where layers are recomputed: every fourth residual block stores its sum.
MOST_ADDED_AGAIN = 4


class _Expressions:
    """Operands of an expression under construction, with each source once.

    Operands overlap if they read the same packed tensor, with ``enters_layers`` also through recomputed layers.
    """

    def __init__(self, enters_layers: bool) -> None:
        self._enters_layers = enters_layers
        self.sources: list[Saved] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self.quality = EXACT
        #: Whether two operands read the same packed tensor.
        self.overlap = False
        self._roots: set[int] = set()  # ids of packed tensors
        self.packed: set[int] = set()  # a recomputed layer counts by its token, not by its sources
        #: Maximum number of packed tensors that a single operand reads.
        self.most = 0
        #: Whether each operand is a product with an unpacked tensor.
        self.are_scaled = True

    def add(self, kept: Saved) -> Call | int:
        """Add an operand and return its expression."""
        tensors, decoder = kept
        if isinstance(decoder, View) and decoder.decoder.input_of(tensors) is None:
            whole = self.add((tensors, decoder.decoder))
            stride = decoder.decoder.stride if isinstance(decoder.decoder, Derived) else None
            return Call(Restrided(stride, decoder.shape, decoder.stride, decoder.offset), (whole,), -1)
        if isinstance(decoder, Derived):
            parts = decoder.parts(tensors)
            self._meet(kept)
            self.are_scaled = self.are_scaled and any(of is AS_IT_IS for _, of in parts)
            return decoder.expression.renumbered([self._number(part) for part in parts])
        self.are_scaled = False
        self._meet(kept)
        return self._number(kept)

    def _meet(self, kept: Saved) -> None:
        self.quality = self.quality.with_other(kept[1].quality)
        roots, packed = packed_in(kept), packed_in(kept, enters_layers=False)
        reads, met = (roots, self._roots) if self._enters_layers else (packed, self.packed)
        self.overlap = self.overlap or bool(reads & met)
        self._roots |= roots
        self.packed |= packed
        self.most = max(self.most, len(packed))

    def _number(self, kept: Saved) -> int:
        tensors, decoder = kept
        key = (id(decoder), *map(id, tensors))
        number = self._numbers.setdefault(key, len(self.sources))
        if number == len(self.sources):
            self.sources.append(kept)
        return number


def packed_in(kept: Saved, *, enters_layers: bool = True) -> set[int]:
    """Return the ids of the packed tensors that a saved form is computed from.

    Without ``enters_layers`` a recomputed layer's output counts as one: it is held for its readers.
    """
    tensors, decoder = kept
    if decoder.quality.is_exact:
        return set()
    if isinstance(decoder, Derived):
        return set().union(*(packed_in(part, enters_layers=enters_layers) for part in decoder.parts(tensors)))
    if isinstance(decoder, View):
        return packed_in((tensors, decoder.decoder), enters_layers=enters_layers)
    input = decoder.input_of(tensors) if enters_layers else None
    return {id(tensors[0])} if input is None else packed_in(input)


class Derivation(NamedTuple):
    """How an op's result derives from its operands' saved forms, independent of their values.

    ``decoder`` is None if the result depends on too many tensors. It reads the operands' tensors at ``picks`` in that
    order, or all of them. ``is_light``: the decoded packed sources are no larger than a few results. The sources at
    ``small`` are saved unpacked. The key in the table contains the ids of ``holds``.
    """

    decoder: Derived | None
    picks: tuple[int, ...] | None = None
    is_light: bool = True
    small: tuple[int, ...] = ()
    holds: tuple[Any, ...] = ()

    def bind(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Derived] | None:
        """Return the result's saved form for the operands' tensors; None if it depends on too many."""
        if self.decoder is None:
            return None
        return tensors if self.picks is None else tuple([tensors[place] for place in self.picks]), self.decoder

    def is_worth_it(self, tensors: Sequence[Tensor], out: Tensor) -> bool:
        """Return whether the derivation is light, and its unpacked sources take at most a bit per result element."""
        if not self.small or not self.is_light or is_traced(out):
            return self.is_light
        return 8 * sum([tensors[place].nbytes for place in self.small]) <= out.numel()


#: Derivations of earlier training steps, keyed by rule, the operands' decoders, and which of their tensors are equal.
_derivations: dict[Hashable, Derivation] = {}
_MOST_DERIVATIONS = 4096
_CONSTANTS = (
    *(bool, int, float, str, type, torch.dtype, torch.device, torch.memory_format, TreeSpec),
    *(type(torch.ops.aten.relu.default), BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType),
)


class DerivationRule(NamedTuple):
    """The function by which a tensor derives from others, and its properties.

    ``is_curved``: not linear in each operand. ``is_pointwise``: a result element depends only on the operands' elements
    at its position. ``is_jointly_linear``: linear in all operands together; other functions are curved if two operands
    read the same packed tensor, whose errors they multiply with each other. ``adds``: adds or subtracts its operands
    elementwise. ``most_packed``: packed tensors of several operands that the result may depend on.
    """

    function: TensorFunction | ByMask
    is_curved: bool = False
    is_pointwise: bool = True
    most_packed: int = MOST_COMBINED
    is_jointly_linear: bool = False
    adds: bool = False
    enters_layers: bool = True
    most_decoded: float = MOST_DECODED


def derivation(rule: DerivationRule, operands: Sequence[Saved], like: Tensor) -> tuple[tuple[Tensor, ...], Derivation]:
    """Return the tensors of all operands, and how a result with ``like``'s layout derives from them."""
    tensors: tuple[Tensor, ...] = ()
    decoders: tuple[Decoder, ...] = ()
    for kept, decoder in operands:
        tensors += kept
        decoders += (decoder,)
    numbers = tuple(map(id, tensors))
    first = dict(zip(reversed(numbers), range(len(numbers) - 1, -1, -1), strict=True))
    key = (rule, like.shape, like.stride(), like.dtype, *map(id, decoders), *map(first.__getitem__, numbers))
    try:
        return tensors, _derivations[key]  # the entry holds the decoders, so their ids are not reused
    except KeyError:
        lasts = all(decoder.lasts for decoder in decoders) and _is_constant(rule.function)
    except TypeError:  # symbols, and some functions' arguments, are unhashable
        lasts = False
    found = _derive_anew(rule, operands, like, first, lasts=lasts)
    if lasts:
        if len(_derivations) >= _MOST_DERIVATIONS:
            _derivations.clear()
        _derivations[key] = found._replace(holds=decoders)
    return tensors, found


def _is_constant(value: Any) -> bool:
    """Whether a function holds constants only: the table must keep no tensor or module alive."""
    pending, functions = [value], []
    while pending:
        value = pending.pop()
        if isinstance(value, tuple):
            pending += value
        elif isinstance(value, FunctionType):
            if value not in functions:  # some torch functions hold themselves
                functions.append(value)
                pending += [*(value.__defaults__ or ()), *(cell.cell_contents for cell in value.__closure__ or ())]
        elif not (value is None or isinstance(value, _CONSTANTS)):
            return False
    return True


def _derive_anew(
    rule: DerivationRule, operands: Sequence[Saved], like: Tensor, places: dict[int, int], *, lasts: bool
) -> Derivation:
    """Derive a result from operands; ``places`` has their tensors' positions by id."""
    found = _Expressions(rule.enters_layers)
    expressions = tuple([found.add(kept) for kept in operands])
    if len(found.packed) > max(rule.most_packed, found.most):
        return Derivation(None)
    if rule.adds and found.overlap and not _is_of_one_place(expressions) and not found.are_scaled:
        return Derivation(None)  # cancelling neighbours leave both errors, which scale with a far wider range
    only = -1
    if rule.is_pointwise and len(found.sources) == 1 and _is_of_one_place(expressions):
        only = 0
    expression = Call(rule.function, expressions, only)
    if expression.calls > MOST_CALLS:
        return Derivation(None)
    quality = found.quality
    if (rule.is_curved or (found.overlap and not rule.is_jointly_linear)) and not quality.is_exact:
        quality = quality._replace(is_curved=True)
    stride = None
    if not is_traced(like) and Layout.of(like).is_dense and Layout.of(like).numel == like.numel():
        stride = like.stride()
    decoded_bytes, small = 0, []
    for kept, decoder in found.sources:
        if decoder is AS_IT_IS:
            small.append(places[id(kept[0])])
        elif not decoder.quality.is_exact:
            decoded_bytes += decoder.described(kept)[1]
    decoder = Derived.of(expression, found.sources, like, stride, quality, lasts=lasts)
    picks: tuple[int, ...] | None = tuple(places[id(x)] for kept, _ in found.sources for x in kept)
    if picks == tuple(range(sum(len(kept) for kept, _ in operands))):
        picks = None
    most_decoded = max(rule.most_decoded, rule.most_packed)
    is_light = is_traced(like) or decoded_bytes <= most_decoded * like.nbytes
    return Derivation(decoder, picks, is_light, tuple(small))


def _is_of_one_place(expressions: Sequence[Call | int]) -> bool:
    """Whether each expression is pointwise in one source."""
    return all(isinstance(x, int) or x.only >= 0 for x in expressions)


def function_of(
    function: TensorFunction,
    operands: Sequence[Saved],
    like: Tensor,
    *,
    is_curved: bool = False,
    is_pointwise: bool = True,
) -> Saved | None:
    """Return the saved form of a function of saved tensors; None if it depends on too many.

    The result has the sizes, strides and dtype of ``like``. The other arguments are those of :class:`DerivationRule`.
    """
    tensors, found = derivation(DerivationRule(function, is_curved, is_pointwise), operands, like)
    return found.bind(tensors)
