"""Packing the inputs of a norm by a plan: what depends on sizes alone is worked out once, not in every step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.geometry import Place
from brevact.quantizers import passes
from brevact.quantizers.formats.uniform.quantizer import UniformQuantizer, plan_of
from brevact.quantizers.layout import Layout
from brevact.quantizers.normalizing import place_of, reciprocal_of
from brevact.quantizers.packed import PackedSpec
from brevact.quantizers.passes import UniformPlan


class NormalizedPlan(NamedTuple):
    """How float32 tensors of one layout are normalized by one mean and one deviation a channel, and packed.

    >>> x, mean, invstd = torch.randn(8, 4, 16), torch.zeros(4), torch.ones(4)
    >>> plan = plan_of_channels(UniformQuantizer(bit_width=8), Layout.of(x))
    >>> buffer = plan.quantize(x, mean, invstd, seed=0)
    >>> bool((plan.dequantize_centred(buffer, invstd) - x).abs().max() < 0.05)
    True

    Args:
        spec: Of the packed normalized values.
        plan: The same for the passes.
        place: Which statistics are whose.
    """

    spec: PackedSpec[UniformQuantizer]
    plan: UniformPlan
    place: Place

    def quantize(self, x: Tensor, mean: Tensor, invstd: Tensor, seed: int | None) -> Tensor:
        """Quantize (x - mean) * invstd; the bytes are those of :func:`quantize_normalized`.

        Args:
            x: Plain float32 tensor of the layout.
            mean: (C,) contiguous float32 means.
            invstd: (C,) contiguous float32 inverse deviations.
            seed: Signed 64-bit int; None for a quantizer that rounds to nearest.

        Returns:
            The stored bytes.
        """
        buffer = self.spec.empty(x)
        passes.quantize_normalized(x, self.plan, seed, mean, invstd, self.place, buffer)
        return buffer

    def dequantize_centred(self, buffer: Tensor, invstd: Tensor) -> Tensor:
        """Decode x less its means; the values are those of :func:`denormalize`.

        Args:
            buffer: The stored bytes.
            invstd: (C,) contiguous float32 inverse deviations.

        Returns:
            float32 tensor of the layout.
        """
        target = self.spec.layout.empty(buffer.device)
        passes.denormalize(buffer, self.plan, None, reciprocal_of(invstd), self.place, None, None, target)
        return target


@functools.lru_cache(maxsize=4096)
def plan_of_channels(quantizer: Any, layout: Layout) -> NormalizedPlan | None:
    """Plan of tensors whose second dimension is that of channels.

    Args:
        quantizer: Any activation quantizer.
        layout: Layout of the tensors.

    Returns:
        The plan; None for other formats than the uniform one, for other types than float32, for tensors with gaps or
        without elements, and where channels lie in an order that kernels do not know.
    """
    if not getattr(quantizer, "packs_by_plan", False) or layout.dtype is not torch.float32:
        return None
    if not layout.is_dense or layout.numel == 0 or len(layout.shape) < 2:
        return None
    found = place_of(layout, (1, layout.shape[1], *[1] * (len(layout.shape) - 2)))
    if found is None or found[1] is not None:
        return None
    spec = PackedSpec.of(quantizer, layout)
    return NormalizedPlan(spec, plan_of(spec), found[0])
