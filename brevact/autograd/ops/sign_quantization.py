"""Fake quantization to signs, -1 and 1, or -1, 0 and 1, times a scale: saves codes, and a mask of clipped elements.

The gradients are those of the stock ops, which backward runs on other numbers with the same signs and the same clipped
elements. A weight's are computed from the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from brevact.autograd import known_values, storage_report
from brevact.autograd.keeper import EagerKeeper
from brevact.autograd.ops.base import Saving, load, save
from brevact.autograd.ops.fake_quantization import is_quantizable
from brevact.autograd.ops.recompute import compute_from_weight, gradients_of
from brevact.autograd.store import keep_mask, reported
from brevact.private_names.of_torch import DisableTorchFunction
from brevact.quantizers import Layout


@dataclass(frozen=True, eq=False)
class Signs:
    """How a binary or ternary forward quantizer turns x into the integers that the scale multiplies.

    ``of`` returns the integers of x under a scale, starting at -1 in steps, by differentiable ops. ``clips``: elements
    beyond the scale have no gradient, and the scale gets theirs. A zero stops the gradient.
    """

    of: Callable[[Tensor, Tensor], Tensor]
    bit_width: int
    step: int
    clips: bool = False
    has_zero: bool = False

    def quantized(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.of(x, scale) * scale


class _SignQuantization(Saving):
    @staticmethod
    def forward(ctx: Any, region: EagerKeeper, signs: Signs, x: Tensor, scale: Tensor) -> Tensor:
        q = signs.of(x, scale)
        out = q * scale
        decoder = known_values.IntegerCodes(
            Layout.of(q), signs.bit_width, -1, signs.step, out.nbytes, has_spare=signs.has_zero
        )
        tensors = decoder.encode(q, torch.zeros((), dtype=q.dtype, device=q.device), scale)
        known_values.register(out, tensors, decoder)
        codes = reported((tensors, decoder)) if ctx.needs_input_grad[3] or signs.has_zero else None
        passes = (x > scale).logical_or_(x < -scale).logical_not_() if signs.clips else None
        save(ctx, codes, None if passes is None else keep_mask(passes), exact=(scale,))
        ctx.signs, ctx.like = signs, (x.dtype, x.shape)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, mask, scale = load(ctx)
        dtype, shape = ctx.like
        q = torch.ones((), device=grad.device) if codes is None else codes.decoder.integers(codes.tensors)
        size = scale.detach().abs()
        x = q * (1000.0 * size + 1.0)  # beyond any threshold and bound
        if not ctx.signs.has_zero:
            x = torch.where(mask.decode(), q * (0.5 * size), x) if mask is not None else q
        x = x.to(dtype).expand(shape)
        return None, None, *gradients_of(ctx.signs.quantized, [x, scale], ctx.needs_input_grad[2:], grad)


def quantize_signs(region: EagerKeeper, signs: Signs, x: Tensor, scale: Tensor) -> Any:
    """Fake-quantize an activation or weight to signs times a scale; ``NotImplemented`` where stock ops must run."""
    if not is_quantizable(region, x, (scale,)):
        return NotImplemented
    storage_report.report_op(quantize_signs)
    if region.is_weight(x):
        return compute_from_weight(region, signs.quantized, x, scale)
    with DisableTorchFunction():
        return region.apply(_SignQuantization, signs, x, scale)
