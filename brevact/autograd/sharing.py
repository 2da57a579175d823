"""A tensor that several ops save is packed once.

Residual branches, q/k/v projections, a block's input that its shortcut reads too: each op asks for the same tensor,
and gets the same packed tensors. The table owns nothing. It knows a tensor by its storage (a weak reference, so an
address that was freed and used again is never taken for the old one), version counter, offset, shape and strides, and
knows the packed tensors by weak references: they live as long as some graph node keeps them. Like PyTorch's own check,
the version counter does not see edits through ``x.data`` or NumPy.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.storages import WeakStorage

_SWEEP_FLOOR = 256


class _WeakTensor:
    """Weak reference to a kept tensor: by its storage, which also lives on in an alias.

    Hooks around the region may keep a detached alias in place of the tensor (checkpoint does while it recomputes).
    """

    __slots__ = ("_dtype", "_storage", "_tensor")

    def __init__(self, tensor: Tensor, source: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata == source:  # an alias of the source lives as long as the source, kept by a node or not
            self._tensor, self._storage = weakref.ref(tensor), None
        else:
            self._storage, self._dtype = WeakStorage(storage), tensor.dtype

    def __call__(self) -> Tensor | None:
        if self._storage is None:
            tensor = self._tensor()
            if tensor is not None:
                tensor._fix_weakref()
            return tensor
        storage = self._storage()
        return None if storage is None else torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage)


class SharedPacks:
    """Weak table from (tensor, settings) to the tensors and the decoder that keep it."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[WeakStorage, dict[Hashable, tuple[list[_WeakTensor], Any]]]] = {}
        self._sweep_at = _SWEEP_FLOOR

    def slot(self, x: Tensor, settings: Hashable) -> Slot | None:
        """Return the place in the table for what keeps ``x`` under settings with this key.

        None for inference tensors, which have no version.
        """
        if x.is_inference():
            return None
        storage = x.untyped_storage()
        address = storage._cdata
        found = self._by_storage.get(address)
        if found is None or found[0].expired():
            if len(self._by_storage) >= self._sweep_at:
                self._sweep()
            found = self._by_storage[address] = (WeakStorage(storage), {})
        key = (x._version, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_neg(), settings)
        return Slot(found[1], key, address)

    def _sweep(self) -> None:
        alive = {address: found for address, found in list(self._by_storage.items()) if not found[0].expired()}
        self._by_storage = alive
        self._sweep_at = max(_SWEEP_FLOOR, 2 * len(alive))


class Slot:
    """The place of one tensor in the table."""

    __slots__ = ("_address", "_kept", "_key")

    def __init__(self, kept: dict[Hashable, tuple[list[_WeakTensor], Any]], key: Hashable, address: int) -> None:
        self._kept, self._key, self._address = kept, key, address

    def find(self) -> tuple[tuple[Tensor, ...], Any] | None:
        """Return the kept tensors and their decoder if some node still holds them."""
        found = self._kept.get(self._key)
        if found is None:
            return None
        references, decoder = found
        tensors = []
        for reference in references:
            tensor = reference()
            if tensor is None:
                return None
            tensors.append(tensor)
        return tuple(tensors), decoder

    def fill(self, tensors: tuple[Tensor, ...], decoder: Any) -> None:
        """Remember what keeps the tensor."""
        self._kept[self._key] = ([_WeakTensor(tensor, self._address) for tensor in tensors], decoder)
