"""No quantization: what a policy stands for that packs only what is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from brevact.quantizers import kernel_ops
from brevact.quantizers.formats.uniform.quantizer import UniformQuantizer
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation, PackedSpec, Part

_EXACT = UniformQuantizer(bit_width=32)


@dataclass(frozen=True)
class LosslessQuantizer:
    """Stores a tensor as it is: a region keeps the tensor itself, by itself it makes a copy.

    >>> import torch
    >>> x = torch.rand(8)
    >>> torch.equal(LosslessQuantizer().quantize(x).dequantize(), x)
    True
    """

    is_exact: ClassVar[bool] = True

    @property
    def is_stochastic(self) -> bool:
        """Never: there is no rounding."""
        return False

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Copy a tensor.

        Args:
            x: Floating-point tensor of any shape and strides.
            seed: Unused.

        Returns:
            Its bytes.
        """
        return _EXACT.quantize(x)


@dataclass(frozen=True)
class ElementsQuantizer:
    """Stores the elements of a tensor in their own type, as a source that layers and functions are computed from.

    Other than with :class:`LosslessQuantizer`, ops of a region run as with packed tensors: norms store their normalized
    input, and outputs that are cheap to recompute are not stored. Gradients are then exact but for roundings of their
    type.

    >>> import torch
    >>> x = torch.rand(8)
    >>> torch.equal(ElementsQuantizer().quantize(x).dequantize(), x)
    True
    """

    bit_width: ClassVar[int] = 32
    """Of an element of the widest type: as good as it gets."""
    keeps_elements: ClassVar[bool] = True

    @property
    def is_stochastic(self) -> bool:
        """Never: there is no rounding."""
        return False

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """The bytes of the elements."""
        return (Part("elements", torch.uint8, layout.numel * layout.dtype.itemsize),)

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Copy a tensor.

        Args:
            x: Floating-point tensor of any shape and strides.
            seed: Unused.

        Returns:
            Its bytes.
        """
        spec = PackedSpec.of(self, Layout.of(x))
        buffer = spec.empty(x)
        buffer.view(x.dtype).copy_(spec.layout.flatten(x.detach()))
        return PackedActivation(spec, buffer)

    def decode(self, buffer: Tensor, spec: PackedSpec, target: Tensor) -> None:
        """Copy the elements to `target`."""
        kernel_ops.flat_memory(target, spec.layout.numel).copy_(buffer.view(spec.layout.dtype))

    def decode_multiply(self, buffer: Tensor, spec: PackedSpec, other: Tensor, target: Tensor) -> None:
        """Write the product of the elements and `other` to `target`."""
        values, numel = buffer.view(spec.layout.dtype), spec.layout.numel
        torch.mul(values, kernel_ops.flat_memory(other, numel), out=kernel_ops.flat_memory(target, numel))
