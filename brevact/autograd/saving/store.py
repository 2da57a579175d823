"""Save one tensor for backward: unpacked, packed, or in full precision until backward packs it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.call_arguments import ACTIVATION_DTYPES
from brevact.autograd.deriving.norms import NormInput
from brevact.autograd.region.settings import BackwardSettings, SaveMode
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import (
    AS_IT_IS,
    Decoder,
    PackedOnBackward,
    Saved,
    decoder_of_mask,
    decoder_of_packed,
    decoder_of_places,
    distinct_elements,
    without_gaps,
)
from brevact.autograd.saving.storages import find_record, find_shared, record_of, share_packed
from brevact.quantizers import Layout, PackedSpec, pack_codes, pack_mask, quantize

_COPY = ("a copy",)


def keep_exact(x: Tensor, why: str = storage_report.NEEDED) -> Saved:
    kept = (x,), AS_IT_IS
    return reported(kept, why) if storage_report.recorders else kept


def is_compact(x: Tensor) -> bool:
    """Return whether the storage of ``x`` has at most twice its size; a class token, a view, has a larger one."""
    return x.untyped_storage().nbytes() <= 2 * x.nbytes


def compact(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if it is a view of a larger storage, so that the storage can be freed.

    Each view is copied once, and all copies of a storage's views take at most its bytes.
    """
    if is_compact(x):
        return x
    if x.is_inference() or x.is_conj() or x.is_neg():
        return x.detach().clone()
    found = find_shared(x, _COPY)
    if found is not None:
        return found[0][0]
    record = record_of(x) or find_record(x)
    assert record is not None
    record.copied += x.nbytes
    if record.copied > x.untyped_storage().nbytes():
        return x
    copied = x.detach().clone()
    share_packed(x, _COPY, (copied,), AS_IT_IS)
    return copied


def keep_small(x: Tensor, settings: BackwardSettings) -> Saved:
    """Save a small tensor without its larger storage; exact settings save a view: a copy's strides change last bits."""
    return keep_exact(x if settings.is_exact else compact(x), storage_report.SMALL)


def keep_mask(mask: Tensor, negative_slope: float = 0.0) -> Saved:
    """Save a boolean tensor in one bit per element; its product with g is g where it is set, else g times the slope."""
    return reported(((pack_mask(mask),), decoder_of_mask(Layout.of(mask), negative_slope)))


#: Dtypes for places: the first one that holds them is used.
_TYPES_OF_PLACES = (torch.uint8, torch.int8, torch.int16, torch.int32)
INTEGERS = frozenset((torch.int64, torch.int32))


def keep_places(x: Tensor, settings: BackwardSettings, sizes: Sequence[int], lowest: int | None = None) -> Saved:
    """Save integers from ``lowest`` to below the largest of ``sizes`` exactly, in the smallest dtype that holds them,
    or packed, from 0 to below 128.

    ``lowest`` is minus that size if None. They are packed once for all ops. No value is read: on a GPU the host would
    wait for it.
    """
    if x.dtype not in INTEGERS:
        return keep_exact(x)
    distinct, size = distinct_elements(x), max(sizes, default=1)
    low = -size if lowest is None else lowest
    bits = max((size - 1).bit_length(), 1) if low == 0 and distinct is x else 8
    kinds = [kind for kind in _TYPES_OF_PLACES if torch.iinfo(kind).min <= low and size - 1 <= torch.iinfo(kind).max]
    is_small = bits >= 8 and distinct.nbytes < 4 * settings.min_numel
    if not kinds or kinds[0].itemsize >= x.itemsize or is_small:
        return keep_exact(x)
    found = find_shared(x, (kinds[0],))
    if found is None:
        codes, packs = distinct.to(kinds[0]), bits < 8
        codes = pack_codes(codes.flatten(), bits) if packs else codes
        found = (codes,), decoder_of_places(x.dtype, x.shape, bits if packs else 0)
        share_packed(x, (kinds[0],), *found)
    return reported(found)


def reported(kept: Saved, why: str = "") -> Saved:
    if storage_report.recorders:
        storage_report.report_saved(kept, why)
    return kept


def beside(kept: Saved, norm: NormInput | None) -> Saved:
    """Save a norm's statistics beside its losslessly saved input; for other ops the input alone."""
    if norm is None:
        return kept
    kept = norm.unpacked(kept)
    if storage_report.recorders:
        report_statistics(kept)
    return kept


def report_statistics(kept: Saved) -> None:
    tensors, decoder = kept
    for statistic in tensors[len(tensors) - decoder.statistics :]:
        keep_exact(statistic)


@functools.lru_cache(maxsize=4096)
def form_of(
    quantizer: Any, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> tuple[PackedSpec[Any], Decoder] | None:
    layout = Layout.of_sizes(shape, stride, dtype)
    if not layout.is_dense or layout.numel != shape.numel() or dtype not in ACTIVATION_DTYPES:
        return None
    spec = PackedSpec.of(quantizer, layout)
    return spec, decoder_of_packed(spec)


def pack(x: Tensor, quantizer: Any, save_mode: SaveMode, seed: int | Tensor, norm: NormInput | None = None) -> Saved:
    if norm is not None:
        return norm.pack(x, quantizer, seed, save_mode)
    if save_mode is SaveMode.SAVE_QUANTIZED:
        packed = quantize(quantizer, x if x.is_contiguous() else without_gaps(x), seed)
        return (packed.buffer,), decoder_of_packed(packed.spec)
    if isinstance(seed, int):
        return (x,), PackedOnBackward(quantizer, seed)
    return (x, seed), PackedOnBackward(quantizer, None)
