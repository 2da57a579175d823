"""Cache of small decoded tensors, for their next readers.

Readers in a chain follow each other in backward: the layer behind an activation function needs its output, and the
function its input, both of them functions of the norm's output. For small tensors the calls take longer than the
work, so the norm's output is decoded once for both. It lives until its codes are freed, or the next tensor is decoded.

A recomputed weight that many ops read is held from its second computation on, with a few others. Small tensors decoded
from a forward quantizer's codes are held for the gates of a recurrent cell, which read the same state: two megabytes in
all, each as long as its codes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage

from brevact.private_names.of_torch import is_functorch_tensor

#: Elements of the largest tensor that is held: a few hundred kilobytes, which decode faster than the calls take.
MOST_HELD = 1 << 18

#: Elements of all held weights.
MOST_OF_WEIGHTS = 1 << 21

#: Elements of all tensors held beside forward quantizers' codes, between two clearances.
MOST_BESIDE_CODES = 1 << 19


class _Decoded:
    """A decoded tensor, and its sources: codes (weakly referenced) and weights."""

    __slots__ = ("_codes", "_decoder", "_values", "_versions", "_weights")

    def __init__(self, decoder: Any, tensors: tuple[Tensor, ...], values: Tensor) -> None:
        self._decoder, self._weights = decoder, tensors[1:]
        self._values: Tensor | None = values
        self._versions = [x._version for x in (values, *tensors)]
        self._codes = weakref.ref(tensors[0].untyped_storage(), self.drop)

    def drop(self, reference: weakref.ref[UntypedStorage] | None = None) -> None:
        """Free the tensor: the weak reference's callback keeps this object alive as long as the codes."""
        self._values, self._weights = None, ()

    def find(self, decoder: Any, tensors: tuple[Tensor, ...]) -> Tensor | None:
        """Return the tensor if this decoder made it from these tensors, and none has been modified since."""
        values = self._values
        if values is None or decoder is not self._decoder or len(tensors) != len(self._weights) + 1:
            return None
        for x, weight in zip(tensors[1:], self._weights, strict=True):
            if x is not weight:
                return None
        if [x._version for x in (values, *tensors)] != self._versions:
            return None
        return values if self._codes() is tensors[0].untyped_storage() else None


class _Last(threading.local):
    held: _Decoded | None = None


class _Weights(threading.local):
    """Weights that this thread has recomputed, by decoder: number of computations, the weight or None, its version."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Any, tuple[int, Tensor | None, int]] = weakref.WeakKeyDictionary()

    def make_room(self, numel: int) -> None:
        """Drop all weights if ``numel`` more elements would exceed the limit."""
        held = {decoder: values.numel() for decoder, (_, values, _) in self.of.items() if values is not None}
        if numel + sum(held.values()) > MOST_OF_WEIGHTS:
            for decoder in held:
                self.of[decoder] = (1, None, 0)


class _BesideCodes(threading.local):
    """Tensors that this thread has decoded, by their codes' storage: the decoder, the tensor and its version."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[UntypedStorage, tuple[Any, Tensor, int]] = weakref.WeakKeyDictionary()
        self.elements = 0

    def hold(self, codes: UntypedStorage, decoder: Any, values: Tensor) -> None:
        """Hold a tensor as long as its codes; drop all others if it would exceed the limit."""
        self.elements += values.numel()
        if self.elements > MOST_BESIDE_CODES:
            self.of.clear()
            self.elements = values.numel()
        self.of[codes] = decoder, values, values._version


_last, _weights, _beside_codes = _Last(), _Weights(), _BesideCodes()


def may_be_held(numel: int, codes: Tensor) -> bool:
    """Return whether a tensor of ``numel`` elements is decoded once for several readers; a GPU would wait for it."""
    return numel <= MOST_HELD and type(codes) is Tensor and codes.is_cpu and not is_functorch_tensor(codes)


def _drop_last() -> None:
    if _last.held is not None:
        _last.held.drop()


def decoded(decoder: Any, tensors: tuple[Tensor, ...], decode: Callable[[tuple[Tensor, ...]], Tensor]) -> Tensor:
    """Return a decoded tensor, which must not be modified, and hold it for the next reader.

    The key is the decoder and ``tensors``, the codes first.
    """
    found = None if _last.held is None else _last.held.find(decoder, tensors)
    if found is None:
        _drop_last()  # frees its memory for the next one
        found = decode(tensors)
        _drop_last()  # held while decoding this one's source
        _last.held = _Decoded(decoder, tensors, found)
    return found


def decoded_for_many(
    decoder: Any, tensors: tuple[Tensor, ...], decode: Callable[[tuple[Tensor, ...]], Tensor]
) -> Tensor:
    """Return a recomputed weight, which must not be modified, and hold it from its second computation on.

    It lives as long as the decoder, which belongs to this weight and these versions of ``tensors`` alone.
    """
    count, values, version = _weights.of.get(decoder, (0, None, 0))
    if values is not None and values._version == version:
        return values
    values = decode(tensors)
    if type(values) is Tensor and values.numel() <= MOST_HELD and not is_functorch_tensor(values):
        if count:
            _weights.make_room(values.numel())
        _weights.of[decoder] = (count + 1, values if count else None, values._version)
    return values


def decoded_beside_codes(
    decoder: Any, tensors: tuple[Tensor, ...], decode: Callable[[tuple[Tensor, ...]], Tensor]
) -> Tensor:
    """Return a decoded tensor, which must not be modified, and hold it beside its codes, the first of ``tensors``."""
    codes = tensors[0].untyped_storage()
    found = _beside_codes.of.get(codes)
    if found is not None and found[0] is decoder and found[1]._version == found[2]:
        return found[1]
    values = decode(tensors)
    _beside_codes.hold(codes, decoder, values)
    return values
