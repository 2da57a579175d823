"""Record, while a report is made, how autograd stores each tensor, and why."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from brevact.autograd.region.settings import bits_of
from brevact.autograd.saving.storages import bytes_of, storage_address

if TYPE_CHECKING:
    from brevact.autograd.saving.saved import Saved

#: Ways of storing a tensor.
PACKED, MASKED, EXACT, DERIVED, FULL_PRECISION = "packed", "mask", "exact", "derived", "full precision"
RECOMPUTED = "recomputed"

NO_QUANTIZER = "no quantizer applies"
NOT_NOISE = "a rounding error in it would not be noise on the gradient"
SMALL = "fewer elements than min_numel"
WEIGHT = "a weight, or computed from weights alone"
VARIABLE = "a variable that requires gradients: somebody holds it"
NEEDED = "indices, statistics and weights that the gradient needs"
NO_FLOATS = "not floating point: indices, or the workspace of a library"
OTHER_KIND = "a tensor of another kind: sparse, nested, or of a subclass"
OUT_OF_SIGHT = "saved by a compiled graph, or after an interrupt"
EXACT_POLICY = "the quantizer packs what is exact alone"
ON_BACKWARD = "quantized when backward starts"
ON_CONTEXT = "an attribute of the Function's context, which no hook sees"
OTHER_CODE = "other code saves it, and may compare it"
_EXACTLY = (NOT_NOISE, NEEDED, NO_FLOATS)


def other_code(label: str) -> str:
    return f"{OTHER_CODE}; a rule packs it: {{{label}: StochBackward4bit}}" if label else OTHER_CODE


@dataclass(frozen=True)
class SavedTensor:
    """How one tensor is stored.

    Args:
        how: "packed", "mask" (one bit per element), "exact" (its values matter: indices, statistics, codes), "derived"
            (a function of saved tensors) or "full precision".
        why: the reason, for a tensor that is neither packed nor a mask.
        tensor_bytes: bytes of the tensor as a plain op would store it.
        bit_width: bits per code of the packed tensor; 0 if there is none, or the quantizer has no bit width.
    """

    how: str
    why: str
    tensor_bytes: int
    bit_width: int = 0


class Recorder:
    """Records the torch function that runs, and how the tensors are saved that autograd is about to store.

    Code that saves a tensor calls ``report_saved``; hooks around the region, which see all tensors, call ``stored``.
    """

    def __init__(self) -> None:
        self.op = ""
        self._why = NO_QUANTIZER
        self._reported: dict[int, SavedTensor] = {}
        #: Addresses of storages that were saved at first and then given up for others.
        self.withdrawn: set[int] = set()
        #: Addresses of storages that replace others, with the addresses of those others.
        self.replaced: dict[int, int] = {}
        #: Rows of the tensors that the running compiled graph saves, and addresses of its inputs; None between graphs.
        self.graph: tuple[list[Any], set[int]] | None = None
        #: Whether one has run.
        self.has_graphs = False
        #: The report's own saved-tensor hooks, which hand tensors on unchanged.
        self.hooks: tuple[Callable, Callable] | None = None

    def report_op(self, func: Callable, why: str) -> None:
        self.op = getattr(func, "__name__", str(func))
        self._why = why
        self._reported.clear()

    def report_code(self, label: str) -> None:
        self.op = label
        self._reported.clear()

    def report_saved(self, kept: Saved, why: str = "") -> None:
        tensors, decoder = kept
        how, tensor_bytes = decoder.described(tensors)
        bit_width = bits_of(decoder.quality.quantizer)
        how = EXACT if how == FULL_PRECISION and why in _EXACTLY else how
        for x in tensors:
            self._reported[storage_address(x)] = SavedTensor(how, why, tensor_bytes, bit_width)
            tensor_bytes = 0

    def stored(self, x: Tensor) -> SavedTensor:
        """Return how a tensor that reaches the hooks around the region is saved."""
        found = self._reported.get(storage_address(x))
        if found is None:
            return SavedTensor(EXACT if self._why in _EXACTLY else FULL_PRECISION, self._why, bytes_of(x))
        return found


class _RecorderOfThread(threading.local):
    recorder: Recorder | None = None


_here = _RecorderOfThread()
#: Recorders of all threads; if empty, nobody need look for one.
recorders: list[Recorder] = []


def report_op(func: Callable, why: str = NEEDED) -> None:
    if _here.recorder is not None:
        _here.recorder.report_op(func, why)


def report_code(label: str) -> None:
    if _here.recorder is not None:
        _here.recorder.report_code(label)


@contextmanager
def running_graph(rows: list[Any], inputs: Sequence[Any]) -> Iterator[None]:
    """Report to this thread's recorder, if any, that a compiled graph runs, which saves these tensors."""
    recorder = Recorder() if _here.recorder is None else _here.recorder
    recorder.op, recorder._why, recorder.has_graphs = "", OUT_OF_SIGHT, True
    recorder.graph = [*rows], {storage_address(x) for x in inputs if isinstance(x, Tensor)}
    try:
        yield
    finally:
        recorder.graph = None


def report_saved(kept: Saved, why: str) -> None:
    if _here.recorder is not None:
        _here.recorder.report_saved(kept, why)


def withdraw(tensors: tuple[Tensor, ...]) -> None:
    if _here.recorder is not None:
        _here.recorder.withdrawn |= set(map(storage_address, tensors))


def are_of_report(hooks: tuple[Callable, Callable]) -> bool:
    return _here.recorder is not None and _here.recorder.hooks == hooks


def replace(tensors: tuple[Tensor, ...], new: Tensor) -> None:
    if _here.recorder is not None:
        (old,) = tensors
        _here.recorder.replaced[storage_address(new)] = storage_address(old)


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record the tensors that regions of this thread save."""
    outer, recorder = _here.recorder, Recorder()
    _here.recorder = recorder
    recorders.append(recorder)
    try:
        yield recorder
    finally:
        recorders.remove(recorder)
        _here.recorder = outer
