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
    """A decoded tensor, and what it was decoded from."""

    __slots__ = ("_decoder", "_sources", "_values", "_version")

    def __init__(self, decoder: Any, tensors: tuple[Tensor, ...], values: Tensor) -> None:
        self._decoder, self._version = decoder, values._version
        self._values: Tensor | None = values
        codes, *rest = (x.untyped_storage() for x in tensors)
        references = weakref.ref(codes, self._drop), *map(weakref.ref, rest)
        self._sources = [(storage, _place(x)) for storage, x in zip(references, tensors, strict=True)]

    def _drop(self, reference: weakref.ref[UntypedStorage]) -> None:
        self._values = None

    def find(self, decoder: Any, tensors: tuple[Tensor, ...]) -> Tensor | None:
        """Return the tensor, if it is what this decoder makes of these tensors, and nobody has changed it."""
        if decoder is not self._decoder or self._values is None or self._values._version != self._version:
            return None
        for x, (storage, place) in zip(tensors, self._sources, strict=True):
            if _place(x) != place or storage() is not x.untyped_storage():
                return None
        return self._values


def _place(x: Tensor) -> tuple[Any, ...]:
    """What tells a tensor from others in its storage: rows of one parameter are weights of several norms."""
    return x._version, x.storage_offset(), x.shape, x.stride(), x.dtype


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
