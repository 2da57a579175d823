"""Derivations: the decoder of an op's result from the saved forms of its operands, cached from step to step."""

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

#: Calls in an expression: decoding costs no more than a few passes over memory.
MOST_CALLS = 24
#: Elements that are decoded for one of a result: for the mean of many, and for the maximum, a code costs less.
MOST_DECODED = 4
#: Packed tensors of which a sum or a product is derived; the sum of more is stored, and a new chain begins with it.
MOST_COMBINED = 2
#: Of which a sum is derived where layers are recomputed: of residual blocks each fourth stores its sum.
MOST_ADDED_AGAIN = 4


class _Expressions:
    """Operands of an expression that is built: each source once.

    Two operands overlap if they read the same packed tensor; if ``enters_layers``, through recomputed layers, too.
    """

    def __init__(self, enters_layers: bool) -> None:
        self._enters_layers = enters_layers
        self.sources: list[Saved] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self.quality = EXACT
        #: Whether two operands read the same packed tensor.
        self.overlap = False
        self._roots: set[int] = set()  # identities of packed tensors
        self.packed: set[int] = set()  # a recomputed layer counts by its token, not by its sources
        #: Packed tensors that one operand alone reads.
        self.most = 0
        #: Whether each operand is a product with a tensor that is kept as it is.
        self.are_scaled = True

    def add(self, kept: Saved) -> Call | int:
        """Return the expression of one more operand."""
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
    """Return the identities of the packed tensors that a kept one is computed from.

    Without ``enters_layers`` the output of a layer that is recomputed counts as one: it is held for its readers.
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
    """How the result of an op derives from the saved forms of its operands, whatever their values.

    The decoder is None where the result depends on too many tensors; it reads the operands' tensors at ``picks``, in
    that order, or all of them. A derivation is light if the packed sources, once decoded, are no larger than a few
    results. The sources at ``small`` are saved as they are. The key in the table consists of the identities of
    ``holds``.
    """

    decoder: Derived | None
    picks: tuple[int, ...] | None = None
    is_light: bool = True
    small: tuple[int, ...] = ()
    holds: tuple[Any, ...] = ()

    def bind(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Derived] | None:
        """Return the saved form of the result from the operands' tensors; None where the result depends on too many."""
        if self.decoder is None:
            return None
        return tensors if self.picks is None else tuple([tensors[place] for place in self.picks]), self.decoder

    def is_worth_it(self, tensors: Sequence[Tensor], out: Tensor) -> bool:
        """Return whether sources are no larger than a few results, and unpacked ones take at most a bit an element."""
        if not self.small or not self.is_light or is_traced(out):
            return self.is_light
        return 8 * sum([tensors[place].nbytes for place in self.small]) <= out.numel()


#: Derivations of earlier training steps, by functions, decoders of operands, and which of their tensors are the same.
_derivations: dict[Hashable, Derivation] = {}
_MOST_DERIVATIONS = 4096
_CONSTANTS = (
    *(bool, int, float, str, type, torch.dtype, torch.device, torch.memory_format, TreeSpec),
    *(type(torch.ops.aten.relu.default), BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType),
)


class DerivationRule(NamedTuple):
    """The function by which a tensor derives from others, and the properties of that function.

    It is curved if it is not linear in each operand, pointwise if an element of the result depends on the elements at
    its place alone, and jointly linear if it is linear in all operands together: others are curved where two operands
    read the same packed tensor, since they multiply its errors with each other. It ``adds`` if it adds or subtracts its
    operands, element by element. The result may depend on ``most_packed`` packed tensors of several operands.
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
    """Return the tensors of all operands, and how a result of these sizes derives from them."""
    tensors: tuple[Tensor, ...] = ()
    decoders: tuple[Decoder, ...] = ()
    for kept, decoder in operands:
        tensors += kept
        decoders += (decoder,)
    numbers = tuple(map(id, tensors))
    first = dict(zip(reversed(numbers), range(len(numbers) - 1, -1, -1), strict=True))
    key = (rule, like.shape, like.stride(), like.dtype, *map(id, decoders), *map(first.__getitem__, numbers))
    try:
        return tensors, _derivations[key]  # which holds the decoders: no other object has the identity of one
    except KeyError:
        lasts = all(decoder.lasts for decoder in decoders) and _is_constant(rule.function)
    except TypeError:  # symbols, and arguments of some functions, have no hash
        lasts = False
    found = _derive_anew(rule, operands, like, first, lasts=lasts)
    if lasts:
        if len(_derivations) >= _MOST_DERIVATIONS:
            _derivations.clear()
        _derivations[key] = found._replace(holds=decoders)
    return tensors, found


def _is_constant(value: Any) -> bool:
    """Whether a function and all that it holds are constants: a table must keep no tensor and no module alive."""
    pending, functions = [value], []
    while pending:
        value = pending.pop()
        if isinstance(value, tuple):
            pending += value
        elif isinstance(value, FunctionType):
            if value not in functions:  # some of torch's hold themselves
                functions.append(value)
                pending += [*(value.__defaults__ or ()), *(cell.cell_contents for cell in value.__closure__ or ())]
        elif not (value is None or isinstance(value, _CONSTANTS)):
            return False
    return True


def _derive_anew(
    rule: DerivationRule, operands: Sequence[Saved], like: Tensor, places: dict[int, int], *, lasts: bool
) -> Derivation:
    """Return how a result derives from operands whose tensors have these places."""
    found = _Expressions(rule.enters_layers)
    expressions = tuple([found.add(kept) for kept in operands])
    if len(found.packed) > max(rule.most_packed, found.most):
        return Derivation(None)
    if rule.adds and found.overlap and not _is_of_one_place(expressions) and not found.are_scaled:
        return Derivation(None)  # neighbours that cancel leave the errors of both, of the step of a far wider range
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
    """Whether an element of each expression depends on the elements at its place alone."""
    return all(isinstance(x, int) or x.only >= 0 for x in expressions)


def function_of(
    function: TensorFunction,
    operands: Sequence[Saved],
    like: Tensor,
    *,
    is_curved: bool = False,
    is_pointwise: bool = True,
) -> Saved | None:
    """Keep a function of tensors that are kept; None where it depends on too much.

    The result has the sizes, strides and dtype of ``like``. The other arguments are those of :class:`DerivationRule`.
    """
    tensors, found = derivation(DerivationRule(function, is_curved, is_pointwise), operands, like)
    return found.bind(tensors)
