"""Packing the inputs of a norm by a plan: values that depend on sizes alone are computed once, not in every step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.geometry import Place
from brevact.quantizers import kernel_ops
from brevact.quantizers.backends import cpu_kernels
from brevact.quantizers.formats.uniform.quantizer import UniformQuantizer
from brevact.quantizers.kernel_ops import UniformPlan
from brevact.quantizers.layout import Layout
from brevact.quantizers.normalizing import plan_of_statistics, reciprocal_of
from brevact.quantizers.packed import PackedSpec


class NormalizedPlan(NamedTuple):
    """How tensors of one layout are normalized by one mean and one deviation a channel, packed, and decoded.

    >>> x, mean, invstd = torch.randn(8, 4, 16), torch.zeros(4), torch.ones(4)
    >>> plan = plan_of_channels(UniformQuantizer(bit_width=8), Layout.of(x))
    >>> buffer = plan.spec.empty(x)
    >>> kernel_ops.quantize_normalized(x, plan.plan, 0, mean, invstd, plan.place, buffer)
    >>> bool((plan.dequantize_centred(buffer, invstd) - x).abs().max() < 0.05)
    True

    Args:
        spec: Of the packed normalized values, in float32.
        plan: The same for the kernel ops.
        place: Which statistics are whose.
        layout: Of the tensors.
    """

    spec: PackedSpec[UniformQuantizer]
    plan: UniformPlan
    place: Place
    layout: Layout

    def matches(self, x: Tensor) -> bool:
        """Whether a kernel may add a tensor to decoded ones: both are of float32 and dense in the same memory order."""
        return x.dtype is self.layout.dtype is torch.float32 and self.layout.matches(x)

    def dequantize_centred(self, buffer: Tensor, invstd: Tensor) -> Tensor:
        """Decode x less its means; the values are those of :func:`denormalize`.

        Args:
            buffer: The stored bytes.
            invstd: (C,) contiguous float32 inverse deviations.

        Returns:
            Tensor of the layout.
        """
        return self.decode_affine(buffer, reciprocal_of(invstd), None)

    def decode_affine(
        self,
        buffer: Tensor,
        scale: Tensor,
        shift: Tensor | None,
        addend: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        overwrites: bool = False,
    ) -> Tensor:
        """Decode z * scale + shift, and what :func:`decode_in_one_pass` does beside, with the same values.

        Args:
            buffer: The stored bytes.
            scale: (C,) float32 factors.
            shift: (C,) float32 numbers; None for 0.
            addend: Tensor that :meth:`matches`; None for 0.
            mask: What `pack_mask` returned for such a tensor; None for no mask.
            overwrites: Whether the result may take the memory of `addend`.

        Returns:
            Tensor of the layout's type and memory order.
        """
        target = addend if addend is not None and overwrites else self.layout.empty(buffer.device)
        shift, scale = None if shift is None else shift.contiguous(), scale.contiguous()
        is_plain = type(buffer) is type(scale) is type(target) is Tensor and (shift is None or type(shift) is Tensor)
        kernels = cpu_kernels() if is_plain and addend is None and buffer.is_cpu else None
        arguments = buffer, self.plan, shift, scale, self.place, addend, mask, target
        (kernel_ops if kernels is None else kernels).denormalize(*arguments)
        return target


@functools.lru_cache(maxsize=4096)
def plan_of_channels(quantizer: Any, layout: Layout) -> NormalizedPlan | None:
    """Plan of tensors whose second dimension is that of channels.

    Args:
        quantizer: Any activation quantizer.
        layout: Layout of the tensors.

    Returns:
        The plan; None for other formats than the uniform one, for float64, for tensors with gaps or without elements,
        and where channels lie in an order that kernels do not know.
    """
    if not getattr(quantizer, "has_uniform_codes", False) or len(layout.shape) < 2:
        return None
    found = plan_of_statistics(quantizer, layout, (1, layout.shape[1], *[1] * (len(layout.shape) - 2)))
    if found is None or found.order is not None:
        return None
    return NormalizedPlan(found.spec, found.plan, found.place, layout)
