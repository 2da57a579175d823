"""Saved tensors on their way back where gradients are differentiated again: decoded, in their places in the graph.

Autograd gives what an unpack hook returns the place in the graph of the tensor that was saved. Torch's own gradient of
an op is a function of the saved tensor then, whose values are the decoded ones: its second derivative is torch's own
formula on decoded values.

The second graph saves decoded tensors once more. A region that is active while it is made keeps the same codes for
them, and no other error is added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd import known_values
from brevact.autograd.decoders import SavedByHook, unpack
from brevact.autograd.saved import decoded_times

_is_grad_enabled = torch.is_grad_enabled


class _Again(NamedTuple):
    """Decodes what has been decoded before: without a loss, whatever the quantizer."""

    decoder: Any

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return self.decoder.decode(tensors)

    multiply = decoded_times

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return self.decoder.described(tensors)


def unpack_attached(stored: SavedByHook | tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor, which autograd gives its place in the graph; see :func:`~.decoders.unpack`."""
    if isinstance(stored, tuple):
        return unpack(stored)
    if not _is_grad_enabled():
        return stored.tensor()
    with torch.no_grad():
        if stored.unpack is None:
            tensors, x = stored.handles, stored.tensor()
        else:
            tensors = tuple(stored.unpack(handle) for handle in stored.handles)
            x = stored.decoder.decode(tensors)
    if not any(x is kept for kept in tensors):
        known_values.register(x, tensors, _Again(stored.decoder))
    return x
