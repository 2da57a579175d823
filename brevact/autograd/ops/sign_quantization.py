"""Fake quantization to signs, -1 and 1, or -1, 0 and 1, times a scale: saves codes, and a mask of clipped elements.

The saved tensors, and the exact gradients, are those of integers (``fake_quantization``).
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
from brevact.autograd.store import keep_mask, reported
from brevact.private_names.of_torch import DisableTorchFunction
from brevact.quantizers import Layout


@dataclass(frozen=True, eq=False)
class Signs:
    """How a binary or ternary forward quantizer turns x into the integers that the scale multiplies.

    ``of`` returns the integers of x under a scale, starting at -1 in steps, and the mask of elements that are not
    clipped, or None. A zero stops the gradient.
    """

    of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    bit_width: int
    step: int
    has_zero: bool

    def quantized(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.of(x, scale)[0] * scale


class _SignQuantization(Saving):
    """Quantize an activation to signs; its bounds, the scale and its negative, get their own gradients."""

    @staticmethod
    def forward(
        ctx: Any, region: EagerKeeper, signs: Signs, x: Tensor, scale: Tensor, upper: Tensor, lower: Tensor
    ) -> Tensor:
        q, passes = signs.of(x, scale)
        out = q * scale
        needs_scale = ctx.needs_input_grad[3]
        decoder = known_values.IntegerCodes(
            Layout.of(q), signs.bit_width, -1, signs.step, out.nbytes, has_spare=signs.has_zero
        )
        tensors = decoder.encode(q, torch.zeros((), dtype=q.dtype, device=q.device), scale)
        known_values.register(out, tensors, decoder)
        codes = reported((tensors, decoder)) if needs_scale or signs.has_zero else None
        save(ctx, codes, None if passes is None else keep_mask(passes), exact=(scale,))
        ctx.has_zero, ctx.dtype = signs.has_zero, q.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, mask, scale = load(ctx)
        q = None if codes is None else codes.decoder.integers(codes.tensors)
        passes = None if mask is None else mask.decode()
        return None, None, *_sign_gradients(ctx.needs_input_grad[2:], ctx.has_zero, grad, q, passes, scale)


def _sign_gradients(
    needs: tuple[bool, ...], has_zero: bool, grad: Tensor, q: Any, passes: Tensor | None, scale: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of x, scale, upper and lower, by formulas and order of stock ops; ``q`` is None if none reads it."""
    needs_x, needs_scale, needs_upper, needs_lower = needs
    through = grad * scale
    clipped = through if passes is None else torch.where(passes, through, 0.0)
    of_upper = of_lower = None
    if needs_upper and passes is not None:
        of_upper = torch.where(passes | (q < 0), 0.0, through).sum_to_size(scale.shape)
    if needs_lower and passes is not None:
        of_lower = torch.where(passes | (q > 0), 0.0, through).sum_to_size(scale.shape).neg()
    return (
        (clipped * q.abs() if has_zero else clipped) if needs_x else None,
        (grad * q).sum_to_size(scale.shape) if needs_scale else None,
        of_upper,
        of_lower,
    )


class _WeightSignQuantization(Saving):
    """Quantize a weight to signs; backward recomputes them from the weight."""

    is_brevact = False  # its result is a weight

    @staticmethod
    def forward(ctx: Any, signs: Signs, x: Tensor, scale: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
        out = signs.quantized(x, scale)
        save(ctx, exact=(x, scale))
        ctx.signs = signs
        known_values.register(out, (x.detach(), scale.detach()), known_values.Recomputed(signs.quantized, out.nbytes))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = load(ctx)
        q, passes = ctx.signs.of(x, scale)
        return None, *_sign_gradients(ctx.needs_input_grad[1:], ctx.signs.has_zero, grad, q, passes, scale)


def quantize_signs(region: EagerKeeper, signs: Signs, x: Tensor, scale: Tensor, *, clipped: bool) -> Any:
    """Fake-quantize an activation or weight to -1 and 1, or -1, 0 and 1, times a scale that broadcasts to it.

    If ``clipped`` to minus and plus the scale first, the scale gets gradients through that, too. Returns
    ``NotImplemented`` where stock ops must run.
    """
    if not is_quantizable(region, x, (scale,)):
        return NotImplemented
    storage_report.report_op(quantize_signs)
    bound = scale if clipped else scale.detach()
    with DisableTorchFunction():
        if region.is_weight(x):
            return region.apply_to_weight(_WeightSignQuantization, signs, x, scale, bound, bound)
        return region.apply(_SignQuantization, signs, x, scale, bound, bound)
