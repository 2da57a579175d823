"""Table of tensors known by fewer bits: results of forward quantizers, and tensors derived from packed ones.

A fake quantizer's output is (q - z) * s with few-bit integers q; a fake-quantized weight is a function of the weight,
which is in memory anyway. For such a tensor the table has the saved form that decodes to its values bit-exactly (except
for the sign of a zero): any op that saves the tensor saves that form, whatever its region's quantizer. Values derived
from packed tensors (``derived``) have rounding errors: a region uses them if its own errors would be no smaller.

An entry lives as long as the tensor's own storage, which carries it; codes are a fraction of that. The table identifies
a tensor by its storage and version counter, and views of the tensor by their offset, shape and strides. The counter
misses edits through ``x.data``, NumPy, or an address, as by Triton kernels: a region that hands one out forgets the
tensor (``storages.end_known_values``).

One bit per integer of a fake quantizer is saved until another op saves the integers. With stored residuals, a scale's
gradient depends on an element's integer only if it was clipped, to the lowest or highest integer
(``integer_ops.fake_quantize_backward``): the code's first bit shows which. In a ReLU's output, zeroed elements count as
clipped, and have the zero point's integer, anywhere in the range: there the bit shows whether the code is the last one.
If an op saves the quantizer's output, as codes, the quantizer saves these instead of the bits.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from brevact.autograd import storage_report
from brevact.autograd.held_outputs import decoded, may_be_held
from brevact.autograd.saved import AS_IT_IS, Decoder, PassesOn, Quality, Saved, SavedByHook, one_object_each
from brevact.autograd.settings import BackwardSettings
from brevact.autograd.storages import Tensors, find_record, record_of, storage_address, versions_of
from brevact.geometry import IntegerPlan
from brevact.quantizers import Layout, is_on_host, pack_codes, unpack_codes
from brevact.quantizers.integer_ops import decode_integers


@dataclass(frozen=True, slots=True)
class IntegerCodes(Decoder):
    """Decoder of (q - z) * s from packed codes of q, z and s, and the positions of NaN.

    The last code is NaN if it is spare. If not, a mask of one bit per element follows if any integer is NaN; on devices
    that this check would wait for, z is NaN instead, and with it all decoded values.

    ``layout`` is that of q, with its floating-point type. Code 0 is ``minimum``. A spare code, of a narrow range,
    represents no integer.
    """

    layout: Layout
    bit_width: int
    minimum: int
    nbytes: int = field()  # otherwise the base class's value would be the default
    has_spare: bool = False

    def encode(self, q: Tensor, zero_point: Tensor, scale: Tensor) -> Tensors:
        """Return the tensors of integers without a spare code."""
        codes, offset = self.layout.flatten(q) - self.minimum, zero_point.detach().clone()
        poison = q.sum(dtype=torch.float32).mul_(0.0)
        if is_on_host(q):
            mask = (pack_codes(codes.isnan().to(torch.uint8), 1),) if poison.isnan() else ()
            if mask:  # also for infinite products of an integer and its scale
                codes = codes.nan_to_num(0, posinf=self._last, neginf=0)
            packed = pack_codes(codes.to(torch.uint8), self.bit_width)
            return packed, offset, scale.detach(), *mask
        return pack_codes(codes.to(torch.uint8), self.bit_width), offset.add_(poison), scale.detach()

    @property
    def _last(self) -> int:
        return 2**self.bit_width - 1

    def integers(self, tensors: Tensors) -> Tensor:
        """Return q - z."""
        packed, zero_point, _, *mask = tensors
        codes = unpack_codes(packed, self.bit_width, self.layout.numel)
        q = codes.to(self.layout.dtype)
        if self.minimum:
            q = q.add_(self.minimum)
        if self.has_spare:
            q.masked_fill_(codes == self._last, torch.nan)
        for missing in mask:
            q.masked_fill_(unpack_codes(missing, 1, self.layout.numel).bool(), torch.nan)
        return self.layout.restore(q) - zero_point

    def decode(self, tensors: Tensors) -> Tensor:
        is_held = may_be_held(self.layout.numel, tensors[0])
        return decoded(self, tensors, self._decode) if is_held else self._decode(tensors)

    def _decode(self, tensors: Tensors) -> Tensor:
        packed, zero_point, scale, *mask = tensors
        found = None if mask else _plan_of(self, scale.shape, zero_point.shape, scale.dtype, zero_point.dtype)
        if found is None:
            return self.integers(tensors) * scale
        out = self.layout.empty(packed.device)
        if found.groups > 1:
            scale, zero_point = scale.reshape(-1), zero_point.reshape(-1)
        decode_integers(packed, found, scale, zero_point, out)
        return out


@functools.lru_cache(maxsize=4096)
def _plan_of(
    codes: IntegerCodes,
    of_scale: torch.Size,
    of_zero_point: torch.Size,
    scale_dtype: torch.dtype,
    zero_point_dtype: torch.dtype,
) -> IntegerPlan | None:
    layout = codes.layout
    if layout.dtype is torch.float32:
        if not scale_dtype is zero_point_dtype is torch.float32:
            return None
    elif layout.dtype not in (torch.bfloat16, torch.float16):
        return None
    elif not {scale_dtype, zero_point_dtype} <= {torch.float32, layout.dtype}:
        return None
    elif (of_scale and scale_dtype is not layout.dtype) or (of_zero_point and zero_point_dtype is not layout.dtype):
        return None
    places = groups_of(layout, of_scale, of_zero_point) if layout.numel and layout.is_result_dense else None
    if places is None:
        return None
    ends = codes.bit_width, codes.minimum, codes.minimum + 2**codes.bit_width - 1 - codes.has_spare
    return IntegerPlan(layout.numel, *ends, False, False, codes.has_spare, *places)


def groups_of(layout: Layout, *numbers: torch.Size) -> tuple[int, int] | None:
    """Return how numbers (scales, zero points) of these sizes divide memory order: consecutive elements of one number,
    and numbers, which repeat; None along unequal dimensions, or such that are no neighbours in memory.
    """
    count = len(layout.shape)
    dims = {tuple(count - len(x) + i for i, size in enumerate(x) if size != 1) for x in numbers} - {()}
    if not dims:
        return layout.numel, 1
    if len(dims) > 1:
        return None
    (found,) = dims
    if not set(found) <= set(layout.dims):
        return None if len(found) > 1 else layout.groups_along(found[0])
    start = layout.dims.index(found[0])
    if tuple(layout.dims[start : start + len(found)]) != found:
        return None
    inner = math.prod(layout.shape[dim] for dim in layout.dims[start + len(found) :])
    return inner, math.prod(layout.shape[dim] for dim in found)


@dataclass(frozen=True, eq=False, slots=True)
class Recomputed(Decoder):
    """Decoder that recomputes a fake-quantized weight; many may read it: a recurrent layer at each time step."""

    compute: Callable[..., Tensor]
    nbytes: int = field()

    def decode(self, tensors: Tensors) -> Tensor:
        return decoded(self, tensors, self._decode) if type(tensors[0]) is Tensor else self._decode(tensors)

    def _decode(self, tensors: Tensors) -> Tensor:
        with torch.no_grad():
            return self.compute(*tensors)


@dataclass(frozen=True, slots=True)
class View(PassesOn):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: Any  # int; torch types it as a symbol, too

    def decode(self, tensors: Tensors) -> Tensor:
        return self.decoder.decode(tensors).as_strided(self.shape, self.stride, self.offset)


_view = one_object_each(View)

#: A tensor's version, shape, strides and dtype; its saved form's tensors, their versions, decoder, quality and scope.
_Entry = tuple[int, torch.Size, tuple[int, ...], torch.dtype, Tensors, tuple[int, ...], Decoder, Quality, Any]


def register(
    x: Tensor, tensors: Tensors, decoder: Any, *, scope: Any = None, is_dirty: bool = False, is_new: bool = False
) -> None:
    """Record the saved form of ``x``: an op that saves ``x`` saves ``tensors`` instead.

    Ignored unless ``x`` is dense and alone in its storage, as is known if it ``is_new``, and for lazy conjugates and
    negatives. ``scope``: the checkpoint that the region runs in. ``is_dirty``: an in-place Function modified ``x`` and
    will call ``mark_dirty``, which bumps its version.
    """
    if not is_new:
        if x.is_inference() or x.storage_offset() or not Layout.of(x).is_dense or x.is_neg() or x.is_conj():
            return
        storage = x.untyped_storage()
        if storage.nbytes() != x.numel() * x.itemsize:
            return  # the storage has other tensors
        address = storage._cdata
        for kept in tensors:
            if storage_address(kept) == address:
                return  # a cycle: the storage would never be freed
    record = record_of(x)
    if record is not None:
        version, stride = x._version + is_dirty, x.stride()
        record.known = version, x.shape, stride, x.dtype, tensors, versions_of(tensors), decoder, decoder.quality, scope


def find(x: Tensor, settings: BackwardSettings | None = None, scope: Any = None) -> Saved | None:
    """Return the registered saved form of ``x``, or of the tensor that it views, or None.

    None if a scale or weight that it was computed from has changed since. ``settings`` are the reading region's, whose
    own error a derived tensor's may replace; None if ``x`` must be known without a loss. A tensor derived from packed
    ones is known only in the scope (checkpoint) in which it was computed: recomputation then finds the same entries as
    the checkpoint's forward.
    """
    record = find_record(x)
    return None if record is None or record.known is None else found_in(record.known, x, settings, scope)


def found_in(entry: _Entry, x: Tensor, settings: BackwardSettings | None = None, scope: Any = None) -> Saved | None:
    if x.is_inference() or entry[0] != x._version:
        return None
    _, shape, stride, dtype, tensors, versions, decoder, quality, own_scope = entry
    if dtype is not x.dtype or x.is_neg() or x.is_conj():
        return None
    try:
        for kept, version in zip(tensors, versions, strict=True):
            if kept._version != version:
                return None
    except RuntimeError:  # inference tensors have no version counter
        if versions != versions_of(tensors):
            return None
    if quality.cost and not x.requires_grad:
        return None  # the weights of the layer that computes it may change before a detached reader runs
    if quality.quantizer is not None or quality.cost:
        if settings is None or own_scope is not scope or not quality.is_enough_for(settings):
            return None
    if shape == x.shape and stride == x.stride() and not x.storage_offset():
        return tensors, decoder
    return view_of((tensors, decoder), x, x.storage_offset())


def view_of(base: Saved, x: Tensor, offset: int | torch.SymInt) -> Saved:
    tensors, decoder = base
    return tensors, (_view if decoder.lasts else View)(decoder, tuple(x.shape), x.stride(), offset)


def track_pooled_codes(input: Tensor, index: Tensor, out: Tensor, rank: int) -> None:
    """Register the codes of picked elements; ``index`` is flat over the input's last ``rank`` dimensions."""
    known = find(input)
    found = None if known is None else _codes_of(*known)
    if known is None or found is None or len(known[0]) > 3:  # with a NaN mask, which is not picked from
        return
    (_, zero_point, scale), (codes, integers) = known[0], found
    for x in (zero_point, scale):
        if x.numel() != 1 and not (known[1] is integers and x.dim() == input.dim() and x.shape[-rank:].numel() == 1):
            return  # groups of a map have their own scales
    picked = torch.empty_like(out, dtype=torch.uint8)
    picked.copy_(codes.flatten(-rank).gather(-1, index.flatten(-rank)).view(out.shape))
    layout = Layout.of_sizes(out.shape, out.stride(), integers.layout.dtype)
    tensors = pack_codes(layout.flatten(picked), integers.bit_width), zero_point, scale
    register(out, tensors, replace(integers, layout=layout, nbytes=out.nbytes))


