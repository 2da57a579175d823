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

from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.call_arguments import bound_call, is_activation, tensors_of_call
from brevact.autograd.deriving import known_values
from brevact.autograd.deriving.expressions import DIVISIONS, ByMask, Call, Derived, Restrided
from brevact.autograd.deriving.norms import NormInput, output_of, recomputed_output
from brevact.autograd.saving.saved import AS_IT_IS, Decoder, Region, Saved, TensorFunction, View, Weight
from brevact.autograd.saving.storages import Tensors, storage_address
from brevact.autograd.saving.store import reported
from brevact.autograd.saving.weights import is_parameter_or_view
from brevact.private_names.of_torch import TreeSpec
from brevact.quantizers import Layout

#: Maximum packed tensors in a concatenation or another :attr:`Kind.MOVE`.
MOST_MOVED = 4
_INVERSIONS = frozenset((Tensor.__rtruediv__, Tensor.__rdiv__))  # the same function
#: Minimum result elements per element of an unpacked factor, which then takes half a bit per result element.
ELEMENTS_OF_SMALL = 64
#: Maximum calls in an expression: decoding costs no more than a few passes over memory.
MOST_CALLS = 24
#: Maximum decoded elements per result element: for means and maxima of more, a code costs less.
MOST_DECODED = 4
#: Maximum packed tensors in a derived sum or product; a sum of more is stored, and starts a new chain.
MOST_COMBINED = 2
#: The same for sums where layers are recomputed: every fourth residual block stores its sum.
MOST_ADDED_AGAIN = 4


class _Operands:
    """Operands of a call; those that read one packed tensor overlap."""

    def __init__(self) -> None:
        self.sources: list[Saved] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self.is_curved = self.overlap = False
        self._roots: set[int] = set()  # ids of packed tensors
        self.packed: set[int] = set()  # a recomputed layer counts by its token, not by its sources
        #: Maximum number of packed tensors that a single operand reads.
        self.most = 0
        #: Whether each operand is a product with an unpacked tensor.
        self.are_scaled = True

    def add(self, kept: Saved) -> Call | int:
        tensors, decoder = kept
        if isinstance(decoder, View) and decoder.sources[0][0].input_of(tensors) is None:
            whole, of = self.add(decoder.source(tensors)), decoder.sources[0][0]
            stride = of.stride if isinstance(of, Derived) else None
            return Call(Restrided(stride, decoder.shape, decoder.stride, decoder.offset), (whole,), -1)
        if isinstance(decoder, Derived):
            parts = decoder.parts(tensors)
            self._meet(kept)
            self.are_scaled = self.are_scaled and any(of is AS_IT_IS for _, of in parts)
            return decoder.call.renumbered([self._number(part) for part in parts])
        self.are_scaled = False
        self._meet(kept)
        return self._number(kept)

    def _meet(self, kept: Saved) -> None:
        self.is_curved = self.is_curved or kept[1].quality.is_curved
        roots, packed = packed_in(kept), packed_in(kept, enters_layers=False)
        self.overlap = self.overlap or bool(roots & self._roots)
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
    """Return ids of packed tensors that a saved form reads; not ``enters_layers``: a recomputed layer is one."""
    tensors, decoder = kept
    if decoder.quality.is_exact:
        return set()
    if isinstance(decoder, (Derived, View)):
        return set().union(*(packed_in(part, enters_layers=enters_layers) for part in decoder.parts(tensors)))
    input = decoder.input_of(tensors) if enters_layers else None
    return {id(tensors[0])} if input is None else packed_in(input)


#: Results derived in earlier steps, keyed by rule, the operands' decoders, and which of their tensors are equal.
_derivations: dict[Hashable, tuple[Derived | None, tuple[Decoder, ...]]] = {}
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


def derivation(rule: DerivationRule, operands: Sequence[Saved], like: Tensor) -> tuple[Tensors, Derived | None]:
    """Return the operands' tensors, and the decoder of a result with ``like``'s layout, if it derives from them."""
    tensors: Tensors = ()
    decoders: tuple[Decoder, ...] = ()
    for kept, decoder in operands:
        tensors += kept
        decoders += (decoder,)
    numbers = tuple(map(id, tensors))
    first = dict(zip(reversed(numbers), range(len(numbers) - 1, -1, -1), strict=True))
    key = (rule, like.shape, like.stride(), like.dtype, *map(id, decoders), *map(first.__getitem__, numbers))
    try:
        return tensors, _derivations[key][0]  # the entry holds the decoders, so their ids are not reused
    except KeyError:
        lasts = all(decoder.lasts for decoder in decoders) and _is_constant(rule.function)
    except TypeError:  # some functions' arguments are unhashable
        lasts = False
    found = _derive_anew(rule, operands, like, first, lasts=lasts)
    if lasts:
        if len(_derivations) >= _MOST_DERIVATIONS:
            _derivations.clear()
        _derivations[key] = found, decoders
    return tensors, found


