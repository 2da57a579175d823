"""The packed integers of forward quantizers, which decode to the quantizer's values bit for bit.

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

from brevact.autograd.deriving.cache import decoded, may_be_held
from brevact.autograd.deriving.known_values import find, register
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import AS_IT_IS, Decoder, SavedByHook, View
from brevact.autograd.saving.storages import Tensors, find_record, record_of
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
        found = None if mask else _plan_of_scales(self, scale.shape, zero_point.shape, scale.dtype, zero_point.dtype)
        if found is None:
            return self.integers(tensors) * scale
        out = self.layout.empty(packed.device)
        if found.groups > 1:
            scale, zero_point = scale.reshape(-1), zero_point.reshape(-1)
        decode_integers(packed, found, scale, zero_point, out)
        return out


@functools.lru_cache(maxsize=4096)
def _plan_of_scales(
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
        found = _codes_of(*decoder.source(tensors))
        return found and (found[0].as_strided(decoder.shape, decoder.stride, decoder.offset), found[1])
    return None


#: Widths of codes that do not cross bytes.
BIT_WIDTHS = (2, 4, 8)
#: With fewer elements the calls cost more than they save.
MIN_NUMEL = 1 << 15


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
    token = codes.new_empty(0)
    of_codes, of_token = record_of(codes), record_of(token)
    assert of_codes is not None and of_token is not None  # both are new
    of_codes.ends, of_token.holder = (weakref.ref(stored), outer), stored
    return token


def load_ends(token: Tensor) -> Tensor:
    record = find_record(token)
    assert record is not None
    stored: SavedByHook = record.holder
    return stored.decoder.decode(stored.tensors())


def share_codes(tensors: Tensors) -> None:
    """For each codes tensor that an op saves, let its quantizer save it in place of the first bits."""
    for x in tensors:
        record = find_record(x) if x.dtype is torch.uint8 else None
        if record is None or record.ends is None:
            continue
        (reference, outer), record.ends = record.ends, None
        stored: SavedByHook | None = reference()
        if stored is not None:
            if storage_report.recorders:
                storage_report.replace(stored.handles, x)
            stored.fill(((x,), AS_IT_IS), outer)
