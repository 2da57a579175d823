"""An activation's saved form: tensors for autograd to save, and the decoder that reads them in backward.

The decoder is a small object without tensors, so that every tensor goes through ``ctx.save_for_backward``: a node then
frees its tensors as soon as it has run, and hooks around the region (``save_on_cpu``, checkpoint) see them. Each form
has a decoder: unpacked, packed, as a mask, in full precision until backward starts. Pack hooks return a
:class:`SavedByHook` to autograd.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.region.settings import BackwardSettings, bits_of, nominal_quantizer
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.storages import Tensors, bytes_of, versions_of
from brevact.private_names.of_torch import current_graph_task
from brevact.quantizers import (
    Layout,
    PackedActivation,
    PackedSpec,
    PointFunction,
    decode_through,
    mask_multiply,
    quantize,
    unpack_codes,
    unpack_mask,
)
from brevact.quantizers.normalizing import has_uniform_codes
from brevact.quantizers.traits import traits_of

if TYPE_CHECKING:
    from brevact.autograd.region.regions import Region  # which imports the handlers that it calls
else:
    Region = Any


class Quality(NamedTuple):
    """Accuracy of a derived tensor: that of its worst source.

    ``quantizer`` is the packed source's, or None if all sources are lossless. ``is_curved``: a nonlinear function of a
    packed source lies on the way. ``cost`` is in multiplications and additions per output element of the most
    expensive layer that is recomputed on the way; 0 if there is none.
    """

    quantizer: Any = None
    is_curved: bool = False
    cost: int = 0

    @property
    def is_exact(self) -> bool:
        return self.quantizer is None

    def is_enough_for(self, settings: BackwardSettings, *, is_nonlinear: bool = False) -> bool:
        """Return whether a reader can use the tensor in place of a packed one."""
        if self.cost > settings.recompute:
            return False
        if self.quantizer is None:
            return True
        reader, is_curved = settings.quantizer, is_nonlinear or self.is_curved
        if self.quantizer is reader:  # of most chains
            return settings.derives and (not is_curved or settings.derives_curved)
        if not settings.derives or (is_curved and bits_of(self.quantizer) < settings.derive_min_bits):
            return False
        if nominal_quantizer(self.quantizer) == nominal_quantizer(reader):
            return True
        is_fine = bits_of(self.quantizer) >= bits_of(reader) > 0
        return is_fine and (bool(self.quantizer.is_stochastic) or not reader.is_stochastic)

    def with_other(self, other: Quality) -> Quality:
        is_curved, cost = self.is_curved or other.is_curved, max(self.cost, other.cost)
        if self.quantizer is None or other.quantizer is None:
            return Quality(self.quantizer or other.quantizer, is_curved, cost)
        coarser = min(self.quantizer, other.quantizer, key=lambda q: (bits_of(q), not q.is_stochastic))
        return Quality(coarser, is_curved, cost)


def quality_of(quantizer: Any) -> Quality:
    """Return the quality of a tensor that a quantizer packs; stretched levels are a nonlinear function of codes."""
    return Quality(quantizer, traits_of(quantizer).is_stretched)


#: Quality of a tensor that is saved losslessly.
EXACT = Quality()


NO_DOUBLE_BACKWARD = (
    "double backward (create_graph=True) through an op with backward-quantized activations needs a setting, "
    "double_backward=True: brevact.quantize_backward(model, double_backward=True), "
    "brevact.backward_quant(double_backward=True), StochBackward4bit.let(double_backward=True), "
    "brevact.fit(model, batches, loss, ..., double_backward=True). Or run the part of the model that needs second "
    "derivatives at full precision (a policy rule with None, brevact.restore_backward(model), or outside "
    "brevact.backward_quant)"
)


class Decoder:
    """Decodes saved tensors to an activation. Base class, whose defaults describe a lossless decoder."""

    __slots__ = ()

    #: The decoded tensor's quality, for ops that derive other tensors from it.
    quality: Quality = EXACT
    #: Whether the next training step finds this same object, so that tables may be keyed by it.
    lasts: bool = False
    #: Whether the decoded tensor has a graph, or needs none, so that a second derivative is torch's.
    allows_double_backward: bool = False
    #: Number of layers that are recomputed, one after the other, to decode the tensor.
    depth: int = 0
    #: Number of a norm's statistics at the end of the saved tensors.
    statistics: int = 0
    #: Whether :meth:`decode_through` applies the function while it decodes.
    decodes_through: bool = False
    #: How the activation is saved, for a report.
    how = storage_report.EXACT

    @property
    def nbytes(self) -> int:
        found: int = math.prod(self.shape) * self.dtype.itemsize  # type: ignore[attr-defined]
        return found

    def input_of(self, tensors: Tensors) -> Saved | None:
        """Return the saved form of a recomputed layer's or norm's input; None for other decoders."""
        return None

    def decode(self, tensors: Tensors) -> Tensor:
        raise NotImplementedError

    def decode_as(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        """Return the activation in the type that its reader computes in, such as autocast's."""
        return self.decode(tensors).to(dtype)

    def multiply(self, tensors: Tensors, grad: Tensor) -> Tensor:
        return grad * self.decode(tensors)

    def decode_through(self, tensors: Tensors, function: PointFunction, grad: Tensor | None = None) -> Tensor:
        values = function(self.decode(tensors))
        return values if grad is None else grad * values

    def is_read_again(self, tensors: Tensors) -> bool:
        """Return whether :meth:`decode` may return memory that others read."""
        return True

    def described(self, tensors: Tensors) -> tuple[str, int]:
        return self.how, self.nbytes


