"""Tensors that are functions of what is stored already: they are kept as that function, at no byte of their own.

Behind a norm, x^ is packed once. Its output y = gamma x^ + beta, an activation act(y), its derivative act'(y) and the
product of act(y) with a small gate follow from it, and so does what views, pads or concatenates them. The table of
known values (``known_values``) holds such a tensor as an expression over sources: packed tensors, masks, and small
tensors and weights as they are. An op that keeps a derived tensor for backward keeps its sources.

Linear functions of stochastically rounded values are unbiased at any width. Curved ones are not,
E[f(x~)] = f(x) + f''(x) Var[x~] / 2 + ..., so that they are derived from sources of enough bits alone
(``derive_min_bits``). A residual sum reads two packed tensors; one of more is stored once, and a new chain begins
behind it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd import storage_report
from brevact.autograd.keeper import Keeper
from brevact.autograd.known_values import View
from brevact.autograd.normalizing import Normalizer, output_of
from brevact.autograd.quality import EXACT, Quality
from brevact.autograd.saved import Decoder, Saved
from brevact.autograd.settings import BackwardSettings, SaveMode, bits_of, seen_as, with_bit_width
from brevact.autograd.store import AS_IT_IS, reported
from brevact.private_names.of_torch import TreeSpec, is_any_autocast_enabled, tree_flatten, tree_unflatten
from brevact.quantizers import Layout, SampleQuantizer, UniformQuantizer, is_traced

#: Calls in an expression: what decodes costs no more than a few passes.
MOST_CALLS = 24
#: Elements that are decoded for one of a result: for the mean of many, and for the maximum, a code costs less.
MOST_DECODED = 4
#: Packed tensors that one is put together of.
MOST_MOVED = 4
#: Packed tensors of which a sum or a product is derived; the sum of more is stored, and a new chain begins with it.
MOST_COMBINED = 2
_DIVISIONS = frozenset(("div", "divide", "true_divide", "__truediv__"))
_INVERSIONS = frozenset((Tensor.__rtruediv__, Tensor.__rdiv__))  # one function
#: Bits beyond ``derive_min_bits`` of the input of a smooth function that is not the output of a norm.
MORE_BITS = 2
#: Elements of a result for each element of a factor that is kept as it is beside it: half a bit an element.
ELEMENTS_OF_SMALL = 64


class Call(NamedTuple):
    """An expression: a function of other expressions; an integer names a source.

    Args:
        function: takes tensors and returns a new one, or a view of one; :class:`ByMask` takes a source as it is kept.
        operands: what it takes.
        only: the one source of an expression that is pointwise from there on; -1 for others.
    """

    function: Callable[..., Tensor]
    operands: tuple[Call | int, ...]
    only: int

    @property
    def calls(self) -> int:
        """Number of calls in the expression."""
        return 1 + sum(operand.calls for operand in self.operands if isinstance(operand, Call))

    def of(self, x: Tensor) -> Tensor:
        """Return the value of a pointwise expression of one source, x."""
        return self.function(*(operand.of(x) if isinstance(operand, Call) else x for operand in self.operands))

    def renumbered(self, numbers: Sequence[int]) -> Call:
        """Return the expression for sources that have other numbers."""
        operands = [o.renumbered(numbers) if isinstance(o, Call) else numbers[o] for o in self.operands]
        return Call(self.function, tuple(operands), -1 if self.only < 0 else numbers[self.only])


class _Composed(NamedTuple):
    """A pointwise expression of one source, as a function of one number."""

    expression: Call

    def __call__(self, x: Tensor) -> Tensor:
        return self.expression.of(x)


class ByMask(NamedTuple):
    """A product with a mask, or with 1 and its negative slope, and with a factor; the mask stays packed.

    Args:
        factor: the factor.
    """

    factor: float = 1.0

    def __call__(self, *operands: Any) -> Tensor:
        raise NotImplementedError("the decoder of a mask computes its products")

    def product(self, values: Tensor, mask: Saved) -> Tensor:
        """Return the product of values and a kept mask."""
        tensors, decoder = mask
        if decoder.layout.shape == values.shape:  # type: ignore[attr-defined]
            values = decoder.multiply(tensors, values)
        else:
            values = values * decoder.decode(tensors)
        return values if self.factor == 1.0 else values.mul_(self.factor)


@dataclass(frozen=True, eq=False, slots=True)
class Derived:
    """Decoder of a derived tensor; its tensors are those of its sources, one after the other.

    Args:
        expression: what gives the tensor back; an integer for the source itself.
        sources: decoders of the sources, and the number of tensors of each.
        shape: of the tensor.
        stride: of the tensor; None for one that is expanded, whose distinct elements may lie anyhow.
        dtype: of the tensor.
        quality: of the tensor.
        lasts: whether the next training step derives the tensor by the same object.
    """

    expression: Call
    sources: tuple[tuple[Decoder, int], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    quality: Quality
    lasts: bool

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return the tensor."""
        return self._computed(tensors, None)

    def multiply(self, tensors: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        """Return its product with ``grad``."""
        return self._computed(tensors, grad)

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        """Return how it is kept, for a report, and its bytes."""
        how = storage_report.EXACT if self.quality.is_exact else storage_report.DERIVED
        return how, math.prod(self.shape) * self.dtype.itemsize

    def parts(self, tensors: tuple[Tensor, ...]) -> list[Saved]:
        """Return what keeps each source."""
        parts, start = [], 0
        for decoder, count in self.sources:
            parts.append((tensors[start : start + count], decoder))
            start += count
        return parts

    def _computed(self, tensors: tuple[Tensor, ...], grad: Tensor | None) -> Tensor:
        with ExitStack() as stack:
            if torch.is_grad_enabled():
                stack.enter_context(torch.no_grad())
            if is_any_autocast_enabled():
                stack.enter_context(torch.autocast(tensors[0].device.type, enabled=False))
            parts = self.parts(tensors)
            if grad is not None:
                product = _fused(self.expression, parts, grad)
                if product is not None:
                    return product
            values = _with_strides(_value(self.expression, parts, {}).to(self.dtype), self.stride)
            return values if grad is None else grad * values


def _fused(expression: Call, parts: list[Saved], grad: Tensor | None) -> Tensor | None:
    """Value of a pointwise expression of one source, which its decoder computes on the way; None for others."""
    if expression.only < 0:
        return None
    tensors, decoder = parts[expression.only]
    decode_through = getattr(decoder, "decode_through", None)
    return None if decode_through is None else decode_through(tensors, _Composed(expression), grad)


def _value(expression: Call | int, parts: list[Saved], decoded: dict[int, Tensor]) -> Tensor:
    if isinstance(expression, int):
        if expression not in decoded:
            tensors, decoder = parts[expression]
            decoded[expression] = decoder.decode(tensors)
        return decoded[expression]
    if isinstance(expression.function, ByMask):
        values, mask = expression.operands
        return expression.function.product(_value(values, parts, decoded), parts[mask])  # type: ignore[index]
    fused = _fused(expression, parts, None)
    if fused is not None:
        return fused
    return expression.function(*(_value(operand, parts, decoded) for operand in expression.operands))


class _Restrided(NamedTuple):
    """Makes a view of a tensor of these strides, whatever those are with which it was computed."""

    whole: tuple[int, ...] | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def __call__(self, x: Tensor) -> Tensor:
        return _with_strides(x, self.whole).as_strided(self.shape, self.stride, self.offset)


def _with_strides(x: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """Return ``x`` densely in memory with these strides; None leaves it as it is."""
    if stride is None or is_traced(x) or x.stride() == stride:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


class _Expressions:
    """Operands of an expression that is built: each source once."""

    def __init__(self) -> None:
        self.sources: list[Saved] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self.quality = EXACT
        #: Whether two operands read the same packed tensor.
        self.overlap = False
        self.packed: set[int] = set()  # identities of packed tensors
        #: Packed tensors that one operand alone reads.
        self.most = 0

    def add(self, kept: Saved) -> Call | int:
        """Return the expression of one more operand."""
        tensors, decoder = kept
        if isinstance(decoder, View):
            whole = self.add((tensors, decoder.decoder))
            stride = decoder.decoder.stride if isinstance(decoder.decoder, Derived) else None
            return Call(_Restrided(stride, decoder.shape, decoder.stride, decoder.offset), (whole,), -1)
        if isinstance(decoder, Derived):
            parts = decoder.parts(tensors)
            self._meet(decoder.quality, {id(kept[0]) for kept, of in parts if not quality_of(of).is_exact})
            return decoder.expression.renumbered([self._number(part) for part in parts])
        quality = quality_of(decoder)
        self._meet(quality, set() if quality.is_exact else {id(tensors[0])})
        return self._number(kept)

    def _meet(self, quality: Quality, packed: set[int]) -> None:
        self.quality = self.quality.with_other(quality)
        self.overlap = self.overlap or bool(self.packed & packed)
        self.packed |= packed
        self.most = max(self.most, len(packed))

    def _number(self, kept: Saved) -> int:
        tensors, decoder = kept
        key = (id(decoder), *map(id, tensors))
        number = self._numbers.setdefault(key, len(self.sources))
        if number == len(self.sources):
            self.sources.append(kept)
        return number


def quality_of(decoder: Any) -> Quality:
    """Return how good a tensor is that a decoder gives back; those that say nothing give it back without a loss."""
    return getattr(decoder, "quality", EXACT)


class _Derivation(NamedTuple):
    """How a result derives from what keeps the operands of an op, whatever their values.

    Args:
        decoder: of the result; None where it depends on too much.
        picks: which of the operands' tensors the decoder reads, in its order.
        decoded_bytes: of the packed sources, once they are decoded.
        small: which of the operands' tensors are sources that are kept as they are.
        holds: what the key in the table is made of the identities of.
    """

    decoder: Derived | None
    picks: tuple[int, ...] = ()
    decoded_bytes: int = 0
    small: tuple[int, ...] = ()
    holds: tuple[Any, ...] = ()

    def is_worth_it(self, tensors: Sequence[Tensor], out: Tensor) -> bool:
        """Return whether sources are no larger than a few results, and what is kept as it is has a bit an element.

        Args:
            tensors: of the operands.
            out: the result.
        """
        if is_traced(out):
            return True
        small = sum([tensors[place].nbytes for place in self.small])
        return self.decoded_bytes <= MOST_DECODED * out.nbytes and 8 * small <= out.numel()


#: Derivations of earlier training steps, by functions, decoders of operands, and which of their tensors are the same.
_derivations: dict[Hashable, _Derivation] = {}
_MOST_DERIVATIONS = 4096


class _Way(NamedTuple):
    """What is known of the function by which a tensor derives.

    Args:
        function: takes the tensors, and returns the one that is kept.
        is_curved: whether it is not linear in each operand.
        is_pointwise: whether an element of the result depends on the elements at its place alone.
        most_packed: packed tensors of several operands that the result may depend on.
    """

    function: Callable[..., Tensor]
    is_curved: bool = False
    is_pointwise: bool = True
    most_packed: int = MOST_COMBINED


def _derivation(way: _Way, operands: Sequence[Saved], like: Tensor) -> tuple[list[Tensor], _Derivation]:
    """Return the tensors of all operands, and how a result of these sizes derives from them."""
    tensors = [x for kept, _ in operands for x in kept]
    first: dict[int, int] = {}
    places = [first.setdefault(id(x), place) for place, x in enumerate(tensors)]
    decoders = tuple([decoder for _, decoder in operands])
    for decoder in decoders:
        if not getattr(decoder, "lasts", False):
            return tensors, _derive_anew(way, operands, like, first, lasts=False)
    try:
        key = (way, Layout.of(like), *map(id, decoders), *places)
        found = _derivations.get(key)
    except TypeError:  # symbols, and arguments of some functions, have no hash
        return tensors, _derive_anew(way, operands, like, first, lasts=False)
    if found is None:
        found = _derive_anew(way, operands, like, first, lasts=True)._replace(holds=decoders)
        if len(_derivations) >= _MOST_DERIVATIONS:
            _derivations.clear()
        _derivations[key] = found
    return tensors, found


def _derive_anew(
    way: _Way, operands: Sequence[Saved], like: Tensor, places: dict[int, int], *, lasts: bool
) -> _Derivation:
    """Return how a result derives from operands whose tensors have these places."""
    found = _Expressions()
    expressions = tuple([found.add(kept) for kept in operands])
    if len(found.packed) > max(way.most_packed, found.most):
        return _Derivation(None)
    only = -1
    if way.is_pointwise and len(found.sources) == 1 and all(isinstance(x, int) or x.only >= 0 for x in expressions):
        only = 0
    expression = Call(way.function, expressions, only)
    if expression.calls > MOST_CALLS:
        return _Derivation(None)
    quality = found.quality
    if (way.is_curved or found.overlap) and not quality.is_exact:
        quality = quality._replace(is_curved=True)
    stride = None
    if not is_traced(like) and Layout.of(like).is_dense and Layout.of(like).numel == like.numel():
        stride = like.stride()
    decoded_bytes, small = 0, []
    for kept, decoder in found.sources:
        if decoder is AS_IT_IS:
            small.append(places[id(kept[0])])
        elif not quality_of(decoder).is_exact:
            decoded_bytes += decoder.described(kept)[1]
    sources = tuple((decoder, len(tensors)) for tensors, decoder in found.sources)
    decoder = Derived(expression, sources, tuple(like.shape), stride, like.dtype, quality, lasts)
    picks = tuple(places[id(x)] for kept, _ in found.sources for x in kept)
    return _Derivation(decoder, picks, decoded_bytes, tuple(small))


def function_of(
    function: Callable[..., Tensor],
    operands: Sequence[Saved],
    like: Tensor,
    *,
    is_curved: bool = False,
    is_pointwise: bool = True,
) -> Saved | None:
    """Keep a function of tensors that are kept.

    Args:
        function: takes the tensors, and returns the one that is kept.
        operands: what keeps the tensors.
        like: tensor of the sizes, strides and dtype of the result.
        is_curved: whether the function is not linear in each operand.
        is_pointwise: whether an element of the result depends on the elements at its place alone.

    Returns:
        What keeps the result; None where it depends on too much.
    """
    tensors, found = _derivation(_Way(function, is_curved, is_pointwise), operands, like)
    return None if found.decoder is None else (tuple([tensors[place] for place in found.picks]), found.decoder)


def derive_output(
    region: Keeper, norm: Normalizer, kept: Saved | None, out: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Remember that the output of a norm derives from what keeps its input, if that is packed.

    Args:
        region: the region in which it ran.
        norm: the norm.
        kept: what keeps its input, if anything does.
        out: its output.
        weight: its weight.
        bias: its bias.
    """
    known = None if kept is None or not region.settings.derives else output_of(norm.alignment, kept, out, weight, bias)
    if known is not None:
        region.register(out, known)


def derive(
    region: Keeper,
    out: Tensor,
    function: Callable[..., Tensor],
    operands: Sequence[tuple[Tensor, Saved | None]],
    *,
    is_curved: bool = False,
    is_pointwise: bool = True,
    most_packed: int = MOST_COMBINED,
    is_dirty: bool = False,
) -> None:
    """Remember what an op has returned as a function of what keeps its operands, if all of them are kept.

    Args:
        region: the region in which it ran.
        out: what it returned.
        function: computes it again, of the operands.
        operands: each with what the op keeps for it; None where it keeps nothing.
        is_curved: see :func:`function_of`.
        is_pointwise: see :func:`function_of`.
        most_packed: packed tensors of several operands that the result may depend on.
        is_dirty: whether a Function is about to mark ``out`` as changed.
    """
    if not region.settings.derives:
        return
    kept, is_known = [], False
    for x, own in operands:
        found = _kept_operand(region, x, own, out)
        if found is None:
            return
        is_known = is_known or found[1] is not AS_IT_IS
        kept.append(found)
    if is_known:
        tensors, way = _derivation(_Way(function, is_curved, is_pointwise, most_packed), kept, out)
        if way.decoder is not None and way.is_worth_it(tensors, out):
            region.register(out, (tuple([tensors[place] for place in way.picks]), way.decoder), is_dirty=is_dirty)


def _kept_operand(region: Keeper, x: Tensor, own: Saved | None, out: Tensor) -> Saved | None:
    """Return what keeps an operand: small ones as they are, weights in a copy, since both may change."""
    kept = own if own is not None and own[1] is not AS_IT_IS else region.find_kept(x)
    if kept is not None:
        return kept
    if x.numel() * ELEMENTS_OF_SMALL > out.numel():
        return None
    if own is not None and not region.is_weight(x):
        return (x.detach(),), AS_IT_IS
    return (x.detach() if is_traced(x) else x.detach().clone(),), AS_IT_IS


def keep_smooth(
    function: Callable[..., Tensor], source: Saved, like: Tensor, *, is_pointwise: bool = True
) -> Saved | None:
    """Keep a smooth function of what :func:`keep_source` keeps, the derivative say, and report it.

    Args:
        function: takes the source, and returns the tensor that is kept.
        source: what keeps the source.
        like: tensor of the sizes, strides and dtype of the result.
        is_pointwise: whether an element of the result depends on the element at its place alone.
    """
    kept = function_of(function, (source,), like, is_curved=True, is_pointwise=is_pointwise)
    return kept if kept is None else reported(kept)


def keep_source(region: Keeper, x: Tensor, *, is_overwritten: bool = False) -> Saved | None:
    """Keep the input of a smooth function, if the function and its derivative are to be derived from it.

    What is not known may have outliers, of which the step is that of all their bucket. It takes :data:`MORE_BITS` more
    than the least that derives, in place of derivative and output.

    Args:
        region: the region that runs.
        x: the input.
        is_overwritten: whether the function works in place.

    Returns:
        What keeps it; None where a region stores the derivative instead.
    """
    known = region.find_known(x)
    if known is not None:
        quality = quality_of(known[1])
        is_good = quality.is_exact or quality._replace(is_curved=True).serves(region.settings)
        return known if is_good else None
    settings = region.settings
    if not settings.derives or bits_of(settings.quantizer) < settings.derive_min_bits:
        return None
    if x.numel() < settings.min_numel or (is_overwritten and settings.save_mode is not SaveMode.SAVE_QUANTIZED):
        return None
    if bits_of(settings.quantizer) < settings.derive_min_bits + MORE_BITS:
        if not isinstance(seen_as(settings.quantizer), UniformQuantizer | SampleQuantizer):
            return None
        region = copy.copy(region)
        region.settings = _with_more_bits(settings)
    kept = region.keep(x)
    return None if kept[1] is AS_IT_IS else kept


@functools.lru_cache(maxsize=64)
def _with_more_bits(settings: BackwardSettings) -> BackwardSettings:
    width = min(8, settings.derive_min_bits + MORE_BITS)
    return dataclasses.replace(settings, quantizer=with_bit_width(settings.quantizer, width))


class _Spread(NamedTuple):
    """A call of a torch function as a function of the tensors among its arguments."""

    function: Callable[..., Tensor]
    leaves: tuple[Any, ...]
    spec: TreeSpec

    def __call__(self, *tensors: Tensor) -> Tensor:
        given = iter(tensors)
        leaves = [next(given) if leaf is Tensor else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


class Kind(Enum):
    """What is known of a function whose results are followed."""

    LINEAR = "an element is linear in those at its place of each tensor"
    AVERAGE = "an element is the mean of some"
    MOVE = "elements of the arguments, in another order"


def operands_of(region: Keeper, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Saved | None]] | None:
    """Return what keeps the arguments of a call that is to be followed; None where too little is known of them.

    Args:
        region: the region that runs.
        tensors: the arguments, before the call.
    """
    if not tensors or not region.settings.derives:
        return None
    largest = max(x.numel() for x in tensors)
    operands = []
    for x in tensors:
        kept = region.find_kept(x)
        if kept is None and x.numel() * ELEMENTS_OF_SMALL > largest:
            return None
        operands.append((x, kept))
    return operands


def follow(
    region: Keeper,
    func: Callable[..., Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Tensor,
    operands: list[tuple[Tensor, Saved | None]],
    kind: Kind,
) -> None:
    """Remember the result of a torch function as a function of what keeps its arguments.

    Args:
        region: the region that runs.
        func: the function; not one that works in place.
        args: its arguments.
        kwargs: its keyword arguments.
        out: what it has returned; what is a view of an argument is known as that.
        operands: what :func:`operands_of` returned.
        kind: what is known of the function.
    """
    if type(out) is not Tensor or not out.is_floating_point() or region.find_known(out) is not None:
        return
    if any(x.device != out.device and x.dim() for x, _ in operands):
        return  # what is moved to another device begins a chain there
    if func in _INVERSIONS or kwargs.get("rounding_mode") is not None:
        return
    if func.__name__ in _DIVISIONS and any(kept and not quality_of(kept[1]).is_exact for _, kept in operands[1:]):
        return
    leaves, spec = tree_flatten((args, kwargs))
    found = _Spread(func, tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec)
    derive(
        *(region, out, found, operands),
        is_pointwise=kind is Kind.LINEAR and all(x.shape == out.shape for x, _ in operands),
        most_packed=MOST_MOVED if kind is Kind.MOVE else MOST_COMBINED,
    )
