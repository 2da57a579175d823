"""The record of a storage, which the storage carries, and weak references to it.

A tensor that several ops save (residual branches, q/k/v projections) is packed once for all of them. The record of its
storage finds packed forms by version counter, offset, shape and strides, and holds the packed tensors by weak
references: they live as long as some graph node keeps them. The version counter misses edits through ``x.data``, NumPy
or an address: a region that hands one out forgets the packed forms (:func:`end_known_values`).

A tensor without gradient, such as a batch or target, outlives the step that packed it. Only one root region uses its
random codes: otherwise a step's noise would depend on whether something, perhaps uncollected garbage, still holds the
codes of an earlier step.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage

from brevact.private_names.of_torch import DisableTorchFunction, parts_of_coo

T = TypeVar("T", Tensor, UntypedStorage)
Tensors = tuple[Tensor, ...]


def _count_of_a_lone_local() -> int:
    x = object()
    return sys.getrefcount(x)


#: Result of ``sys.getrefcount(x)``, called directly, if only the local ``x`` holds the object: 2, or 1 from Python 3.14
#: on, where the call borrows it. A wrapper around the call may or may not count its own argument.
LONE = _count_of_a_lone_local()

_version_of = operator.attrgetter("_version")
#: Attribute of a storage: its record.
_RECORD = "_brevact_record"


class Record:
    """Facts on the values in a storage, which carries them: a reused address is never taken for the old storage.

    Attributes:
        known: the saved form of the tensor that fills the storage (``known_values``).
        packs: the packed forms of the storage's tensors (:func:`share_packed`).
        held: a weak reference to the object by which an op saves the storage unpacked, and the version.
        offered: the stand-ins for the storage's tensors until an op saves these unpacked (``stand_ins``).
        saturates: whether the tensor is a saturating output.
        carried: the saturating outputs that the tensor is a function of.
        logs: the log-probabilities that the tensor is a sum of (``stand_ins.Logs``).
        of_sum: the probabilities of the last log-sum-exp of the storage, by its source.
        copied: bytes of the copies that were made of small views.
        is_made: whether integers in the storage were made by a region's op.
        ends: of packed codes, a weak reference to what saves their first bits, and its hooks (``integer_codes``).
        holder: of a token, what saves these first bits.
        place: of a token, its position in the forward pass; -1 for other tensors.
        is_exposed: whether somebody may write to the storage unseen at any time: nothing else is recorded then.
    """

    known: Any = None
    packs: _Packs | None = None
    held: tuple[weakref.ref[Any], int] | None = None
    offered: tuple[Any, ...] = ()
    ends: tuple[weakref.ref[Any], Any] | None = None
    holder: Any = None
    saturates = is_made = is_exposed = False
    copied, place = 0, -1
    carried: Tensors = ()
    logs: Any = None
    of_sum: dict[Any, Any] = {}  # noqa: RUF012


def find_record(x: Tensor) -> Record | None:
    try:
        found: Record | None = x.untyped_storage().__dict__.get(_RECORD)
    except (NotImplementedError, RuntimeError):  # no storage
        return None
    return found


def record_of(x: Tensor) -> Record | None:
    known = x.untyped_storage().__dict__
    found: Record | None = known.get(_RECORD)
    if found is None:
        found = known[_RECORD] = Record()
    return None if found.is_exposed else found


def end_known_values(x: Tensor, *, for_good: bool = False) -> None:
    """Forget saved forms, codes and masks of a storage that others may overwrite unseen, once or ``for_good``."""
    try:
        with DisableTorchFunction():
            known = x.untyped_storage().__dict__
    except (NotImplementedError, RuntimeError, ValueError):  # no storage
        return
    if for_good:
        known[_RECORD] = record = Record()
        record.is_exposed = True
    elif _RECORD in known and not known[_RECORD].is_exposed:
        del known[_RECORD]


def storage_address(x: Tensor) -> int:
    """Return the address of the storage object of ``x``; 0 for tensors without storage, such as a lazy module's."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError, ValueError):
        return 0


def parts_of(x: Tensor) -> Tensors:
    """Return the dense tensors that a sparse tensor consists of, or ``x`` itself."""
    if x.layout is torch.sparse_coo:
        return parts_of_coo(x)
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    return (x,)


def bytes_of(x: Tensor) -> int:
    """Return the bytes of a tensor's elements, or of a sparse tensor's values and indices."""
    return sum([part.numel() * part.itemsize for part in parts_of(x)])


def is_tracked(x: Tensor) -> bool:
    """Return whether the storage of ``x`` carries saved forms: registered ones, or packed ones of its tensors."""
    try:
        return bool(x.untyped_storage().__dict__)
    except (NotImplementedError, RuntimeError):  # no storage
        return False


