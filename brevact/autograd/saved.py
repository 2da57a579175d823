"""What stands for an activation until backward: tensors for autograd to save, and a decoder that reads them.

The decoder is a small object without tensors. Keeping the two apart lets every tensor travel through
``ctx.save_for_backward``: a node then frees its tensors as soon as it has run, and hooks around the region
(``save_on_cpu``, checkpoint) see them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

#: Data types of activations that are packed.
ACTIVATION_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))

#: Of those that are packed as pairs of real numbers.
COMPLEX_DTYPES = frozenset((torch.complex32, torch.complex64, torch.complex128))

NO_DOUBLE_BACKWARD = (
    "double backward (create_graph=True) through an op with backward-quantized activations needs a setting, "
    "double_backward=True: brevact.quantize_backward(model, double_backward=True), "
    "brevact.backward_quant(double_backward=True), StochBackward4bit.let(double_backward=True). Or run the part of the "
    "model that needs second derivatives at full precision (a policy rule with None, brevact.restore_backward(model), "
    "or outside brevact.backward_quant)"
)


class Decoder(Protocol):
    """Turns the kept tensors back into the activation, or into its product with a gradient."""

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor: ...

    def multiply(self, tensors: tuple[Tensor, ...], grad: Tensor) -> Tensor: ...

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        """Return how the activation is kept, for a report, and the bytes it has when decoded."""


def decoded_times(decoder: Decoder, tensors: tuple[Tensor, ...], grad: Tensor) -> Tensor:
    """``Decoder.multiply`` of those that first decode, and then multiply."""
    return grad * decoder.decode(tensors)


#: Tensors for autograd to save, and the decoder that reads them.
Saved = tuple[tuple[Tensor, ...], Decoder]


def one_object_each(make: Callable[P, R]) -> Callable[P, R]:
    """Let a function return the same object for equal arguments, so that a training step finds those of the last one.

    Equal are those of the same types: two kinds of NamedTuple with the same items are not.

    Symbols, of traced graphs with dynamic shapes, have no hash: with them it returns a new object.
    """
    cached = functools.lru_cache(maxsize=4096, typed=True)(make)

    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return cached(*args, **kwargs)
        except TypeError:
            return make(*args, **kwargs)

    return call
