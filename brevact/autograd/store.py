"""Save one tensor for backward: unpacked, packed, or in full precision until backward packs it."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brevact.autograd import known_values, storage_report
from brevact.autograd.call_arguments import ACTIVATION_DTYPES, BoundCall
from brevact.autograd.known_values import share_codes
from brevact.autograd.layer_recompute import DEEP, serves_norms
from brevact.autograd.norm_decoders import NormInput
from brevact.autograd.saved import (
    AS_IT_IS,
    Decoder,
    PackedOnBackward,
    Saved,
    complex_of,
    decoder_of_mask,
    decoder_of_packed,
    decoder_of_places,
    distinct_elements,
    mapped,
    pairs_of,
    without_gaps,
)
from brevact.autograd.seeds import SeedStream
from brevact.autograd.settings import BackwardSettings, SaveMode
from brevact.autograd.storages import find_record, find_shared, is_held, record_of, share_packed
from brevact.autograd.weights import ModelState, is_parameter, is_weight
from brevact.private_names.of_torch import no_dispatch_modes, top_hooks
from brevact.quantizers import Layout, PackedSpec, pack_codes, pack_mask, quantize

if TYPE_CHECKING:
    from brevact.autograd.saved_tensor_hooks import SavedTensorHooks

_is_grad_enabled = torch.is_grad_enabled
_STRIDED = torch.strided
_COPY = ("a copy",)


def keep_as_it_is(x: Tensor, why: str = storage_report.NEEDED) -> Saved:
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
    return keep_as_it_is(x if settings.is_exact else compact(x), storage_report.SMALL)


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
        return keep_as_it_is(x)
    distinct, size = distinct_elements(x), max(sizes, default=1)
    low = -size if lowest is None else lowest
    bits = max((size - 1).bit_length(), 1) if low == 0 and distinct is x else 8
    kinds = [kind for kind in _TYPES_OF_PLACES if torch.iinfo(kind).min <= low and size - 1 <= torch.iinfo(kind).max]
    is_small = bits >= 8 and distinct.nbytes < 4 * settings.min_numel
    if not kinds or kinds[0].itemsize >= x.itemsize or is_small:
        return keep_as_it_is(x)
    found = find_shared(x, (kinds[0],))
    if found is None:
        codes = distinct.to(kinds[0])
        if bits < 8:
            found = (pack_codes(codes.flatten(), bits),), decoder_of_places(x.dtype, x.shape, bits)
        else:
            found = (codes,), decoder_of_places(x.dtype, x.shape)
        share_packed(x, (kinds[0],), *found)
    return reported(found)


def reported(kept: Saved, why: str = "") -> Saved:
    if storage_report.recorders:
        storage_report.report_saved(kept, why)
    return kept


class Store:
    """The part of a region that saves tensors: in their registered form, packed once for all ops, or unpacked."""

    settings: Any
    """The ``BackwardSettings``: never None where a handler runs."""
    recompute: int
    """Maximum multiplications and additions per element of a layer that is recomputed for any reader."""
    seeds: SeedStream
    state: ModelState
    hooks: SavedTensorHooks
    is_counted: bool
    """Whether a selective checkpoint's mode counts ops. It must not count those of packing: a tensor may be packed
    already in forward, and not in recomputation."""

    def keep(self, x: Tensor, *, share: bool = True, norm: NormInput | None = None) -> Saved:
        """Save a floating-point or complex activation, or a norm's normalized input, by the region's settings.

        With ``share``, ``x`` is packed once for all ops that save it. For a norm, the normalized values are packed, and
        its statistics saved beside them. A view of a parameter (learned queries that several samples share) is no
        activation. Complex numbers are packed as pairs of real ones.

        Returns the registered form of ``x`` (a forward quantizer's codes, or, except for a norm, the tensors that ``x``
        derives from); otherwise the packed tensor; ``x`` itself if it has fewer than ``settings.min_numel`` elements,
        or the settings are exact.
        """
        if x.is_complex():
            return self._keep_pairs(x, share)
        if x._is_view() and is_parameter(x._base):
            kept = keep_as_it_is(x.detach(), storage_report.WEIGHT)
            return kept if norm is None else norm.unpacked(kept)
        if self.is_counted:
            with no_dispatch_modes():
                return self._keep(x, self.settings, share, norm)
        return self._keep(x, self.settings, share, norm)

    def _keep_pairs(self, x: Tensor, share: bool) -> Saved:
        known = known_values.find(x)
        if known is not None:
            return reported(known)
        tensors, decoder = self.keep(pairs_of(x), share=share)
        if decoder is AS_IT_IS:
            return (complex_of(tensors[0], x.is_conj()),), AS_IT_IS
        return tensors, mapped(decoder, BoundCall(complex_of, (Tensor, x.is_conj())))

    def keep_levels(self, x: Tensor, norm: NormInput) -> Saved:
        with no_dispatch_modes() if self.is_counted else nullcontext():
            return self._keep(x, self.settings.for_normalized, True, norm)

    def _keep(self, x: Tensor, settings: BackwardSettings, share: bool, norm: NormInput | None) -> Saved:
        normalizes = norm is not None and not settings.is_lossless
        is_small = x.numel() < settings.min_numel
        if is_small and self.recompute < DEEP:
            return _beside(keep_small(x, settings), norm)
        record = find_record(x) if share else None
        if record is not None and (record.known is not None or record.held is not None):
            of_reader = settings if settings.recompute or not normalizes else None
            known = record.known and known_values.found_in(record.known, x, of_reader, self.hooks.scope)
            if is_held(x, record) and not (known is not None and known[1].quality.is_exact):
                return _beside(keep_as_it_is(x), norm)
            if known is not None and (not normalizes or serves_norms(known[1])):
                share_codes(known[0])
                if storage_report.recorders:
                    storage_report.report_saved(known, "")
                return known if norm is None else _beside(known, norm)
        if is_small:
            return _beside(keep_small(x, settings), norm)
        if settings.is_exact:
            return _beside(keep_as_it_is(x, storage_report.EXACT_POLICY), norm)
        # A checkpoint expects tensors of the same sizes again, so random sizes follow from the number of elements.
        repeats = settings.draws_size and self.hooks.are_in_checkpoint()
        key: tuple[Hashable, ...] | None = (settings.key, repeats)
        if norm is not None and normalizes:
            of_norm = norm.key
            key = None if of_norm is None else (settings.key, repeats, of_norm)
        packs = None if record is None else record.packs
        found = find_shared(x, key, self.seeds.number) if packs and key is not None else None
        if found is None:
            found = self._pack(x, settings, repeats, norm if normalizes else None)
            if share and key is not None:
                share_packed(x, key, *found, self.seeds.number if settings.is_random else 0)
        if storage_report.recorders:
            on_backward = settings.save_mode is SaveMode.QUANTIZE_ON_BACKWARD
            storage_report.report_saved(found, storage_report.ON_BACKWARD if on_backward else "")
            _report_statistics(found)
        return found if norm is None or normalizes else _beside(found, norm)

    def _pack(self, x: Tensor, settings: BackwardSettings, repeats: bool, norm: NormInput | None) -> Saved:
        quantizer = settings.quantizer
        plan = None
        if settings.uses_fast_pack and norm is None and type(x) is Tensor and x.layout is _STRIDED and not x.is_neg():
            plan = _plan_of(quantizer, x.shape, x.stride(), x.dtype)
        if plan is not None:
            spec, decoder = plan
            buffer = spec.empty(x)
            spec.quantizer.encode(
                x.detach(), spec, self.seeds.next(x.device) if quantizer.is_stochastic else None, buffer
            )
            return (buffer,), decoder
        if top_hooks(True) == self.hooks.pair:
            with self.hooks.suspended:  # a quantizer may use autograd, too
                return self._pack(x, settings, repeats, norm)
        if settings.draws_size:
            numel = Layout.of(x).numel
            quantizer = quantizer.with_drawn_size(numel, numel if repeats else self.seeds.next_on_host())
        if settings.save_mode is not SaveMode.SAVE_QUANTIZED:
            x = x.detach() if norm is not None else without_gaps(x.detach())
            x = distinct_elements(x).clone().expand(x.shape)  # without gaps, in its own storage
        elif _is_grad_enabled():
            x = x.detach()
        seed = self.seeds.next(x.device) if quantizer.is_stochastic else 0
        return pack(x, quantizer, settings.save_mode, seed, norm)

    def keep_activation(self, x: Tensor) -> Saved:
        """Save an operand that may be a weight: packed if it is an activation, unpacked otherwise.

        A leaf that requires a gradient, or a view of one, is somebody's variable and stays in memory anyway. A view of
        another tensor, made in a Function's forward, only looks like a leaf.
        """
        base = x._base if x.is_leaf and x._is_view() else None
        if base is not None and not base.is_leaf:
            is_whole = x.numel() == base.numel() and Layout.of(x).is_dense and Layout.of(base).is_dense
            if is_whole and x.dtype is base.dtype and not (self.settings.is_exact or is_weight(base, self.state)):
                return known_values.view_of(self.keep(base), x, x.storage_offset() - base.storage_offset())
        elif x.is_leaf and x.requires_grad:
            return keep_as_it_is(x, storage_report.VARIABLE)
        return self.keep_weight(x) if is_weight(x, self.state) else self.keep(x)

    def keep_weight(self, x: Tensor) -> Saved:
        known = known_values.find(x)
        return keep_as_it_is(x, storage_report.WEIGHT) if known is None else reported(known)

    def find_known(self, x: Tensor) -> Saved | None:
        """Return the registered saved form of ``x``, if its quality is at least that of the region's own quantizer."""
        return known_values.find(x, self.settings, self.hooks.scope)

    def find_kept(self, x: Tensor) -> Saved | None:
        record = find_record(x)
        if record is None:
            return None
        known = record.known and known_values.found_in(record.known, x, self.settings, self.hooks.scope)
        if known is None and record.packs and self.settings.derives and self.hooks.scope is None:
            if x.layout is torch.strided and not x.is_nested:  # without a checkpoint it lives until backward
                key, settings = (self.settings.key, False), self.settings
                known = find_shared(x, key, self.seeds.number, lambda decoder: decoder.quality.serves(settings))
        return known

    def share_normalized(self, x: Tensor, norm: Hashable, vectors: tuple[Tensor, ...], decoder: Any) -> None:
        root = self.seeds.number if self.settings.is_random else 0
        share_packed(x, (self.settings.key, False, norm), vectors, decoder, root)

    def register(self, out: Tensor, kept: Saved, *, is_dirty: bool = False, is_new: bool = False) -> None:
        known_values.register(out, *kept, scope=self.hooks.scope, is_dirty=is_dirty, is_new=is_new)