def _codes_of(tensors: Tensors, decoder: Any) -> tuple[Tensor, IntegerCodes] | None:
    if isinstance(decoder, IntegerCodes):
        flat = unpack_codes(tensors[0], decoder.bit_width, decoder.layout.numel)
        return decoder.layout.restore(flat), decoder
    if isinstance(decoder, View):
        found = _codes_of(tensors, decoder.decoder)
        return found and (found[0].as_strided(decoder.shape, decoder.stride, decoder.offset), found[1])
    return None


#: Widths of codes that do not cross bytes.
BIT_WIDTHS = (2, 4, 8)
#: With fewer elements the calls cost more than they save.
MIN_NUMEL = 1 << 15
#: Attribute of the codes' storage: a weak reference to the holder of their first bits, and its hooks.
_OFFERED = "_brevact_offered"
#: Attribute of the storage of the token that autograd saves: the holder.
_HOLDER = "_brevact_holder"


def first_bits(codes: Tensor, bit_width: int) -> Tensor:
    """Return the first bit of each packed code, (n / 8,) uint8 from (n * bit_width / 8,), in an order of their own."""
    rows = codes.view(bit_width, -1) & _mask_of(bit_width)
    return rows.bitwise_right_shift_(_shifts(bit_width, codes.device)).sum(0, dtype=torch.uint8)


