"""Save one bit per integer of a fake quantizer, until another op saves the integers.

With stored residuals, a scale's gradient depends on an element's integer only if it was clipped, to the lowest or
highest integer (``integer_ops.fake_quantize_backward``): the code's first bit shows which. In a ReLU's output, zeroed
elements count as clipped, and have the zero point's integer, anywhere in the range: there the bit shows whether the
code is the last one. If an op saves the quantizer's output, as codes, the quantizer saves these instead of the bits.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.autograd import storage_report
from brevact.autograd.decoders import AS_IT_IS, SavedByHook
from brevact.autograd.saved import Decoder

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
    """Return the mask of the first bit of each code in a byte."""
    return 255 // (2**bit_width - 1) << (bit_width - 1)


@functools.lru_cache(maxsize=64)
def _shifts(bit_width: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(bit_width, dtype=torch.uint8, device="cpu")[:, None].to(device)


@dataclass(frozen=True, eq=False, slots=True)
class _Codes(Decoder):
    """Decoder of packed codes from one bit each: only clipped elements' codes are right."""

    bit_width: int
    nbytes: int
    floor: Tensor | None = None

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return packed codes: all ones where the first bit is set, ``floor`` or zeros elsewhere."""
        bit_width, (bits,) = self.bit_width, tensors
        rows = bits.bitwise_left_shift(_shifts(bit_width, bits.device)).bitwise_and_(_mask_of(bit_width))
        ends = rows.bitwise_right_shift_(bit_width - 1).mul_(2**bit_width - 1).view(-1)
        return ends if self.floor is None else ends | (self.floor.to(torch.uint8) * (255 // (2**bit_width - 1)))

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return storage_report.EXACT, self.nbytes


def keep_ends(
    codes: Tensor, bit_width: int, nbytes: int, outer: tuple[Callable, Callable] | None, floor: Tensor | None = None
) -> Tensor:
    """Save the first bits of packed codes until another op saves the codes; return the token for autograd to save.

    ``nbytes``: of the quantizer's output. ``floor``: lowest code, 0-d, of elements that a ReLU zeroed; None for 0.
    """
    stored, decoder = SavedByHook(), _Codes(bit_width, nbytes, floor)
    kept = ((first_bits if floor is None else bits_of_last)(codes, bit_width),), decoder
    if storage_report.recorders:
        storage_report.report_saved(kept, "")
    stored.fill(kept, outer)
    codes.untyped_storage().__dict__[_OFFERED] = weakref.ref(stored), outer
    token = codes.new_empty(0)
    token.untyped_storage().__dict__[_HOLDER] = stored
    return token


def load_ends(token: Tensor) -> Tensor:
    """Return packed codes that are right for clipped elements."""
    stored: SavedByHook = token.untyped_storage().__dict__[_HOLDER]
    return stored.tensor()


def share_codes(tensors: tuple[Tensor, ...]) -> None:
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
