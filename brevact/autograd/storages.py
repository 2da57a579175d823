"""Storages: their addresses, and weak references to them."""

from __future__ import annotations

import operator
import sys
import weakref
from typing import Any, TypeVar

from torch import Tensor, UntypedStorage

from brevact.private_names.of_torch import DisableTorchFunction
from brevact.quantizers import is_traced

T = TypeVar("T", Tensor, UntypedStorage)


def _count_of_a_lone_local() -> int:
    x = object()
    return sys.getrefcount(x)


#: What ``sys.getrefcount(x)``, called like that, returns where the local ``x`` alone holds an object: 2, or 1 from
#: Python 3.14 on, where the call borrows it. A function around the call would count its own argument, or not.
LONE = _count_of_a_lone_local()

_version_of = operator.attrgetter("_version")
#: How the attributes of a storage begin that tell of the values in it.
OF_VALUES = "_brevact_values_"
#: The object by which an op keeps the storage as it is, with the version.
_HELD = OF_VALUES + "held"
#: The objects that hold what stands for its tensors until an op keeps these as they are.
OFFERED = OF_VALUES + "stand_ins"
#: Attribute of a storage that somebody may write to unseen at any time: none of the others is set on it.
EXPOSED = "_brevact_exposed"

#: Attribute of a storage of integers that were made in a region.
_MADE = "_brevact_made"


def end_known_values(x: Tensor, *, for_good: bool = False) -> None:
    """End what is known of the values in the storage of ``x``, which others may overwrite unseen: now, or ever after.

    That is saved forms, codes that other ops would share, and masks.
    """
    try:
        with DisableTorchFunction():
            known = x.untyped_storage().__dict__
    except (NotImplementedError, RuntimeError, ValueError):  # no storage
        return
    for name in [name for name in known if name.startswith(OF_VALUES)]:
        del known[name]
    if for_good:
        known[EXPOSED] = True


def storage_address(x: Tensor) -> int:
    """Return the address of the storage object of ``x``; 0 for tensors without storage, as those of a lazy module."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError, ValueError):
        return 0


def is_tracked(x: Tensor) -> bool:
    """Return whether the storage of ``x`` carries saved forms: registered ones, or packed ones of tensors in it."""
    try:
        return bool(x.untyped_storage().__dict__)
    except (NotImplementedError, RuntimeError):  # no storage
        return False


def any_tracked(tensors: list[Tensor]) -> bool:
    """Return whether the storage of one of the tensors carries saved forms."""
    try:
        for x in tensors:
            if x.untyped_storage().__dict__:
                return True
    except (NotImplementedError, RuntimeError):  # one without storage
        return any(map(is_tracked, tensors))
    return False


def is_offered(x: Tensor) -> bool:
    """Return whether an op keeps a stand-in for ``x``, such as a packed copy, which it gives up."""
    return not is_traced(x) and OFFERED in x.untyped_storage().__dict__


def note_held(x: Tensor, holder: Any) -> None:
    """Note that an op that needs ``x`` exactly keeps it as it is, as long as the holder lives."""
    if not x.is_inference() and EXPOSED not in x.untyped_storage().__dict__:
        x.untyped_storage().__dict__[_HELD] = weakref.ref(holder), x._version


def is_held(x: Tensor) -> bool:
    """Return whether an op that needs ``x``, or other elements of its storage, exactly keeps that as it is."""
    found = x.untyped_storage().__dict__.get(_HELD)
    return found is not None and found[0]() is not None and not x.is_inference() and found[1] == x._version


def note_made(x: Tensor, given: list[Tensor]) -> None:
    """Note that an op in a region has made integers of these tensors, in memory that nobody held before."""
    if not x._is_view() and all(x is not other for other in given):
        x.untyped_storage().__dict__[_MADE] = True


def is_made(x: Tensor) -> bool:
    """Return whether integers lie in memory that an op in a region has made (`note_made`)."""
    return not is_traced(x) and _MADE in x.untyped_storage().__dict__


def versions_of(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return the version counters of tensors, -1 for inference tensors, which have none."""
    try:
        return tuple(map(_version_of, tensors))
    except RuntimeError:
        return tuple([-1 if x.is_inference() else x._version for x in tensors])


def referent(reference: weakref.ref[T]) -> T | None:
    """Return the tensor or storage of a weak reference, None if it has been freed.

    The Python object of a tensor or storage lives as long as PyTorch keeps its C++ object; a reference to it pins
    nothing. PyTorch's own weak references (``_weak_ref``) pin the storage's header, and a header between two freed
    tensors stops malloc from joining their memory for a larger one.
    """
    found: Any = reference()
    if found is not None:
        found._fix_weakref()
    return found


class WeakStorage:
    """Weak reference to a storage."""

    __slots__ = ("_reference",)

    def __init__(self, storage: UntypedStorage) -> None:
        self._reference = weakref.ref(storage)

    def expired(self) -> bool:
        """Return whether the storage has been freed."""
        return referent(self._reference) is None

    def __call__(self) -> UntypedStorage | None:
        """Return the storage, None if it has been freed."""
        return referent(self._reference)
