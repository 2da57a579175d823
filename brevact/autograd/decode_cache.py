"""The small tensor that was decoded last, for the reader that comes next.

The readers of a chain follow each other in the backward pass: the layer behind an activation function asks for its
output, and the function for its input, which are both functions of what the norm has returned. Of small tensors the
calls to decode one take longer than the work, so that one is decoded for both. It lives until its codes are freed, or
the next one is decoded.
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


class _Held:
    """A decoded tensor, and what it was decoded from: codes, and weights, which are held as well."""

    __slots__ = ("_codes", "_decoder", "_values", "_versions", "_weights")

    def __init__(self, decoder: Any, tensors: tuple[Tensor, ...], values: Tensor) -> None:
        self._decoder, self._weights = decoder, tensors[1:]
        self._values: Tensor | None = values
        self._versions = [x._version for x in (values, *tensors)]
        self._codes = weakref.ref(tensors[0].untyped_storage(), self._drop)

    def _drop(self, reference: weakref.ref[UntypedStorage]) -> None:
        self._values, self._weights = None, ()

    def find(self, decoder: Any, tensors: tuple[Tensor, ...]) -> Tensor | None:
        """Return the tensor, if it is what this decoder makes of these tensors, and nobody has changed it."""
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
    """What this thread has decoded last."""

    held: _Held | None = None


_last = _Last()


def is_held(numel: int, codes: Tensor) -> bool:
    """Return whether a tensor of so many elements is decoded for several readers; those of a GPU would wait."""
    return numel <= MOST_HELD and type(codes) is Tensor and codes.is_cpu and not is_functorch_tensor(codes)


def decoded(decoder: Any, tensors: tuple[Tensor, ...], decode: Callable[[tuple[Tensor, ...]], Tensor]) -> Tensor:
    """Return a decoded tensor, which must not be written to, and hold it for who asks next.

    The decoder tells it from others of these tensors, of which the codes come first.
    """
    found = None if _last.held is None else _last.held.find(decoder, tensors)
    if found is None:
        _last.held = None  # its memory is free for the next one
        found = decode(tensors)
        _last.held = _Held(decoder, tensors, found)
    return found
