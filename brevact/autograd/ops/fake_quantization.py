"""Fake quantization in a forward pass: few-bit integers, one bit for what was clipped, few bits of what was rounded.

y = clip(round(x / s + z)), out = (y - z) s, with straight-through rounding. With the output gradient g, and m = 1 where
nothing was clipped: dL/dx = g m (in stock order: g s m / s), dL/ds = sum of g (y - z) - g s m (x / s) / s, and
x / s = y + r - z with the rounding residual r in [-1/2, 1/2]. Stored are the codes of y, exactly, which every op that
reads ``out`` shares (``brevact.autograd.known_values``); and, where the scale is learned, m and r together, r rounded
stochastically on fixed levels, so that dL/ds is unbiased; otherwise m in one bit. The gradients of x and z are exact.

A weight is there anyway: what its fake quantization needs is computed again from it.

Source: Learned step size quantization, arXiv:1902.08153, section 2.1; Brevitas, ``brevitas.core.quant``, whose
arithmetic and order of operations these are.
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
from brevact.autograd.saved import Saved
from brevact.autograd.settings import SaveMode
from brevact.autograd.store import keep_as_it_is, keep_mask, pack, reported
from brevact.private_names.of_torch import DisableTorchFunction
from brevact.quantizers import Layout, ResidualQuantizer, masked_fill_


@dataclass(frozen=True, eq=False)
class Integers:
    """How a forward quantizer gets from x / s + z to integers: it rounds, with the identity as its gradient, and clips.

    The minimum is there as a 0-d tensor and as a number, ``lowest``. The residual has the bounds of what rounding takes
    away, x - round(x). A narrow range leaves the last code to NaN, and rounding repeats if it gives the same integers
    of the same numbers again.
    """

    round: Callable[[Tensor], Tensor]
    clamp: Callable[[Tensor], Tensor]
    minimum: Tensor
    maximum: Tensor
    lowest: int
    bit_width: int
    residual: tuple[float, float]
    is_narrow: bool = False
    repeats: bool = True
    clips_gradients: bool = True

    def of(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x / s + z, its rounded values, and the integers they are clipped to."""
        shifted = x / scale + zero_point
        rounded = self.round(shifted)
        return shifted, rounded, self.clamp(rounded)

    def blocked(self, rounded: Tensor) -> Tensor | None:
        """Return the mask of clipped elements, which have no gradient (NaN is not clipped); None for no element."""
        if not self.clips_gradients:
            return None
        return (rounded > self.maximum).logical_or_(rounded < self.minimum)

    def quantized(
        self, x: Tensor, scale: Tensor, zero_point: Tensor, pre_scale: Tensor, pre_zero_point: Tensor
    ) -> Tensor:
        """Return the fake-quantized tensor."""
        return (self.of(x, pre_scale, pre_zero_point)[2] - zero_point) * scale


class _FakeQuantization(Saving):
    """Of an activation."""

    @staticmethod
    def forward(
        ctx: Any,
        region: EagerKeeper,
        integers: Integers,
        rectified: tuple[Tensor] | None,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        pre_scale: Tensor,
        pre_zero_point: Tensor,
    ) -> Tensor:
        values = x if rectified is None else rectified[0]
        shifted, rounded, q = integers.of(values, pre_scale, pre_zero_point)
        out = (q - zero_point) * scale
        blocked = integers.blocked(rounded)
        if rectified is not None:
            blocked = (values <= 0) if blocked is None else blocked.logical_or_(values <= 0)
        needs_scale, _, needs_pre_scale, _ = ctx.needs_input_grad[4:]
        codes = _codes(integers, q, zero_point, scale, out)
        kept: list[Saved | None] = [reported(codes) if needs_scale or needs_pre_scale else None, None, None, None]
        if needs_pre_scale and integers.clips_gradients and region.settings.residual_bit_width <= 8:
            kept[1] = _residual(region, integers, shifted.sub_(rounded), blocked)
        else:
            kept[2] = None if blocked is None else keep_mask(blocked.logical_not_())
            if needs_pre_scale:
                exactly = region.settings.residual_bit_width > 8
                kept[3] = keep_as_it_is(values) if exactly else region.keep(values)
        save(ctx, *kept, exact=(scale, pre_scale, pre_zero_point if pre_zero_point is not zero_point else None))
        ctx.clipped = None if kept[1] is None else integers.residual[0] - 1.0
        ctx.shapes = (scale.shape, zero_point.shape, pre_scale.shape, pre_zero_point.shape)
        ctx.dtype = q.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, residual, mask, values, scale, pre_scale, pre_zero_point = load(ctx)
        shifted = blocked = None
        q = None if codes is None else codes.decoder.integers(codes.tensors)
        if residual is not None:
            shifted = residual.decode()
            blocked = shifted == ctx.clipped
            if pre_zero_point is not None:
                shifted.add_(codes.tensors[1]).sub_(pre_zero_point)
            shifted.add_(q)  # clipped elements have some value here, their gradient is zero
        elif values is not None:
            shifted = values.decode() / pre_scale
        through = (grad * scale).to(ctx.dtype)
        if blocked is not None:
            clipped = masked_fill_(through.clone(), blocked, 0.0)
        else:
            clipped = through if mask is None else mask.multiply(through)
        needs = ctx.needs_input_grad[3:]
        return None, None, None, *_gradients(needs, ctx.shapes, grad, q, through, clipped, shifted, pre_scale)


