"""What stands for an activation until backward: tensors for autograd to save, and a decoder that reads them.

The decoder is a small object without tensors. Keeping the two apart lets every tensor travel through
``ctx.save_for_backward``: a node then frees its tensors as soon as it has run, and hooks around the region
(``save_on_cpu``, checkpoint) see them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Decoder(Protocol):
    """Turns the kept tensors back into the activation, or into its product with a gradient."""

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor: ...

    def multiply(self, tensors: tuple[Tensor, ...], grad: Tensor) -> Tensor: ...

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        """Return how the activation is kept, for a report, and the bytes it has when decoded."""


#: Tensors for autograd to save, and the decoder that reads them.
Saved = tuple[tuple[Tensor, ...], Decoder]
