"""Pack a tensor once for all ops that save it.

Residual branches, q/k/v projections, a block's input that its shortcut reads too: several ops save the same tensor and
get the same packed tensors. The table owns nothing. It finds a tensor by its storage, whose record carries its part of
the table, version counter, offset, shape and strides, and holds the packed tensors by weak references: they live as
long as some graph node keeps them. The version counter misses edits through ``x.data``, NumPy or an address: a region
that hands one out forgets the tensor's packed forms (``storages.end_known_values``).

A tensor without gradient, such as a batch or target, outlives the step that packed it. Only one root region uses its
random codes: otherwise a step's noise would depend on whether something, perhaps uncollected garbage, still holds the
codes of an earlier step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.storages import find_record, record_of, referent

_SWEEP_FLOOR = 4


class _WeakTensor:
    """Weak reference to a saved tensor and its storage: hooks, as of checkpoints, may save a detached alias instead."""

    __slots__ = ("_dtype", "_storage", "_tensor", "_view")

    def __init__(self, tensor: Tensor, source: int) -> None:
        self._tensor = weakref.ref(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata == source:  # the source's storage lives on, whether a node saves the alias or not
            self._storage = None
        else:
            self._storage, self._dtype = weakref.ref(storage), tensor.dtype
            self._view = tensor.storage_offset(), tensor.shape, tensor.stride()

    def __call__(self) -> Tensor | None:
        tensor = referent(self._tensor)
        if tensor is None and self._storage is not None:
            storage = referent(self._storage)
            if storage is not None:
                tensor = torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._view)
        return tensor


class _Packs(dict[tuple[Any, ...], tuple[list[_WeakTensor], Any, int]]):
    """The packed forms of the tensors in one storage, each with its root region's number, 0 for all regions."""

    sweep_at = _SWEEP_FLOOR

    def find(self, key: tuple[Any, ...], root: int = 0) -> tuple[tuple[Tensor, ...], Any] | None:
        """Return a tensor's packed form, if a node still holds it and the root region may use it (0: any region)."""
        found = self.get(key)
        if found is None:
            return None
        references, decoder, served = found
        if root and served and served != root:
            return None
        tensors = []
        for reference in references:
            tensor = reference()
            if tensor is None:
                return None
            tensors.append(tensor)
        return tuple(tensors), decoder

    def sweep(self) -> None:
        """Drop packed forms that no node holds any more, since a buffer that is refilled outlives most of its forms."""
        for key in [key for key in list(self) if self.find(key) is None]:
            self.pop(key, None)
        self.sweep_at = max(_SWEEP_FLOOR, 2 * len(self))


def packs_of(x: Tensor) -> _Packs | None:
    """Return the packed forms of the tensors in the storage of ``x``; None if nothing may be recorded for it."""
    record = record_of(x)
    if record is None:
        return None
    if record.packs is None:
        record.packs = _Packs()
    packs: _Packs = record.packs
    return packs


def find(
    x: Tensor, settings: tuple[Hashable, ...], root: int = 0, also: Callable[[Any], bool] | None = None
) -> tuple[tuple[Tensor, ...], Any] | None:
    """Return the packed form of ``x``, a tensor with a storage, if a node still holds it.

    ``root``: number of the root region whose random codes of a tensor without gradient match; 0 matches any. ``also``:
    whether a decoder is accepted whose settings differ in their key's first item.
    """
    record = find_record(x)
    packs: _Packs | None = None if record is None else record.packs
    if not packs or x.is_inference():
        return None
    sought, served = _key_of(x, settings), 0 if x.requires_grad else root
    found = packs.find(sought, served)
    if found is not None or also is None:
        return found
    for key in list(packs):
        if key != sought and key[:-1] == sought[:-1] and key[-1][1:] == settings[1:]:
            found = packs.find(key, served)
            if found is not None and also(found[1]):
                return found
    return None


def add(x: Tensor, settings: tuple[Hashable, ...], tensors: tuple[Tensor, ...], decoder: Any, root: int = 0) -> None:
    """Register a packed form, except of inference tensors and exposed storages; ``root``: 0 if codes are not random."""
    packs = None if x.is_inference() else packs_of(x)
    if packs is None:
        return
    if len(packs) >= packs.sweep_at:  # it has doubled
        packs.sweep()
    source, served = x.untyped_storage()._cdata, 0 if x.requires_grad else root
    packs[_key_of(x, settings)] = ([_WeakTensor(tensor, source) for tensor in tensors], decoder, served)


def _key_of(x: Tensor, settings: tuple[Hashable, ...]) -> tuple[Any, ...]:
    return (x._version, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_neg(), settings)
