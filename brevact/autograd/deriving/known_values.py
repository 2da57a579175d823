"""Table of tensors known by fewer bits: results of forward quantizers, and tensors derived from packed ones.

A fake quantizer's output is (q - z) * s with few-bit integers q; a fake-quantized weight is a function of the weight,
which is in memory anyway. For such a tensor the table has the saved form that decodes to its values bit-exactly (except
for the sign of a zero): any op that saves the tensor saves that form, whatever its region's quantizer. Values derived
from packed tensors (``derived``) have rounding errors: a region uses them if its own errors would be no smaller.

An entry lives as long as the tensor's own storage, which carries it; codes are a fraction of that. The table identifies
a tensor by its storage and version counter, and views of the tensor by their offset, shape and strides. The counter
misses edits through ``x.data``, NumPy, or an address, as by Triton kernels: a region that hands one out forgets the
tensor (``storages.end_known_values``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brevact.autograd.region.settings import BackwardSettings
from brevact.autograd.saving.saved import Decoder, Quality, Saved, view_of
from brevact.autograd.saving.storages import Tensors, find_record, record_of, storage_address, versions_of
from brevact.quantizers import Layout

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
