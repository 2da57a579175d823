"""A tensor that several ops save is packed once.

Residual branches, q/k/v projections, a block's input that its shortcut reads too: each op asks for the same tensor,
and gets the same packed tensors. The table owns nothing. It knows a tensor by its storage (a weak reference, so an
address that was freed and used again is never taken for the old one), version counter, offset, shape and strides, and
knows the packed tensors by weak references: they live as long as some graph node keeps them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

_SWEEP_FLOOR = 256


class _WeakTensor:
    """Weak reference to a kept tensor that also survives as an alias.

    Hooks around the region may keep a detached alias in place of the tensor (checkpoint does while it recomputes); the
    storage tells that it is still kept.
    """

    __slots__ = ("_dtype", "_storage", "_tensor")

    def __init__(self, tensor: Tensor, source: int) -> None:
        self._tensor = TensorWeakRef(tensor)
        self._dtype = tensor.dtype
        storage = tensor.untyped_storage()
        # An alias of the source lives as long as the source, whether a node keeps it or not.
        self._storage = None if storage._cdata == source else StorageWeakRef(storage)

    def __call__(self) -> Tensor | None:
        tensor = self._tensor()
        if tensor is not None or self._storage is None or self._storage.expired():
            return tensor
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return None if storage is None else torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage)


class SharedPacks:
    """Weak table from (tensor, settings) to the tensors and the decoder that keep it."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[StorageWeakRef, dict[Hashable, tuple[list[_WeakTensor], Any]]]] = {}
        self._sweep_at = _SWEEP_FLOOR

    def find(self, x: Tensor, settings: Hashable) -> tuple[tuple[Tensor, ...], Any] | None:
        """Return the kept tensors and decoder of ``x`` if some node still holds them."""
        if x.is_inference():
            return None
        found = self._by_storage.get(x.untyped_storage()._cdata)
        if found is None or found[0].expired():
            return None
        refs, decoder = found[1].get(_key(x, settings), ((), None))
        tensors = tuple(ref() for ref in refs)
        if not tensors or any(tensor is None for tensor in tensors):
            return None
        return tensors, decoder

    def add(self, x: Tensor, settings: Hashable, kept: tuple[tuple[Tensor, ...], Any]) -> None:
        """Remember what keeps ``x``."""
        if x.is_inference():
            return
        storage = x.untyped_storage()
        found = self._by_storage.get(storage._cdata)
        if found is None or found[0].expired():
            if len(self._by_storage) >= self._sweep_at:
                self._sweep()
            found = self._by_storage[storage._cdata] = (StorageWeakRef(storage), {})
        tensors, decoder = kept
        found[1][_key(x, settings)] = ([_WeakTensor(tensor, storage._cdata) for tensor in tensors], decoder)

    def _sweep(self) -> None:
        alive = {address: found for address, found in list(self._by_storage.items()) if not found[0].expired()}
        self._by_storage = alive
        self._sweep_at = max(_SWEEP_FLOOR, 2 * len(alive))


def _key(x: Tensor, settings: Hashable) -> Hashable:
    return (x._version, x.storage_offset(), x.shape, x.stride(), x.dtype, settings)
