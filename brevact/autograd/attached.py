"""Saved tensors on their way back where gradients are differentiated again: decoded, in their places in the graph.

Autograd gives the result of an unpack hook the place in the graph of the saved tensor. Torch's own gradient of
an op is a function of the saved tensor then, whose values are the decoded ones: its second derivative is torch's own
formula on decoded values.

The second graph saves decoded tensors once more, and gradients. A region that is active while it is made keeps the same
codes for the former, which adds no other error. A gradient pass is linear in the gradient that it gets, so that the
second derivative is linear in the gradients that are saved: they are packed, where all else that a node saves is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.autograd import known_values
from brevact.autograd.decoders import SavedByHook, unpack
from brevact.autograd.saved import Decoder
from brevact.autograd.sharing import SharedPacks
from brevact.autograd.storages import storage_address

_is_grad_enabled = torch.is_grad_enabled
#: Decoded tensors by the first tensor that they are decoded of: several second graphs save one.
_shared = SharedPacks()

#: Nodes whose backward pass saves gradients, tensors that they have decoded, and weights: none that the second
#: derivative is curved in.
LINEAR_NODES = frozenset(
    f"{name}Backward0"
    for name in (
        *("Linear", "Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Convolution", "Mul", "Exp"),
        *("Softplus", "Elu", "Gelu", "Hardswish", "Tanh", "Sigmoid", "Softmax", "NativeLayerNorm", "NativeBatchNorm"),
    )
)
#: Nodes whose backward pass is made of products, and of a sigmoid, of whose result the second derivative is quadratic.
CURVED_NODES = frozenset(("SiluBackward0",))


@dataclass(frozen=True, slots=True)
class _Again(Decoder):
    """Decodes a tensor that has been decoded before: without a loss, whatever the quantizer."""

    decoder: Decoder

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return self.decoder.decode(tensors)

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return self.decoder.described(tensors)


def unpack_attached(stored: SavedByHook | tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor, which autograd gives its place in the graph; see :func:`~.decoders.unpack`."""
    if isinstance(stored, tuple):
        return unpack(stored)
    if not _is_grad_enabled():
        return stored.tensor()
    with torch.no_grad():
        tensors = stored.tensors()
        key = stored.decoder, *((storage_address(x), x.storage_offset(), x._version) for x in tensors[1:])
        shares = bool(tensors) and tensors[0].layout is torch.strided
        found = _shared.find(tensors[0], key) if shares else None
        if found is not None:
            return found[0][0]
        x = stored.decoder.decode(tensors)
    if not any(x is kept for kept in tensors):
        known_values.register(x, tensors, _Again(stored.decoder))
        if shares and not (x.is_conj() or x.is_neg()):
            _shared.add(tensors[0], key, (x,), None)
    return x