#: A function of tensors; mypy takes no NamedTuple with ``__call__`` for a ``Callable``.
TensorFunction = Any


#: The saved form of a tensor: tensors for autograd to save, and the decoder that reads them.
Saved = tuple[Tensors, Decoder]


@dataclass(eq=False, slots=True)
class Expression(Decoder):
    """Decoder of a function of saved tensors: of other functions' results, views, layers' outputs and norms' outputs.

    Its tensors are ``leading`` ones of its own, those of its sources, and others of its own. ``sources``: decoders and
    numbers of tensors.
    """

    sources: tuple[tuple[Decoder, int], ...]
    quality: Quality = field(init=False)
    lasts: bool = field(init=False)
    depth: int = field(init=False)
    leading = 0

    def __post_init__(self) -> None:
        (first, _), *others = self.sources
        self.quality, self.lasts, self.depth = first.quality, first.lasts, first.depth
        for decoder, _ in others:
            self.quality = self.quality.with_other(decoder.quality)
            self.lasts, self.depth = self.lasts and decoder.lasts, max(self.depth, decoder.depth)

    def parts(self, tensors: Tensors) -> list[Saved]:
        """Return the sources' saved forms."""
        parts, start = [], self.leading
        for decoder, count in self.sources:
            parts.append((tensors[start : start + count], decoder))
            start += count
        return parts

    def others(self, tensors: Tensors) -> Tensors:
        """Return the expression's own tensors after those of its sources."""
        return tensors[self.leading + sum([count for _, count in self.sources]) :]


@dataclass(eq=False, slots=True)
class OfOne(Expression):
    """Base of expressions of one source that compute next to nothing."""

    @property
    def allows_double_backward(self) -> bool:  # type: ignore[override]
        return self.sources[0][0].allows_double_backward

    def source(self, tensors: Tensors) -> Saved:
        decoder, count = self.sources[0]
        return tensors[:count], decoder

    def is_read_again(self, tensors: Tensors) -> bool:
        kept, decoder = self.source(tensors)
        return decoder.is_read_again(kept)

    def described(self, tensors: Tensors) -> tuple[str, int]:
        kept, decoder = self.source(tensors)
        return decoder.described(kept)


