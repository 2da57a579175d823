"""Unpack saved tensors for double backward: decoded, and attached to the graph.

Autograd attaches the result of an unpack hook to the graph in the saved tensor's place. Torch's gradient of an op then
is a function of the decoded tensor, and its second derivative is torch's own formula on decoded values.

The second graph saves decoded tensors again, and gradients. A region that is active meanwhile saves the same codes for
the former, which adds no error. Backward is linear in the incoming gradient, so the second derivative is linear in the
saved gradients: they are packed if all other tensors that the node saves are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.autograd import known_values, sharing
from brevact.autograd.decoders import SavedByHook, unpack
from brevact.autograd.saved import Decoder
from brevact.autograd.storages import storage_address

_is_grad_enabled = torch.is_grad_enabled

#: Nodes whose backward saves only gradients, decoded tensors and weights: the second derivative is nonlinear in none.
LINEAR_NODES = frozenset(
    f"{name}Backward0"
    for name in (
        *("Linear", "Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Convolution", "Mul", "Exp"),
        *("Softplus", "Elu", "Gelu", "Hardswish", "Tanh", "Sigmoid", "Softmax", "NativeLayerNorm", "NativeBatchNorm"),
    )
)
#: Nodes whose backward pass consists of products and a sigmoid; the second derivative is quadratic in its result.
CURVED_NODES = frozenset(("SiluBackward0",))


@dataclass(frozen=True, slots=True)
class _Again(Decoder):
    """Decodes an already decoded tensor again: without a loss, whatever the quantizer."""

    decoder: Decoder

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return self.decoder.decode(tensors)

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return self.decoder.described(tensors)


def unpack_attached(stored: SavedByHook | tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor, which autograd attaches to the graph; see :func:`~.decoders.unpack`."""
    if isinstance(stored, tuple):
        return unpack(stored)
    if not _is_grad_enabled():
        return stored.tensor()
    with torch.no_grad():
        tensors = stored.tensors()
        key = stored.decoder, *((storage_address(x), x.storage_offset(), x._version) for x in tensors[1:])
        shares = bool(tensors) and tensors[0].layout is torch.strided
        # by the first tensor that it is decoded from: several second graphs save the same one
        found = sharing.find(tensors[0], key) if shares else None
        if found is not None:
            return found[0][0]
        x = stored.decoder.decode(tensors)
    if not any(x is kept for kept in tensors):
        known_values.register(x, tensors, _Again(stored.decoder))
        if shares and not (x.is_conj() or x.is_neg()):
            sharing.add(tensors[0], key, (x,), None)
    return x
