"""Storages: their addresses, and weak references to them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, UntypedStorage


def storage_address(x: Tensor) -> int:
    """Return the address of the storage object of ``x``; 0 for tensors without storage."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


class WeakStorage:
    """Weak reference to a storage, which may outlive every Python object for it."""

    __slots__ = ("_pointer",)

    def __init__(self, storage: UntypedStorage) -> None:
        self._pointer: int = storage._weak_ref()

    def __del__(self, free: Any = UntypedStorage._free_weak_ref) -> None:
        free(self._pointer)

    def expired(self) -> bool:
        """Return whether the storage has been freed."""
        return UntypedStorage._expired(self._pointer)

    def __call__(self) -> UntypedStorage | None:
        """Return the storage, None if it has been freed."""
        return None if self.expired() else UntypedStorage._new_with_weak_ptr(self._pointer)
