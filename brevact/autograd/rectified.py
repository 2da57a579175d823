"""Rectifiers by whose output torch takes their gradient: a mask stands for it, until another op keeps it as it is.

The gradient of a ReLU reads where its output is positive, which is one bit an element. Where the next layer keeps that
output anyway, the mask would come on top of it: it is given up for the tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.autograd import storage_report
from brevact.autograd.decoders import AS_IT_IS, SavedByHook
from brevact.autograd.saved import Decoder, Saved, one_object_each
from brevact.autograd.storages import OF_VALUES
from brevact.autograd.store import keep_mask

#: Attribute of the storage of an output that refers to the holder of its mask.
_MASKED = OF_VALUES + "mask"


@dataclass(frozen=True, slots=True)
class _Signs(Decoder):
    """Decodes a mask to one number where it is set, and to another elsewhere, in the type of the replaced tensor."""

    mask: Decoder
    dtype: torch.dtype
    inside: float = 1.0
    outside: float = 0.0

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        mask = self.mask.decode(tensors)
        if self.inside == 1.0 and self.outside == 0.0:
            return mask.to(self.dtype)
        return torch.full_like(mask, self.outside, dtype=self.dtype).masked_fill_(mask, self.inside)

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return self.mask.described(tensors)


_signs = one_object_each(_Signs)


def keep_signs(mask: Tensor, dtype: torch.dtype) -> Saved:
    """Keep of the output of a rectifier, of this type, where torch takes it for positive: a mask, or the output itself.

    That is ~(x <= 0) for a ReLU, whose gradient passes where the output is NaN.
    """
    tensors, decoder = keep_mask(mask)  # which reads a floating-point tensor so
    return tensors, _signs(decoder, dtype)


def stand_in(mask: Saved, dtype: torch.dtype, inside: float, outside: float = 0.0) -> Saved:
    """Return the saved form of a tensor of two numbers, one inside of a mask and one outside."""
    tensors, decoder = mask
    return tensors, _signs(decoder, dtype, inside, outside)


def offer_mask(out: Tensor, stored: SavedByHook) -> None:
    """Attach to an output the object that holds its mask."""
    entry = weakref.ref(stored), out._version, out.dtype, (out.shape, out.stride(), out.storage_offset())
    out.untyped_storage().__dict__[_MASKED] = entry


def give_up_mask(x: Tensor, outer: tuple[Callable, Callable] | None) -> None:
    """Let a rectifier, of whose output ``x``, or a view of it, is kept as it is, keep that as well, and no mask.

    ``outer`` are the hooks around the region.
    """
    if x.is_inference() or x.layout is not torch.strided:
        return
    known = x.untyped_storage().__dict__
    entry = known.get(_MASKED)
    if entry is None:
        return
    reference, version, dtype, place = entry
    stored = reference()
    if stored is None or version != x._version or dtype is not x.dtype:
        return
    del known[_MASKED]
    out = x.detach().as_strided(*place)  # of which x may be a view: all of the storage is kept
    if storage_report.recorders:
        storage_report.withdraw(stored.handles)
        storage_report.report_saved(((out,), AS_IT_IS), storage_report.EXACT_POLICY)
    stored.fill(((out,), AS_IT_IS), outer)