def _is_constant(value: Any, seen: tuple[Any, ...] = ()) -> bool:
    """Whether a function holds constants only: the table must keep no tensor or module alive."""
    if isinstance(value, tuple):
        return all(_is_constant(each, seen) for each in value)
    if isinstance(value, FunctionType):
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        held = (*(value.__defaults__ or ()), *cells)
        return value in seen or _is_constant(held, (*seen, value))  # some torch functions hold themselves
    return value is None or isinstance(value, _CONSTANTS)


def _derive_anew(
    rule: DerivationRule, operands: Sequence[Saved], like: Tensor, places: dict[int, int], *, lasts: bool
) -> Derived | None:
    """Derive a result from operands, None if it depends on too many; ``places``: their tensors' positions by id."""
    found = _Operands()
    operands_of_call = tuple([found.add(kept) for kept in operands])
    if len(found.packed) > max(rule.most_packed, found.most):
        return None
    if rule.adds and found.overlap and not _is_of_one_place(operands_of_call) and not found.are_scaled:
        return None  # cancelling neighbours leave both errors, which scale with a far wider range
    is_of_one = rule.is_pointwise and len(found.sources) == 1 and _is_of_one_place(operands_of_call)
    call = Call(rule.function, operands_of_call, 0 if is_of_one else -1)
    if call.calls > MOST_CALLS:
        return None
    is_curved = found.is_curved or rule.is_curved or (found.overlap and not rule.is_jointly_linear)
    stride = None
    if Layout.of(like).is_dense and Layout.of(like).numel == like.numel():
        stride = like.stride()
    decoded_bytes, small = 0, []
    for kept, decoder in found.sources:
        if decoder is AS_IT_IS:
            small.append(places[id(kept[0])])
        elif not decoder.quality.is_exact:
            decoded_bytes += decoder.described(kept)[1]
    sources = tuple((decoder, len(kept)) for kept, decoder in found.sources)
    picks = tuple(places[id(x)] for kept, _ in found.sources for x in kept)
    is_light = decoded_bytes <= max(MOST_DECODED, rule.most_packed) * like.nbytes
    options = tuple(like.shape), stride, like.dtype, is_curved, lasts, picks, tuple(small), is_light
    return Derived(sources, call, *options)


def _is_of_one_place(operands: Sequence[Call | int]) -> bool:
    return all(isinstance(x, int) or x.only >= 0 for x in operands)


def function_of(function: TensorFunction, operands: Sequence[Saved], like: Tensor, **properties: Any) -> Saved | None:
    """Return the saved form of a function of saved tensors, laid out like ``like``; None if it depends on too many."""
    tensors, found = derivation(DerivationRule(function, **properties), operands, like)
    return None if found is None else found.bind(tensors)


def derive_output(
    region: Region, input: NormInput, kept: Saved | None, out: Tensor, weight: Weight, bias: Weight
) -> None:
    if kept is None or not region.settings.derives:
        return
    known = output_of(region, input.norm, kept, out, weight, bias)
    if known is None and region.settings.recompute:
        known = recomputed_output(region, input, kept, out, weight, bias)
    if known is not None:
        region.register(out, known, is_new=True)


def derive(
    region: Region,
    out: Tensor,
    function: TensorFunction | ByMask,
    operands: Sequence[tuple[Tensor, Saved | None]],
    *,
    is_dirty: bool = False,
    is_new: bool = False,
    are_found: bool = False,
    **properties: Any,
) -> None:
    """Record that ``out`` is a function of an op's operands, if all of them have a saved form.

    Each operand comes with the saved form that the op itself made, or None; or, if they ``are_found``, with the known
    one. ``is_dirty``: an in-place Function modified
    ``out`` and will call ``mark_dirty``. ``is_new``: ``out`` has memory of its own. ``properties`` are those of
    :class:`DerivationRule`.
    """
    if not region.settings.derives:
        return
    kept, is_known = [], False
    for x, own in operands:
        operand = own if are_found and own is not None else _kept_operand(region, x, own, out, are_found)
        if operand is None:
            return
        is_known = is_known or operand[1] is not AS_IT_IS
        kept.append(operand)
    if is_known:
        if properties.get("adds") and region.recompute:
            properties["most_packed"] = MOST_ADDED_AGAIN
        tensors, found = derivation(DerivationRule(function, **properties), kept, out)
        if found is None or not found.is_light or 8 * sum([tensors[i].nbytes for i in found.small]) > out.numel():
            return  # unpacked sources may take a bit per result element
        is_new = is_new and found.stride is not None
        region.register(out, found.bind(tensors), is_dirty=is_dirty, is_new=is_new)


def _kept_operand(region: Region, x: Tensor, own: Saved | None, out: Tensor, is_unknown: bool) -> Saved | None:
    """Return an operand's saved form; a small one is saved unpacked, a weight as a copy, since both may change."""
    kept = own
    if not is_unknown and (own is None or own[1] is AS_IT_IS):
        kept = region.find_kept(x) if x.untyped_storage().__dict__ else None
    if kept is not None:
        return kept
    if x.numel() * ELEMENTS_OF_SMALL > out.numel():
        return None
    if own is not None and not region.is_weight(x):
        return (own[0][0].detach(),), AS_IT_IS  # not a view that would hold a larger storage
    return (x.detach().clone(),), AS_IT_IS