#: Makes a function return the same object for equal arguments, so that a training step reuses the last one's. Equal
#: arguments have the same types: two kinds of NamedTuple with the same items differ.
one_object_each = functools.lru_cache(maxsize=4096, typed=True)


_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_dynamo_compiling
#: Elements of a packed tensor up to which looking a function up takes longer than running it.
_FEW_ELEMENTS = 1 << 15


class _AsItIs(Decoder):
    __slots__ = ()
    allows_double_backward = lasts = True

    def decode(self, tensors: Tensors) -> Tensor:
        return tensors[0]

    def described(self, tensors: Tensors) -> tuple[str, int]:
        return storage_report.FULL_PRECISION, bytes_of(tensors[0])


class _Packed(Decoder):
    __slots__ = ("_spec", "quality")
    quality: Quality
    lasts = decodes_through = True

    def __init__(self, spec: PackedSpec) -> None:
        self._spec, self.quality = spec, quality_of(spec.quantizer)

    def decode(self, tensors: Tensors) -> Tensor:
        spec, buffer = self._spec, tensors[0]
        layout = spec.layout
        fits = buffer.dtype is torch.uint8 and buffer.shape == spec.shape and buffer.is_contiguous()
        if not (fits and layout.is_result_dense):
            return PackedActivation(spec, buffer).dequantize()
        stride, device = layout.result_stride, buffer.device
        target = torch.empty_strided(layout.shape, stride, dtype=layout.dtype, device=device)
        spec.quantizer.decode(buffer, spec, target)
        return target

    def decode_as(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        """Decode float32 to bfloat16 in one pass; a number beyond its range is the largest, and not infinite."""
        spec, layout = self._spec, self._spec.layout
        is_narrower = dtype is torch.bfloat16 and layout.dtype is torch.float32
        if not (is_narrower and layout.is_result_dense and has_uniform_codes(spec.quantizer)):
            found = self.decode(tensors)
            return found if found.dtype is dtype else found.to(dtype)
        target = Layout.of_sizes(layout.shape, layout.stride, dtype).empty(tensors[0].device)
        spec.quantizer.decode(tensors[0], spec, target)
        return target

    def is_read_again(self, tensors: Tensors) -> bool:
        return False

    def multiply(self, tensors: Tensors, grad: Tensor) -> Tensor:
        return PackedActivation(self._spec, tensors[0]).dequantize_multiply(grad)

    def decode_through(self, tensors: Tensors, function: PointFunction, grad: Tensor | None = None) -> Tensor:
        layout = self._spec.layout
        if layout.numel <= _FEW_ELEMENTS:
            return Decoder.decode_through(self, tensors, function, grad)
        packed = PackedActivation(self._spec, tensors[0])
        return decode_through(packed, function, None, None, layout.dtype, grad)

    def described(self, tensors: Tensors) -> tuple[str, int]:
        return storage_report.PACKED, _bytes_of(self._spec.layout)


@dataclass(frozen=True, slots=True)
class PackedOnBackward(Decoder):
    quantizer: Any
    seed: int | None

    @property
    def quality(self) -> Quality:  # type: ignore[override]
        return quality_of(self.quantizer)

    def _pack(self, tensors: Tensors) -> PackedActivation:
        seed = tensors[1] if self.seed is None else self.seed
        return quantize(self.quantizer, without_gaps(tensors[0]), seed)

    def decode(self, tensors: Tensors) -> Tensor:
        return self._pack(tensors).dequantize()

    def multiply(self, tensors: Tensors, grad: Tensor) -> Tensor:
        return self._pack(tensors).dequantize_multiply(grad)

    def described(self, tensors: Tensors) -> tuple[str, int]:
        return storage_report.FULL_PRECISION, tensors[0].numel() * tensors[0].itemsize


@dataclass(frozen=True, slots=True)
class _Mask(Decoder):
    layout: Layout
    negative_slope: float
    lasts = True

    def decode(self, tensors: Tensors) -> Tensor:
        return unpack_mask(tensors[0], self.layout)

    def multiply(self, tensors: Tensors, grad: Tensor) -> Tensor:
        return mask_multiply(tensors[0], self.layout, grad, self.negative_slope)

    def bits(self, tensors: Tensors, layout: Layout) -> Tensor | None:
        """Return the mask, packed in this layout's memory order; None for another order or a negative slope."""
        is_same = self.layout.shape == layout.shape and self.layout.dims == layout.dims and layout.is_dense
        return tensors[0] if is_same and self.negative_slope == 0.0 else None

    def multiply_(self, tensors: Tensors, values: Tensor) -> Tensor:
        """Multiply in place: a fraction of the time on a CPU, and no memory."""
        return mask_multiply(tensors[0], self.layout, values, self.negative_slope, overwrites=True)

    def described(self, tensors: Tensors) -> tuple[str, int]:
        return storage_report.MASKED, _bytes_of(self.layout)


def _bytes_of(layout: Layout) -> int:
    return math.prod(layout.shape) * layout.dtype.itemsize


def without_gaps(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if its strides leave gaps; expanded dimensions stay expanded."""
    is_dense = x.is_contiguous() or Layout.of(x).is_dense
    return x if is_dense else distinct_elements(x).contiguous().expand(x.shape)


def distinct_elements(x: Tensor) -> Tensor:
    """Return ``x`` with each expanded dimension narrowed to size 1; an empty tensor is unchanged."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.numel():
            x = x.narrow(dim, 0, 1)
    return x


def pairs_of(x: Tensor) -> Tensor:
    """Return a complex tensor's real and imaginary parts as pairs, for a lazy conjugate those of the stored tensor."""
    x = x.detach().resolve_neg()
    return torch.view_as_real(x.conj() if x.is_conj() else x)


def complex_of(pairs: Tensor, is_conjugate: bool) -> Tensor:
    x = torch.view_as_complex(pairs)
    return x.conj() if is_conjugate else x


@dataclass(frozen=True, slots=True)
class _Places(Decoder):
    dtype: torch.dtype
    shape: torch.Size
    bit_width: int = 0
    """Bits of a code; 0 if codes are integers of a smaller type."""
    lasts = allows_double_backward = True

    def decode(self, tensors: Tensors) -> Tensor:
        codes = tensors[0]
        if self.bit_width:
            codes = unpack_codes(codes, self.bit_width, self.shape.numel()).view(self.shape)
        return codes.to(self.dtype).expand(self.shape)


@dataclass(frozen=True, slots=True)
class Blank(Decoder):
    """Decoder of a tensor of which the sizes alone are read: any memory of these sizes."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    allows_double_backward = True

    def decode(self, tensors: Tensors) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(eq=False, slots=True)
class Mapped(OfOne):
    """Decoder of a function of a source, and of the expression's own tensors."""

    function: TensorFunction

    def decode(self, tensors: Tensors) -> Tensor:
        kept, decoder = self.source(tensors)
        found: Tensor = self.function(decoder.decode(kept), *tensors[len(kept) :])
        return found


@dataclass(eq=False, slots=True)
class View(OfOne):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: Any  # int; torch types it as a symbol, too

    def decode(self, tensors: Tensors) -> Tensor:
        return self.sources[0][0].decode(tensors).as_strided(self.shape, self.stride, self.offset)


@dataclass(eq=False, slots=True)
class Own(OfOne):
    """Decodes a tensor into memory that its reader alone uses."""

    def decode(self, tensors: Tensors) -> Tensor:
        found = self.sources[0][0].decode(tensors)
        return found.clone() if self.is_read_again(tensors) else found


AS_IT_IS = _AsItIs()
decoder_of_packed, decoder_of_mask = one_object_each(_Packed), one_object_each(_Mask)
decoder_of_places = one_object_each(_Places)


def express(
    kind: type[Expression], sources: Sequence[Saved], *options: Any, leading: Tensors = (), others: Tensors = ()
) -> Saved:
    """Return the saved form of an expression of this kind, with own tensors before and after those of its sources."""
    of, lasts, tensors = [], True, leading
    for kept, decoder in sources:
        of.append((decoder, len(kept)))
        lasts, tensors = lasts and decoder.lasts, tensors + kept
    return tensors + others, (_one_of_each if lasts else _new)(kind, tuple(of), *options)  # type: ignore[arg-type]


def _new(kind: type[Expression], *arguments: Any) -> Expression:
    return kind(*arguments)


_one_of_each = one_object_each(_new)


def mapped(kept: Saved, function: TensorFunction, *others: Tensor) -> Saved:
    """Return the saved form of a function, which does not change dtype or bytes, of a saved tensor and of others."""
    return express(Mapped, (kept,), function, others=others)


def view_of(base: Saved, x: Tensor, offset: int | torch.SymInt) -> Saved:
    return express(View, (base,), tuple(x.shape), x.stride(), offset)


class SavedByHook:
    """Result of a pack hook; without hooks around the region, (tensor, version) replaces it for unpacked tensors."""

    __slots__ = ("__weakref__", "decoder", "handles", "unpack", "versions")

    def fill(self, kept: Saved, outer: tuple[Callable, Callable] | None) -> None:
        tensors, self.decoder = kept
        if outer is None:
            self.handles, self.unpack = tensors, None
            self.versions = versions_of(tensors)
        else:
            pack, self.unpack = outer
            self.handles = tuple(pack(x) for x in tensors)

    def tensors(self) -> Tensors:
        if self.unpack is not None:
            return tuple(self.unpack(handle) for handle in self.handles)
        for x, version in zip(self.handles, self.versions, strict=True):
            if version >= 0 and x._version != version:
                _refuse(x, version)
        return self.handles


def _refuse(x: Tensor, version: int) -> None:
    """Raise for a tensor saved at ``version``, unless compiled autograd traces it, where versions differ."""
    if not _is_compiling():
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tuple(x.shape)} tensor is at version {x._version}; expected version {version} instead. Make the "
            "in-place operation out-of-place, or copy the tensor first"
        )


