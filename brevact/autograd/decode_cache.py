"""Caches of small decoded tensors for their next readers.

Readers in a chain follow each other in backward: the layer behind an activation function needs its output, and the
function its input, both of them functions of the norm's output. For small tensors the calls take longer than the
work, so the norm's output is decoded once for both. It lives until its codes are freed, or the next tensor is decoded.

A recomputed weight that many ops read is held from its second computation on, with a few others. Small tensors decoded
from a forward quantizer's codes are held for the gates of a recurrent cell, which read the same state: two megabytes in
all, each as long as its codes.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from brevact.autograd.storages import versions_of
from brevact.private_names.of_torch import is_functorch_tensor

#: Elements of the largest tensor that is held: a few hundred kilobytes, which decode faster than the calls take.
MOST_HELD = 1 << 18

Decode = Callable[[tuple[Tensor, ...]], Tensor]


class Cache(threading.local):
    """This thread's decoded tensors, held while its owner lives; at most ``most`` elements, or one tensor if 0."""

    def __init__(self, most: int) -> None:
        self._most, self._elements = most, 0
        self._of: dict[weakref.ref[Any], tuple[Any, ...]] = {}

    def decoded(self, owner: Any, decoder: Any, tensors: tuple[Tensor, ...], decode: Decode) -> Tensor:
        """Return a decoded tensor, which must not be modified; decode it unless it is held and nothing has changed."""
        found = self._of.get(weakref.ref(owner))
        if found is not None:
            values, known, others, versions = found
            is_same = known is decoder and len(others) == len(tensors) - 1
            is_same = is_same and all(map(operator.is_, others, tensors[1:]))
            if is_same and versions_of((values, *tensors)) == versions:
                return values
        if not self._most:
            self._of.clear()  # frees its memory for the next one
        values = decode(tensors)
        if type(values) is Tensor and values.numel() <= MOST_HELD and not is_functorch_tensor(values):
            self._elements += values.numel()
            if self._elements > self._most:
                self._of.clear()
                self._elements = values.numel()
            self._of[weakref.ref(owner, self._of.pop)] = values, decoder, tensors[1:], versions_of((values, *tensors))
        return values


_last, weights, beside_codes = Cache(0), Cache(1 << 21), Cache(1 << 19)
#: Decoders that have computed their weight once.
_computed: weakref.WeakSet[Any] = weakref.WeakSet()


def may_be_held(numel: int, codes: Tensor) -> bool:
    """Return whether a tensor of ``numel`` elements is decoded once for several readers; a GPU would wait for it."""
    return numel <= MOST_HELD and type(codes) is Tensor and codes.is_cpu and not is_functorch_tensor(codes)


def decoded(decoder: Any, tensors: tuple[Tensor, ...], decode: Decode) -> Tensor:
    """Return a decoded tensor and hold it for the next reader; the key is the decoder and ``tensors``, codes first."""
    return _last.decoded(tensors[0].untyped_storage(), decoder, tensors, decode)


def decoded_for_many(decoder: Any, tensors: tuple[Tensor, ...], decode: Decode) -> Tensor:
    """Return a recomputed weight, and hold it from its second computation on, as long as its own decoder lives."""
    if decoder in _computed:
        return weights.decoded(decoder, None, tensors, decode)  # an entry that held its owner would never end
    _computed.add(decoder)
    return decode(tensors)


def decoded_beside_codes(decoder: Any, tensors: tuple[Tensor, ...], decode: Decode) -> Tensor:
    """Return a decoded tensor, and hold it beside its codes, the first of ``tensors``."""
    return beside_codes.decoded(tensors[0].untyped_storage(), decoder, tensors, decode)
