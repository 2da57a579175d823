"""No quantization: for policies that pack only exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from brevact.quantizers import kernel_ops
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation, PackedSpec, Part
from brevact.quantizers.quantizer import Quantizer
from brevact.quantizers.traits import Traits


@dataclass(frozen=True)
class ElementsQuantizer(Quantizer):
    """Stores the elements of a tensor in their own type, as a source that layers and functions are computed from.

    Other than with :class:`LosslessQuantizer`, ops of a region run as with packed tensors: norms store their normalized
    input, and outputs that are cheap to recompute are not stored. Gradients are then exact but for roundings of their
    type.

    >>> import torch
    >>> x = torch.rand(8)
    >>> torch.equal(ElementsQuantizer().quantize(x).dequantize(), x)
    True
    """

    bit_width = 32
    """Of an element of the widest type: as good as it gets."""
    keeps_elements = True
    is_stochastic = False

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        return (Part("elements", torch.uint8, layout.numel * layout.dtype.itemsize),)

    def encode(self, dense: Tensor, spec: PackedSpec[Any], seed: int | Tensor | None, buffer: Tensor) -> None:
        buffer.view(dense.dtype).copy_(kernel_ops.flat_memory(dense.detach(), spec.layout.numel))

    def decode(self, buffer: Tensor, spec: PackedSpec[Any], target: Tensor, other: Tensor | None = None) -> None:
        values, flat = buffer.view(spec.layout.dtype), kernel_ops.flat_memory(target, spec.layout.numel)
        if other is None:
            flat.copy_(values)
        else:
            torch.mul(values, kernel_ops.flat_memory(other, spec.layout.numel), out=flat)


ELEMENTS = ElementsQuantizer()


@dataclass(frozen=True)
class LosslessQuantizer(Traits):
    """Stores a tensor exactly: a region keeps the tensor itself; a call makes a copy.

    >>> import torch
    >>> x = torch.rand(8)
    >>> torch.equal(LosslessQuantizer().quantize(x).dequantize(), x)
    True
    """

    is_exact = True

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Copy a floating-point tensor of any shape and strides."""
        return ELEMENTS.quantize(x)