def unpack(stored: SavedByHook | tuple[Tensor, int]) -> Tensor:
    if isinstance(stored, tuple):
        x, version = stored
        if x._version != version:
            _refuse(x, version)
        return x
    if _is_grad_enabled() and not stored.decoder.allows_double_backward and current_graph_task() != -1:
        raise RuntimeError(NO_DOUBLE_BACKWARD)
    return stored.decoder.decode(stored.tensors())


Strides = tuple[int, ...]
Weight = Tensor | None  # or a bias; None without one


def lay_out(x: Tensor, grad: Tensor, stride: Strides, *, saved_first: bool = False) -> Tensor:
    """Return ``x``, an elementwise function of ``grad`` and a saved tensor, with the strides that torch gives it.

    Torch orders a result's dimensions by its first operand's strides, and by the next one's on a tie. The first one is
    the gradient, or (``saved_first``) the saved tensor, with strides ``stride``.
    """
    other = grad.stride()
    if other == stride == x.stride() and 0 not in stride:
        return x
    return with_strides(x, strides_of_result(grad.shape, *((stride, other) if saved_first else (other, stride))))


def with_strides(x: Tensor, stride: Strides | None) -> Tensor:
    if stride is None or x.stride() == stride:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


@functools.lru_cache(maxsize=4096)
def strides_of_result(shape: tuple[int, ...], *strides: Strides) -> Strides:
    """Return the strides, in elements, that an elementwise torch op gives its result, from its operands' strides.

    >>> strides_of_result((2, 3), (1, 2), (3, 1))
    (1, 2)
    >>> strides_of_result((2, 3), (0, 1), (1, 2))
    (1, 2)
    """
    operands = [torch.empty_strided(shape, stride, device="meta") for stride in strides]
    result: Tensor = functools.reduce(torch.add, operands) if len(operands) > 1 else operands[0].neg()
    return result.stride()