def bits_of_last(codes: Tensor, bit_width: int) -> Tensor:
    """Return a bit per packed code, set if all of its bits are, (n / 8,) uint8 in :func:`first_bits`' order."""
    places = 1
    while places < bit_width:
        codes = codes & codes.bitwise_left_shift(places)
        places *= 2
    return first_bits(codes, bit_width)


def _mask_of(bit_width: int) -> int:
    return 255 // (2**bit_width - 1) << (bit_width - 1)


@functools.lru_cache(maxsize=64)
def _shifts(bit_width: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(bit_width, dtype=torch.uint8, device="cpu")[:, None].to(device)


@dataclass(frozen=True, eq=False, slots=True)
class _EndCodes(Decoder):
    """Decoder of packed codes from one bit each: only clipped elements' codes are right."""

    bit_width: int
    nbytes: int = field()
    floor: Tensor | None = None

    def decode(self, tensors: Tensors) -> Tensor:
        """Return packed codes: all ones where the first bit is set, ``floor`` or zeros elsewhere."""
        bit_width, (bits,) = self.bit_width, tensors
        rows = bits.bitwise_left_shift(_shifts(bit_width, bits.device)).bitwise_and_(_mask_of(bit_width))
        ends = rows.bitwise_right_shift_(bit_width - 1).mul_(2**bit_width - 1).view(-1)
        return ends if self.floor is None else ends | (self.floor.to(torch.uint8) * (255 // (2**bit_width - 1)))


def keep_ends(
    codes: Tensor, bit_width: int, nbytes: int, outer: tuple[Callable, Callable] | None, floor: Tensor | None = None
) -> Tensor:
    """Save the first bits of packed codes until another op saves the codes; return the token for autograd to save.

    ``nbytes``: of the quantizer's output. ``floor``: lowest code, 0-d, of elements that a ReLU zeroed; None for 0.
    """
    stored, decoder = SavedByHook(), _EndCodes(bit_width, nbytes, floor)
    kept = ((first_bits if floor is None else bits_of_last)(codes, bit_width),), decoder
    if storage_report.recorders:
        storage_report.report_saved(kept, "")
    stored.fill(kept, outer)
    codes.untyped_storage().__dict__[_OFFERED] = weakref.ref(stored), outer
    token = codes.new_empty(0)
    token.untyped_storage().__dict__[_HOLDER] = stored
    return token


def load_ends(token: Tensor) -> Tensor:
    stored: SavedByHook = token.untyped_storage().__dict__[_HOLDER]
    return stored.decoder.decode(stored.tensors())


def share_codes(tensors: Tensors) -> None:
    """For each codes tensor that an op saves, let its quantizer save it in place of the first bits."""
    for x in tensors:
        known = x.untyped_storage().__dict__
        entry = known.pop(_OFFERED, None) if known else None
        if entry is None:
            continue
        reference, outer = entry
        stored: SavedByHook | None = reference()
        if stored is not None:
            if storage_report.recorders:
                storage_report.replace(stored.handles, x)
            stored.fill(((x,), AS_IT_IS), outer)
