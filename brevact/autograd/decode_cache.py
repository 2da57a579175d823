"""Small tensors that were decoded, for the readers that come next.

The readers of a chain follow each other in the backward pass: the layer behind an activation function asks for its
output, and the function for its input, which are both functions of the norm's output. Of small tensors the
calls to decode one take longer than the work, so that one is decoded for both. It lives until its codes are freed, or
the next one is decoded.

A weight that is recomputed, and read by many ops, is held from the second time on, with a few others. Small tensors
that codes of a forward quantizer stand for are held for the gates of a recurrent cell, which read the same state: two
megabytes in all, each as long as its codes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage

from brevact.private_names.of_torch import is_functorch_tensor

#: Elements of the largest tensor that is held: a few hundred kilobytes, and less work to decode than calls.
MOST_HELD = 1 << 18

#: Elements of all weights that are held.
MOST_OF_WEIGHTS = 1 << 21

#: Elements of all tensors that are held beside the codes of forward quantizers, from one clearance to the next.
MOST_BESIDE_CODES = 1 << 19


class _Decoded:
    """A decoded tensor, and its sources: codes, and weights, which are held as well."""

    __slots__ = ("_codes", "_decoder", "_values", "_versions", "_weights")

    def __init__(self, decoder: Any, tensors: tuple[Tensor, ...], values: Tensor) -> None:
        self._decoder, self._weights = decoder, tensors[1:]
        self._values: Tensor | None = values
        self._versions = [x._version for x in (values, *tensors)]
        self._codes = weakref.ref(tensors[0].untyped_storage(), self.drop)

    def drop(self, reference: weakref.ref[UntypedStorage] | None = None) -> None:
        """Give the tensor back: the weak reference holds this object, which would live as long as the codes."""
        self._values, self._weights = None, ()

    def find(self, decoder: Any, tensors: tuple[Tensor, ...]) -> Tensor | None:
        """Return the tensor, if this decoder made it of these tensors, and nobody has modified any of them."""
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
    """The tensor that this thread decoded last."""

    held: _Decoded | None = None


class _Weights(threading.local):
    """Weights that this thread has recomputed: by the decoder, how often, and the weight, its version, or None."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Any, tuple[int, Tensor | None, int]] = weakref.WeakKeyDictionary()

    def make_room(self, numel: int) -> None:
        """Let go of all weights if they and so many elements more would be too many."""
        held = {decoder: values.numel() for decoder, (_, values, _) in self.of.items() if values is not None}
        if numel + sum(held.values()) > MOST_OF_WEIGHTS:
            for decoder in held:
                self.of[decoder] = (1, None, 0)


class _BesideCodes(threading.local):
    """Tensors that this thread has decoded: by the storage of codes, the decoder, the tensor and its version."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[UntypedStorage, tuple[Any, Tensor, int]] = weakref.WeakKeyDictionary()
        self.elements = 0

    def hold(self, codes: UntypedStorage, decoder: Any, values: Tensor) -> None:
        """Hold a tensor as long as its codes; let go of all others once they and this one would be too many."""
        self.elements += values.numel()
        if self.elements > MOST_BESIDE_CODES:
            self.of.clear()
            self.elements = values.numel()
        self.of[codes] = decoder, values, values._version


_last, _weights, _beside_codes = _Last(), _Weights(), _BesideCodes()


def may_be_held(numel: int, codes: Tensor) -> bool:
    """Return whether a tensor of so many elements is decoded for several readers; those of a GPU would wait."""
    return numel <= MOST_HELD and type(codes) is Tensor and codes.is_cpu and not is_functorch_tensor(codes)


def _drop_last() -> None:
    if _last.held is not None:
        _last.held.drop()


def decoded(decoder: Any, tensors: tuple[Tensor, ...], decode: Callable[[tuple[Tensor, ...]], Tensor]) -> Tensor:
    """Return a decoded tensor, which must not be written to, and hold it for who asks next.

    The decoder tells it from others of these tensors, of which the codes come first.
    """
    found = None if _last.held is None else _last.held.find(decoder, tensors)
    if found is None:
        _drop_last()  # its memory is free for the next one
        found = decode(tensors)
        _drop_last()  # the source of this one
        _last.held = _Decoded(decoder, tensors, found)
    return found


def decoded_for_many(
    decoder: Any, tensors: tuple[Tensor, ...], decode: Callable[[tuple[Tensor, ...]], Tensor]
) -> Tensor:
    """Return a weight that is recomputed, which must not be written to, and hold it if it was asked for before.

    It lives as long as the decoder, of this one weight and the versions of ``tensors`` that it was made for.
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
    """Return a decoded tensor, which must not be written to, and hold it beside its codes, the first of ``tensors``."""
    codes = tensors[0].untyped_storage()
    found = _beside_codes.of.get(codes)
    if found is not None and found[0] is decoder and found[1]._version == found[2]:
        return found[1]
    values = decode(tensors)
    _beside_codes.hold(codes, decoder, values)
    return values