def any_tracked(tensors: list[Tensor]) -> int:
    """Return whether the storage of any carries something: 2 if one is or carries a saturating output, else 1."""
    found = 0
    for x in tensors:
        try:
            known = x.untyped_storage().__dict__
        except (NotImplementedError, RuntimeError):  # no storage
            continue
        if known:
            found, record = 1, known.get(_RECORD)
            if record is not None and (record.saturates or record.carried):
                return 2
    return found


def is_offered(x: Tensor) -> bool:
    """Return whether an op saves a stand-in for ``x``, such as a packed copy, which it can give up."""
    found = find_record(x)
    return found is not None and bool(found.offered)


def note_held(x: Tensor, holder: Any) -> None:
    """Record that an op that needs ``x`` exactly saves it unpacked as long as ``holder`` lives."""
    record = None if x.is_inference() else record_of(x)
    if record is not None:
        record.held = weakref.ref(holder), x._version


def is_held(x: Tensor, record: Record) -> bool:
    """Return whether an op saves elements of the storage of ``x`` unpacked because it needs them exactly."""
    found = record.held
    return found is not None and found[0]() is not None and not x.is_inference() and found[1] == x._version


def note_made(x: Tensor, given: list[Tensor]) -> None:
    record = None if x._is_view() or any(x is other for other in given) else record_of(x)
    if record is not None:
        record.is_made = True


def is_made(x: Tensor) -> bool:
    record = find_record(x)
    return record is not None and record.is_made


def versions_of(tensors: Tensors) -> tuple[int, ...]:
    """Return the tensors' version counters, -1 for inference tensors, which have none."""
    try:
        return tuple(map(_version_of, tensors))
    except RuntimeError:
        return tuple([-1 if x.is_inference() else x._version for x in tensors])


def referent(reference: weakref.ref[T]) -> T | None:
    """Return the tensor or storage of a weak reference, None if it has been freed.

    The Python object lives as long as PyTorch keeps its C++ object; a weak reference to it pins nothing. PyTorch's own
    weak references (``_weak_ref``) pin the storage's header, and a header between two freed tensors stops malloc from
    joining their memory for a larger one.
    """
    found: Any = reference()
    if found is not None:
        found._fix_weakref()
    return found


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
        tensor: Any = self._tensor()
        if tensor is not None:
            tensor._fix_weakref()  # as in :func:`referent`
        elif self._storage is not None and (storage := referent(self._storage)) is not None:
            tensor = torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._view)
        return tensor


class _Packs(dict[tuple[Any, ...], tuple[list[_WeakTensor], Any, int]]):
    """The packed forms of the tensors in one storage, each with its root region's number, 0 for all regions."""

    sweep_at = _SWEEP_FLOOR

    def find(self, key: tuple[Any, ...], root: int = 0) -> tuple[Tensors, Any] | None:
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


def find_shared(
    x: Tensor, settings: tuple[Hashable, ...], root: int = 0, also: Callable[[Any], bool] | None = None
) -> tuple[Tensors, Any] | None:
    """Return the packed form of ``x``, a tensor with a storage, if a node still holds it.

    ``root``: number of the root region whose random codes of a tensor without gradient match; 0 matches any. ``also``:
    whether a decoder is accepted whose settings differ in their key's first item.
    """
    record = find_record(x)
    packs = None if record is None else record.packs
    if not packs or x.is_inference():
        return None
    sought = x._version, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_neg(), settings
    served = 0 if x.requires_grad else root
    found = packs.find(sought, served)
    if found is not None or also is None:
        return found
    for key in list(packs):
        if key != sought and key[:-1] == sought[:-1] and key[-1][1:] == settings[1:]:
            found = packs.find(key, served)
            if found is not None and also(found[1]):
                return found
    return None


def share_packed(x: Tensor, settings: tuple[Hashable, ...], tensors: Tensors, decoder: Any, root: int = 0) -> None:
    """Register a packed form, except of inference tensors and exposed storages; ``root``: 0 if codes are not random."""
    record = None if x.is_inference() else record_of(x)
    if record is None:
        return
    packs = record.packs
    if packs is None:
        packs = record.packs = _Packs()
    if len(packs) >= packs.sweep_at:  # it has doubled
        packs.sweep()
    source, references = x.untyped_storage()._cdata, []
    for tensor in tensors:
        references.append(_WeakTensor(tensor, source))
    key = x._version, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_neg(), settings
    packs[key] = references, decoder, 0 if x.requires_grad else root