def _gradients(
    needs: tuple[bool, ...],
    shapes: tuple[torch.Size, ...],
    grad: Tensor,
    q: Tensor | None,
    through: Tensor,
    clipped: Tensor,
    shifted: Tensor | None,
    pre_scale: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, scale, zero_point, pre_scale and pre_zero_point, each by the formula and order of stock ops.

    ``q`` are the integers less the zero point, ``through`` and ``clipped`` the gradients before the clipping and behind
    it, ``shifted`` is x / pre_scale; shapes are those of the last four.
    """
    needs_x, needs_scale, needs_zero_point, needs_pre_scale, needs_pre_zero_point = needs
    of_scale, of_zero_point, of_pre_scale, of_pre_zero_point = shapes
    return (
        clipped / pre_scale if needs_x else None,
        (grad * q).sum_to_size(of_scale) if needs_scale else None,
        (-through).sum_to_size(of_zero_point) if needs_zero_point else None,
        (-clipped * (shifted / pre_scale)).sum_to_size(of_pre_scale) if needs_pre_scale else None,
        clipped.sum_to_size(of_pre_zero_point) if needs_pre_zero_point else None,
    )


def _codes(integers: Integers, q: Tensor, zero_point: Tensor, scale: Tensor, out: Tensor) -> Saved:
    decoder = known_values.IntegerCodes(
        Layout.of(q), integers.bit_width, integers.lowest, 1, out.nbytes, integers.is_narrow
    )
    tensors = decoder.encode(q, zero_point, scale)
    known_values.register(out, tensors, decoder)
    return tensors, decoder


def _residual(region: EagerKeeper, integers: Integers, residual: Tensor, blocked: Tensor) -> Saved:
    low, high = integers.residual
    quantizer = ResidualQuantizer(bit_width=region.settings.residual_bit_width, low=low, high=high)
    state = masked_fill_(residual.clamp_(low, high), blocked, quantizer.clipped)
    seed = region.seeds.next(state.device)
    return reported(pack(state, quantizer, SaveMode.SAVE_QUANTIZED, seed))


class _WeightFakeQuantization(Saving):
    """Of a weight: all is computed again in the backward pass."""

    is_brevact = False  # what it returns is a weight

    @staticmethod
    def forward(ctx: Any, integers: Integers, *given: Tensor) -> Tensor:
        out = integers.quantized(*given)
        save(ctx, exact=given)
        ctx.integers = integers
        tensors = tuple(each.detach() for each in given)
        known_values.register(out, tensors, known_values.Recomputed(integers.quantized, out.nbytes))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *constants = load(ctx)
        scale, zero_point, pre_scale, pre_zero_point = constants
        integers = ctx.integers
        _, rounded, q = integers.of(x, pre_scale, pre_zero_point)
        blocked = integers.blocked(rounded)
        through = (grad * scale).to(q.dtype)
        clipped = through if blocked is None else masked_fill_(through.clone(), blocked, 0.0)
        shapes = tuple(each.shape for each in constants)
        needs = ctx.needs_input_grad[1:]
        return None, *_gradients(needs, shapes, grad, q - zero_point, through, clipped, x / pre_scale, pre_scale)


def fake_quantize(
    region: EagerKeeper,
    integers: Integers,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    pre_scale: Tensor,
    pre_zero_point: Tensor,
    before_relu: Tensor | None = None,
) -> Any:
    """Fake-quantize to integers: (clip(round(x / pre_scale + pre_zero_point)) - zero_point) * scale.

    Scales and zero points broadcast to the activation or weight ``x``; those before rounding are often the ones behind
    it. If ``x`` is a ReLU's output, ``before_relu`` is its input: the gradient goes there, and one mask stands for
    both; no zero point must have a gradient then, which elements at zero would add to. Returns ``NotImplemented`` where
    stock ops must run.
    """
    given = (scale, zero_point, pre_scale, pre_zero_point)
    weight = region.is_weight(x)
    if (
        not is_quantizable(region, x, given)
        or (weight and not integers.repeats)
        or (not weight and integers.bit_width > 8)
    ):
        return NotImplemented
    storage_report.report_op(fake_quantize)
    with DisableTorchFunction():
        if weight:
            return region.apply_to_weight(_WeightFakeQuantization, integers, x, *given)
        if before_relu is None:
            return region.apply(_FakeQuantization, integers, None, x, *given)
        return region.apply(_FakeQuantization, integers, (x,), before_relu, *given)


def is_quantizable(region: EagerKeeper, x: Any, given: tuple[Any, ...]) -> bool:
    """Return whether a Function quantizes a tensor: large enough, and by tensors that broadcast to its shape."""
    if not (region.is_activation(x) and all(region.is_activation(each) for each in given)):
        return False
    if x.numel() < max(region.settings.min_numel, 1) or any(each.device != x.device for each in given):
        return False
    return torch.broadcast_shapes(x.shape, *(each.shape for each in given)) == x.shape