def _beside(kept: Saved, norm: NormInput | None) -> Saved:
    """Save a norm's statistics beside its losslessly saved input; for other ops the input alone."""
    if norm is None:
        return kept
    kept = norm.unpacked(kept)
    if storage_report.recorders:
        _report_statistics(kept)
    return kept


def _report_statistics(kept: Saved) -> None:
    tensors, decoder = kept
    for statistic in tensors[len(tensors) - decoder.statistics :]:
        keep_as_it_is(statistic)


@functools.lru_cache(maxsize=4096)
def _plan_of(
    quantizer: Any, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> tuple[PackedSpec[Any], Decoder] | None:
    layout = Layout.of_sizes(shape, stride, dtype)
    if not layout.is_dense or layout.numel != shape.numel() or dtype not in ACTIVATION_DTYPES:
        return None
    spec = PackedSpec.of(quantizer, layout)
    return spec, decoder_of_packed(spec)


def pack(x: Tensor, quantizer: Any, save_mode: SaveMode, seed: int | Tensor, norm: NormInput | None = None) -> Saved:
    if norm is not None:
        return (norm.pack if save_mode is SaveMode.SAVE_QUANTIZED else norm.pack_later)(x, quantizer, seed)
    if save_mode is SaveMode.SAVE_QUANTIZED:
        packed = quantize(quantizer, x if x.is_contiguous() else without_gaps(x), seed)
        return (packed.buffer,), decoder_of_packed(packed.spec)
    if isinstance(seed, int):
        return (x,), PackedOnBackward(quantizer, seed)
    return (x, seed), PackedOnBackward(quantizer, None)
