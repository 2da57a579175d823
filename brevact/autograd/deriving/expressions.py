"""Calls of functions on sources' saved forms, and the expression that evaluates them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from brevact.autograd.deriving.cache import cache, decoded, place_of
from brevact.autograd.deriving.norms import NormOutput
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import AS_IT_IS, Expression, Saved, TensorFunction, with_strides
from brevact.autograd.saving.storages import Tensors
from brevact.private_names.of_torch import DisableAutocast, is_any_autocast_enabled
from brevact.quantizers import Layout, PointFunction


class Call(NamedTuple):
    """A function of other calls, or of sources by number.

    ``function`` returns a new tensor or a view; :class:`ByMask` takes a source's saved form. ``only``: the source, if
    the call is pointwise in a single source; -1 otherwise.
    """

    function: TensorFunction | ByMask
    operands: tuple[Call | int, ...]
    only: int

    @property
    def calls(self) -> int:
        return 1 + sum(operand.calls for operand in self.operands if isinstance(operand, Call))

    @property
    def multiplies(self) -> bool:
        return self.function is torch.mul or any(each.multiplies for each in self.operands if isinstance(each, Call))

    @property
    def reads(self) -> list[int]:
        """Source numbers, once per read."""
        return [n for o in self.operands for n in (o.reads if isinstance(o, Call) else (o,))]

    def __call__(self, x: Tensor) -> Tensor:
        assert not isinstance(self.function, ByMask)  # it is not a function of one element
        return self.function(*[operand(x) if isinstance(operand, Call) else x for operand in self.operands])

    @property
    def as_function(self) -> TensorFunction:
        is_plain = len(self.operands) == 1 and isinstance(self.operands[0], int)
        return self.function if is_plain and not isinstance(self.function, ByMask) else self

    def renumbered(self, numbers: Sequence[int]) -> Call:
        operands = [o.renumbered(numbers) if isinstance(o, Call) else numbers[o] for o in self.operands]
        return Call(self.function, tuple(operands), -1 if self.only < 0 else numbers[self.only])


class ByMask(NamedTuple):
    """A product with a factor and a mask, whose values are 1 and 0 or its negative slope; the mask stays packed."""

    factor: float = 1.0

    def product(self, values: Tensor, mask: Saved, *, overwrites: bool) -> Tensor:
        tensors, decoder = mask
        if decoder.layout.shape == values.shape:  # type: ignore[attr-defined]
            values = (decoder.multiply_ if overwrites else decoder.multiply)(tensors, values)  # type: ignore[attr-defined]
        else:
            values = values * decoder.decode(tensors)
        return values if self.factor == 1.0 else values.mul_(self.factor)


@dataclass(eq=False, slots=True)
class Derived(Expression):
    """Decoder of a call's result.

    ``stride``: None for an expanded tensor, whose distinct elements may have any layout. ``is_curved``: the call is not
    linear. ``is_constant``: the call holds constants only, so the next training step derives the tensor by this object.
    It reads the operands' tensors at ``picks``; those at ``small`` are saved unpacked. ``is_light``: the decoded packed
    sources are no larger than a few results.
    """

    call: Call
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    is_curved: bool = False
    is_constant: bool = False
    picks: tuple[int, ...] = ()
    small: tuple[int, ...] = ()
    is_light: bool = True

    #: The call as a function of its one source, if it is pointwise and the source decodes through it.
    function: PointFunction | None = field(init=False)
    #: Sources that the call reads more than once, and those that recompute layers.
    repeated: frozenset[int] = field(init=False)
    deep: frozenset[int] = field(init=False)
    how: str = field(init=False)
    allows_double_backward: bool = field(init=False)

    def __post_init__(self) -> None:
        Expression.__post_init__(self)
        self.lasts = self.lasts and self.is_constant
        if self.is_curved and not self.quality.is_exact:
            self.quality = self.quality._replace(is_curved=True)
        is_fused = self.call.only >= 0 and self.sources[0][0].decodes_through
        self.function = self.call.as_function if is_fused else None
        self.repeated = frozenset(number for number, count in Counter(self.call.reads).items() if count > 1)
        self.deep = frozenset(number for number, (decoder, _) in enumerate(self.sources) if decoder.depth)
        self.allows_double_backward = all([decoder.allows_double_backward for decoder, _ in self.sources])
        self.how = storage_report.EXACT if self.quality.is_exact else storage_report.DERIVED

    def bind(self, tensors: Tensors) -> Saved:
        """Return the saved form from the operands' tensors."""
        return tuple(map(tensors.__getitem__, self.picks)), self

    @property
    def multiplies(self) -> bool:
        """Whether rounded factors are multiplied with each other."""
        if not self.call.multiplies:
            return False
        return sum(not self.sources[number][0].quality.is_exact for number in self.call.reads) > 1

    @property
    def scales(self) -> bool:
        """Whether it is a rounded factor times another one, or over a divisor."""
        function = self.call.function
        return function is torch.mul or getattr(function, "__name__", None) in DIVISIONS

    def decode(self, tensors: Tensors) -> Tensor:
        return self._computed(tensors)

    def multiply(self, tensors: Tensors, grad: Tensor) -> Tensor:
        return self._computed(tensors, grad)

    def _evaluated(self, tensors: Tensors) -> Tensor:
        parts, early = self.parts(tensors), self.deep
        if early:
            early -= {max(early, key=lambda number: place_of(parts[number]))}
        return _evaluated(self.call, _Reading(parts, {}, self.repeated, early), is_whole=True)[0]

    def _computed(self, tensors: Tensors, grad: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled() or is_any_autocast_enabled():
            with torch.no_grad(), DisableAutocast():
                return self._computed_plainly(tensors, grad)
        return self._computed_plainly(tensors, grad)

    def _computed_plainly(self, tensors: Tensors, grad: Tensor | None) -> Tensor:
        if self.function is None:
            values = self._evaluated(tensors)
        else:
            values = self.sources[0][0].decode_through(tensors, self.function, grad)
            if grad is not None:
                return values
        values = with_strides(values if values.dtype is self.dtype else values.to(self.dtype), self.stride)
        return values if grad is None else grad * values


class _Reading(NamedTuple):
    """Sources of an expression: their saved forms, and the numbers of those read more than once.

    ``decoded`` holds decoded sources for further reads. ``early`` are recomputed outputs of blocks before the latest,
    which no reader follows at once.
    """

    parts: list[Saved]
    decoded: dict[int, Tensor]
    repeated: frozenset[int]
    early: frozenset[int]

    def decode(self, number: int, function: PointFunction | None = None) -> Tensor:
        if number in self.early:
            with cache.not_held():
                return self._replace(early=frozenset()).decode(number, function)
        tensors, decoder = self.parts[number]
        return decoder.decode(tensors) if function is None else decoder.decode_through(tensors, function)


def _evaluated(expression: Call | int, reading: _Reading, *, is_whole: bool = False) -> tuple[Tensor, bool]:
    """Return an expression's value, and whether the caller may overwrite it; ``is_whole``: not part of another one."""
    parts, decoded = reading.parts, reading.decoded
    if is_whole and (found := _in_one_pass(expression, parts, decoded)) is not None:
        return found, False
    if isinstance(expression, int):
        if expression not in decoded:
            decoded[expression] = reading.decode(expression)
        values = decoded[expression]
        if expression in reading.repeated or not _is_new(values, parts[expression]):
            return values, False
        del decoded[expression]
        return values, True
    if isinstance(expression.function, ByMask):
        operand, mask = expression.operands
        values, is_new = _evaluated(operand, reading)
        return expression.function.product(values, parts[mask], overwrites=is_new), is_new  # type: ignore[index]
    if expression.only >= 0 and parts[expression.only][1].decodes_through:
        values = reading.decode(expression.only, expression.as_function)
        return values, True
    if expression.function in _SUMS and len(expression.operands) == 2:
        # Earlier blocks' sums come first, so that no term waits for the others.
        terms = sorted(expression.operands, key=lambda operand: isinstance(operand, int))
        return _sum(*(_evaluated(operand, reading) for operand in terms))
    return expression.function(*[_evaluated(operand, reading)[0] for operand in expression.operands]), False


def _sum(first: tuple[Tensor, bool], second: tuple[Tensor, bool]) -> tuple[Tensor, bool]:
    (a, a_is_new), (b, b_is_new) = first, second
    is_alike = a.shape == b.shape and a.dtype is b.dtype and a.stride() == b.stride()
    if is_alike and (a_is_new or b_is_new):
        return (a.add_(b) if a_is_new else b.add_(a)), True
    return torch.add(a, b), True


def _in_one_pass(expression: Call | int, parts: list[Saved], decoded: dict[Any, Tensor]) -> Tensor | None:
    """Decode a norm's output, plus a source (then ``decoded``), or either times a mask; None if not in one pass."""
    if isinstance(expression, int):
        return None
    total: Any = expression
    mask = None
    if isinstance(expression.function, ByMask):
        total, mask = expression.operands
        if expression.function.factor != 1.0:
            return None
    elif expression.function not in _SUMS:
        return None
    operands = [total] if isinstance(total, int) else total.operands if total.function in _SUMS else ()
    if not operands or not all([isinstance(operand, int) for operand in operands]):
        return None
    *others, last = sorted(operands, key=lambda number: _is_output(parts[number]))
    tensors, decoder = cast("tuple[Tensors, Any]", parts[last])
    if not _is_output(parts[last]) or not decoder.is_affine or decoder.is_read_again(tensors) or last in others:
        return None
    bits = None
    if mask is not None:
        layout = Layout.of_sizes(decoder.shape, decoder.of_input.spec.layout.result_stride, decoder.dtype)
        packed, of_mask = cast("tuple[Tensors, Any]", parts[cast("int", mask)])
        bits = of_mask.bits(packed, layout)
        if bits is None:
            return None
    if not others:
        return decoder.decode_in_one_pass(tensors, None, bits, overwrites=False)
    if decoder.dtype is not torch.float32:
        return None
    addend = decoded[others[0]] = parts[others[0]][1].decode(parts[others[0]][0])
    if addend.shape != decoder.shape:
        return None
    is_new = _is_new(addend, parts[others[0]])
    return decoder.decode_in_one_pass(tensors, addend, bits, overwrites=is_new)


def _is_output(source: Saved) -> bool:
    return isinstance(source[1], NormOutput)


#: Names of functions that divide.
DIVISIONS = frozenset(("div", "divide", "true_divide", "__truediv__"))
_SUMS = torch.add, Tensor.add, Tensor.__add__


def _is_new(values: Tensor, source: Saved) -> bool:
    tensors, decoder = source
    if decoder.is_read_again(tensors):
        return False
    if values.is_contiguous():
        return True
    layout = Layout.of(values)
    return layout.is_dense and layout.numel == values.numel()


class Restrided(NamedTuple):
    """Makes a view of a tensor that is first brought to the strides ``whole``, whatever strides it has."""

    whole: tuple[int, ...] | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def __call__(self, x: Tensor) -> Tensor:
        return with_strides(x, self.whole).as_strided(self.shape, self.stride, self.offset)


class _OfWeight(Derived):
    """Decoder of a recomputed weight; many may read it: a recurrent layer at each time step."""

    __slots__ = ()

    def decode(self, tensors: Tensors) -> Tensor:
        return decoded(self, tensors, self._computed) if type(tensors[0]) is Tensor else self._computed(tensors)


def of_weight(compute: TensorFunction, tensors: Tensors, out: Tensor) -> Saved:
    """Return the saved form of a function of a weight and of further unpacked tensors."""
    call = Call(compute, tuple(range(len(tensors))), -1)
    return tensors, _OfWeight(((AS_IT_IS, 1),) * len(tensors), call, tuple(out.shape), out.stride(), out.dtype)
