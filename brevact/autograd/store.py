"""How one tensor is kept for backward: as it is, packed, or in full precision until backward starts."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd import known_values, storage_report
from brevact.autograd.decoders import AS_IT_IS, PackedOnBackward, decoder_of_mask, decoder_of_packed, without_gaps
from brevact.autograd.normalizing import NormInput
from brevact.autograd.quality import EXACT
from brevact.autograd.saved import Saved
from brevact.autograd.seeds import SeedStream
from brevact.autograd.settings import BackwardSettings, SaveMode
from brevact.autograd.sharing import SharedPacks, Slot
from brevact.quantizers import Layout, is_traced, pack_mask, quantize

_is_grad_enabled = torch.is_grad_enabled
_shared = SharedPacks()


def keep_as_it_is(x: Tensor, why: str = storage_report.NEEDED) -> Saved:
    """Keep ``x`` itself."""
    kept = (x,), AS_IT_IS
    return reported(kept, why) if storage_report.recorders else kept


def keep_small(x: Tensor) -> Saved:
    """Keep a small tensor; a view of a larger storage, a class token say, is copied, so as not to hold all of it."""
    if not is_traced(x) and x.untyped_storage().nbytes() > 2 * x.nbytes:
        x = x.detach().clone()
    return keep_as_it_is(x, storage_report.SMALL)


def keep_mask(mask: Tensor, negative_slope: float = 0.0) -> Saved:
    """Keep a boolean tensor in one bit an element; its product with g is g where it is set, else g times the slope."""
    return reported(((pack_mask(mask),), decoder_of_mask(Layout.of(mask), negative_slope)))


def reported(kept: Saved, why: str = "") -> Saved:
    """Tell the recorder of a report, if there is one, how a tensor is kept."""
    if storage_report.recorders:
        storage_report.report_saved(kept, why)
    return kept


def keep_packed(
    x: Tensor,
    settings: BackwardSettings,
    seeds: SeedStream,
    share: bool = True,
    repeats: bool = False,
    place: int = 0,
    norm: NormInput | None = None,
    scope: Any = None,
) -> Saved:
    """Keep ``x`` as the region's settings say.

    Args:
        x: floating-point tensor of any shape and strides.
        settings: the region's settings.
        seeds: the region's ``SeedStream``.
        share: whether ``x`` outlives this op as a tensor that other ops may save too; it is then packed once.
        repeats: whether a checkpoint wants tensors of the same sizes again when it recomputes them: random sizes then
            follow from the number of elements alone.
        place: how many tensors the region has kept before, for quantizers that collect statistics of each.
        norm: where ``x`` is the input of a norm: its normalized values are packed, and its statistics kept beside.
        scope: the checkpoint in which the region runs (``known_values.find``).

    Returns:
        What is known to give ``x`` back, the codes of a forward quantizer, or, but for a norm, what ``x`` derives from;
        otherwise the packed tensor; ``x`` itself when it has fewer than ``settings.min_numel`` elements, or the
        settings are exact.
    """
    known = _keep_unpacked(x, settings, share, norm is None, scope)
    if known is not None:
        return known if norm is None else _with_statistics(known, norm)
    if norm is not None and settings.is_lossless:
        return _with_statistics(keep_packed(x, settings, seeds, share, repeats, place, scope=scope), norm)
    slot = slot_of(x, settings, repeats, *(() if norm is None else (norm.key,))) if share else None
    found = None if slot is None else slot.found
    if found is None:
        quantizer = settings.quantizer
        if settings.draws_size:
            numel = Layout.of(x).numel
            quantizer = quantizer.sized(numel, numel if repeats else seeds.next_on_host())
        if _is_grad_enabled() or settings.save_mode is not SaveMode.SAVE_QUANTIZED:
            x = x.detach()
        if settings.observes:
            quantizer = quantizer.observed(x if norm is None else norm.normalize(x), place)
        seed = seeds.next(x.device) if quantizer.is_stochastic else 0
        found = pack(x, quantizer, settings.save_mode, seed, norm)
        if slot is not None:
            slot.fill(*found)
    if storage_report.recorders:
        storage_report.report_saved(
            found, storage_report.ON_BACKWARD if settings.save_mode is SaveMode.QUANTIZE_ON_BACKWARD else ""
        )
        _report_statistics(found)
    return found


def _with_statistics(kept: Saved, norm: NormInput) -> Saved:
    """Keep the statistics of a norm beside its input, which is kept without a loss."""
    kept = norm.unpacked(kept)
    if storage_report.recorders:
        _report_statistics(kept)
    return kept


def _report_statistics(kept: Saved) -> None:
    """Tell the recorder which of the kept tensors are statistics of a norm."""
    tensors, decoder = kept
    for statistic in tensors[len(tensors) - getattr(decoder, "statistics", 0) :]:
        keep_as_it_is(statistic)


def _keep_unpacked(x: Tensor, settings: BackwardSettings, share: bool, may_derive: bool, scope: Any) -> Saved | None:
    """Keep ``x`` as it is, or what is known of it, if it is not to be packed."""
    if x.numel() < settings.min_numel:
        return keep_small(x)
    known = None
    if share:
        known = known_values.find(x, settings if may_derive else None, scope)
    if known is not None:
        return reported(known)
    return keep_as_it_is(x, storage_report.EXACT_POLICY) if settings.is_exact else None


def find_packed(x: Tensor, settings: BackwardSettings) -> Saved | None:
    """Return what keeps ``x`` packed for an op that has run outside of checkpoints, if there is one.

    It may be packed for other settings, if that is as good for a reader with these.
    """
    if x.layout is not torch.strided or x.is_nested:
        return None
    slot = slot_of(x, settings, False)
    if slot is None or slot.found is not None:
        return None if slot is None else slot.found
    others = (kept for kept in slot.alternatives() if getattr(kept[1], "quality", EXACT).serves(settings))
    return next(others, None)


def slot_of(x: Tensor, settings: BackwardSettings, repeats: bool, *norm: Hashable | None) -> Slot | None:
    """Return the place of what ops share; None where nothing is shared.

    Args:
        x: the tensor.
        settings: the region's settings.
        repeats: see :func:`keep_packed`.
        norm: where normalized values of ``x`` are kept, their key; None for those that nobody shares.
    """
    return None if norm == (None,) else _shared.slot(x, (settings.key, repeats, *norm))


def pack(x: Tensor, quantizer: Any, save_mode: SaveMode, seed: int | Tensor, norm: NormInput | None = None) -> Saved:
    """Keep ``x``, or its normalized values, packed, or to be packed with this seed when backward starts."""
    if norm is not None:
        return (norm.pack if save_mode is SaveMode.SAVE_QUANTIZED else norm.pack_later)(x, quantizer, seed)
    if save_mode is SaveMode.SAVE_QUANTIZED:
        packed = quantize(quantizer, x if x.is_contiguous() else without_gaps(x), seed)
        return (packed.buffer,), decoder_of_packed(packed.spec)
    if isinstance(seed, int):
        return (x,), PackedOnBackward(quantizer, seed)
    return (x, seed), PackedOnBackward(quantizer, None)
