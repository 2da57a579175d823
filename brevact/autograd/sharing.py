"""A tensor that several ops save is packed once.

Residual branches, q/k/v projections, a block's input that its shortcut reads too: each op asks for the same tensor,
and gets the same packed tensors. The table owns nothing. It knows a tensor by its storage (which carries its part of
the table, so that an address that was freed and used again is never taken for the old one), version counter, offset,
shape and strides, and knows the packed tensors by weak references: they live as long as some graph node keeps them.
The version counter does not see edits through ``x.data``, NumPy or an address: a region that hands one out forgets
the tensor's packed forms (``storages.end_known_values``).

A tensor without gradient, a batch or a target, outlives the step that packed it. Its random codes serve one root region
alone: otherwise the noise of a step would depend on whether somebody, perhaps garbage that waits for its collector,
still keeps the codes of an earlier step.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from brevact.autograd.storages import EXPOSED, OF_VALUES, referent

_SWEEP_FLOOR = 4
_numbers = itertools.count()


class _WeakTensor:
    """Weak reference to a kept tensor: by itself, or by its storage, which also lives on in an alias.

    Hooks around the region may keep a detached alias in place of the tensor (checkpoint does while it recomputes).
    """

    __slots__ = ("_dtype", "_storage", "_tensor", "_view")

    def __init__(self, tensor: Tensor, source: int) -> None:
        self._tensor = weakref.ref(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata == source:  # an alias of the source lives as long as the source, kept by a node or not
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
    """The packed forms of the tensors of one storage, each with the number of its root region, 0 for all regions.

    A buffer that is filled again and again outlives most of them.
    """

    sweep_at = _SWEEP_FLOOR
    copied = 0
    """Bytes of the copies of small views that were made."""

    def find(self, key: tuple[Any, ...], root: int = 0) -> tuple[tuple[Tensor, ...], Any] | None:
        """Return the packed form of a tensor, if a node still holds it and it serves the root region, 0 for any."""
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
        """Drop packed forms that no node holds any more."""
        for key in [key for key in list(self) if self.find(key) is None]:
            self.pop(key, None)
        self.sweep_at = max(_SWEEP_FLOOR, 2 * len(self))


class SharedPacks:
    """Weak table from (tensor, settings) to the tensors and the decoder that keep it."""

    def __init__(self) -> None:
        self._attribute = f"{OF_VALUES}packs_{next(_numbers)}"

    def packs_of(self, storage: UntypedStorage) -> _Packs:
        """Return the part of the table for a storage."""
        packs: _Packs | None = getattr(storage, self._attribute, None)
        if packs is None:
            packs = _Packs()
            setattr(storage, self._attribute, packs)
        return packs

    def find(
        self, x: Tensor, settings: tuple[Hashable, ...], root: int = 0, also: Callable[[Any], bool] | None = None
    ) -> tuple[tuple[Tensor, ...], Any] | None:
        """Return the packed form of ``x``: its tensors and their decoder, if a node still holds them.

        Args:
            x: any tensor with a storage.
            settings: key of the settings under which it was packed.
            root: number of the root region, from 1 on, whose random codes of a tensor without gradient are found; 0 for
                those of any.
            also: whether a decoder will do that was made under settings whose first part is another; None: none will.
        """
        packs: _Packs | None = x.untyped_storage().__dict__.get(self._attribute)
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

    def add(
        self, x: Tensor, settings: tuple[Hashable, ...], tensors: tuple[Tensor, ...], decoder: Any, root: int = 0
    ) -> None:
        """Register the packed form of ``x``; not of inference tensors, which have no version, nor in exposed storages.

        The number is that of the root region in which random codes were drawn, 0 for codes that are not random.
        """
        if x.is_inference():
            return
        storage = x.untyped_storage()
        if EXPOSED in storage.__dict__:
            return
        packs, source = self.packs_of(storage), storage._cdata
        if len(packs) >= packs.sweep_at:  # it has doubled
            packs.sweep()
        served = 0 if x.requires_grad else root
        packs[_key_of(x, settings)] = ([_WeakTensor(tensor, source) for tensor in tensors], decoder, served)


def _key_of(x: Tensor, settings: tuple[Hashable, ...]) -> tuple[Any, ...]:
    """Key of a tensor among those of its storage, with the key of the settings, and of the norm if there is one."""
    return (x._version, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_neg(), settings)