def keep_smooth(
    function: TensorFunction, sources: Sequence[Saved], like: Tensor, *, is_pointwise: bool = True
) -> Saved | None:
    """Save and report a smooth function, such as a derivative, of a source (:func:`keep_source`) and of masks."""
    kept = function_of(function, sources, like, is_curved=True, is_pointwise=is_pointwise)
    return kept and reported(kept)


def keep_source(region: Region, x: Tensor) -> Saved | None:
    """Save a smooth function's input to derive the function and its derivative; None if the derivative is saved."""
    known, settings = region.find_known(x), region.settings
    if known is not None:
        return known if known[1].quality.is_enough_for(settings, is_nonlinear=True) else None
    if not settings.derives_curved or x.numel() < settings.min_numel:
        return None
    if settings.for_smooth is None or region.find_kept(x) is not None:
        kept = region.keep(x)
        return None if kept[1] is AS_IT_IS else kept
    kept = region.keep_by(settings.for_smooth, x)
    region.register(x, kept)
    return kept


class Kind(Enum):
    """How a tracked function's result depends on its arguments."""

    SUM = "an element is linear in those at its place of all tensors together"
    BILINEAR = "an element is linear in that at its place of each of two tensors, the other one given"
    AVERAGE = "an element is the mean of some"
    MOVE = "elements of the arguments, in another order"


def operands_of(region: Region, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Saved | None]] | None:
    """Return a call's arguments with their saved forms, before it overwrites them; None if a large one has none."""
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


def track_moved(
    func: Callable, args: tuple, kwargs: dict, tensors: list[Tensor], result: Tensor, find: Callable = known_values.find
) -> None:
    """Record that a result is a function of tensors, if ``find`` returns an exact saved form of each."""
    operands = []
    for x in tensors:
        known = find(x)
        if known is None:
            return
        operands.append(known)
    if operands and known_values.find(result) is None:
        kept = function_of(bound_call(func, args, kwargs), operands, result, is_pointwise=False)
        if kept is not None:
            known_values.register(result, *kept)


#: Functions of weights alone whose results are recomputed from the parameters: those of weight standardization, weight
#: and spectral norm, LoRA products. They save no large result, and return the same bits when called again.
_OF_WEIGHTS = frozenset(
    getattr(home, name)
    for name in (
        *"add sub mul div true_divide square sqrt mean var std norm vector_norm matmul mm bmm addmm kron".split(),
        *"__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __matmul__ __neg__ normalize".split(),
        *"reshape contiguous transpose cat stack _weight_norm _weight_norm_interface".split(),
    )
    for home in (torch, Tensor, F, torch.linalg)
    if hasattr(home, name)
)


def track_weight(
    region: Region, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    """Record that a weight is a function of parameters, and of small tensors, which are saved as copies."""
    least = region.settings.min_numel
    if not is_activation(result) or result.numel() < least or kwargs.get("out") is not None:
        return
    if func is F.batch_norm:
        is_pure = all(x is None for x in (*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")))
    else:
        is_pure = func in _OF_WEIGHTS

    def find(x: Tensor) -> Saved | None:
        if x.dtype is not result.dtype or storage_address(x) == storage_address(result):
            return None  # autocast's cast is not repeated in backward; a view of a parameter takes no bytes
        known = known_values.find(x)
        if known is None and is_parameter_or_view(x):
            return (x.detach(),), AS_IT_IS
        return ((x.detach().clone(),), AS_IT_IS) if known is None and x.numel() < least else known

    if is_pure:
        track_moved(func, args, kwargs, tensors_of_call(args, kwargs), result, find)


def track_derived(
    region: Region, func: Callable, args: tuple, kwargs: dict[str, Any], out: Tensor, operands: list, kind: Kind
) -> None:
    """Record that an out-of-place torch function's result is that function of ``operands`` (:func:`operands_of`)."""
    if not out.is_floating_point():
        return
    for x, _ in operands:
        if x.device != out.device and x.dim():
            return  # a copy on another device starts a new chain
    if func in _INVERSIONS or kwargs.get("rounding_mode") is not None or isinstance(kwargs.get("alpha"), Tensor):
        return
    if func.__name__ in DIVISIONS and any(kept and not kept[1].quality.is_exact for _, kept in operands[1:]):
        return
    is_elementwise = kind in (Kind.SUM, Kind.BILINEAR)
    if is_elementwise and "memory_format" in kwargs:  # meaningless for parts that are decoded separately
        kwargs = {**kwargs, "memory_format": torch.preserve_format}  # the result's strides are recorded separately
    derive(
        *(region, out, bound_call(func, args, kwargs), operands),
        is_pointwise=is_elementwise and all(x.shape == out.shape for x, _ in operands),
        most_packed=MOST_MOVED if kind is Kind.MOVE else MOST_COMBINED,
        is_jointly_linear=kind is not Kind.BILINEAR,
        adds=kind is Kind.SUM and len(operands) > 1,
        are_found=True,
    )
