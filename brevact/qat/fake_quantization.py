"""Fake quantization in the forward pass. Saves integer codes, masks of clipped elements, and few-bit rounding errors.

y = clip(round(x / s + z)), out = (y - z) s, with straight-through rounding. With the output gradient g, and m = 1 where
nothing was clipped: dL/dx = g m (in stock order: g s m / s), dL/ds = sum of g (y - z) - g s m (x / s) / s, and
x / s = y + r - z with the rounding residual r in [-1/2, 1/2]. So dL/ds sums g (y - z) over clipped elements and -g r
over the others. The codes of y are saved exactly and shared with every op that saves ``out``
(``known_values``). If the scale is learned, m and r are saved together, r rounded stochastically to
fixed levels so that dL/ds is unbiased, or x is saved; otherwise m is saved in one bit. Until an op saves ``out``, one
bit per code suffices (``known_values``). The gradients of x and z are exact.

A weight stays in memory anyway, so its fake quantization saves nothing else and recomputes from it.

Source: Learned step size quantization, arXiv:1902.08153, section 2.1; Brevitas, ``brevitas.core.quant`` for arithmetic
and order of operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.deriving import known_values
from brevact.autograd.ops.base import Formula, Needs, compute_from_weight, gradients_of, save
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import Region, Saved
from brevact.autograd.saving.store import keep_exact, reported
from brevact.private_names.of_torch import DisableTorchFunction, top_hooks
from brevact.qat import integer_codes
from brevact.qat.one_pass import OnePass, Range, one_pass_for
from brevact.quantizers import ResidualQuantizer

#: Bits of the largest code, and of the largest residual.
_LARGEST_CODE = _MOST_RESIDUAL_BITS = 8


class Integers(NamedTuple):
    """How a forward quantizer turns x / s + z into integers: round (with an identity gradient), then clip.

    ``kind``: for kernels, which do everything in one pass; None for other roundings than to the nearest integer.
    ``lowest``: the smallest integer.
    """

    round: Callable[[Tensor], Tensor]
    clamp: Callable[[Tensor], Tensor]
    kind: Range | None
    lowest: int

    def quantized(self, x: Tensor, *given: Tensor) -> Tensor:
        """Return the values; ``given``: the scale and the zero point, and those before rounding."""
        one_pass = one_pass_for(self.kind, False, x, *given)
        return self.by_ops(x, *given) if one_pass is None else one_pass.values(x, *given[:2])

    def by_ops(self, x: Tensor, scale: Tensor, zero_point: Tensor, pre_scale: Tensor, pre_zero_point: Tensor) -> Tensor:
        return (self.clamp(self.round(x / pre_scale + pre_zero_point)) - zero_point) * scale

    def gradients(self, tensors: list[Tensor], needs: Needs, grad: Tensor) -> Sequence[Tensor | None]:
        one_pass = one_pass_for(self.kind, False, *tensors)
        if one_pass is None:
            return gradients_of(self.by_ops, tensors, needs, grad)
        x, scale, zero_point, *_ = tensors
        found = one_pass.gradients(grad, scale, zero_point, values=x.detach(), zero_learns=needs[2] or needs[4])
        return [each if needed else None for each, needed in zip(found, needs, strict=True)]


def fake_quantize(
    region: Region, integers: Integers, x: Tensor, *given: Tensor, rectifies: bool = False, zero_is_lowest: bool = False
) -> Any:
    """Fake-quantize to integers: (clip(round(x / pre_scale + pre_zero_point)) - zero_point) * scale.

    ``given``: scale and zero point, and those before rounding, which are often the same; they broadcast to the
    activation or weight ``x``. If it ``rectifies``, ``x`` is the input of a ReLU whose output is quantized: the
    gradient goes to ``x``, and one mask covers both ops. Elements at zero then add to the zero point's gradient, so a
    zero point may be learned only if the ReLU's output is saved. ``zero_is_lowest``: the zero point is known to be
    the lowest integer. Returns ``NotImplemented`` where stock ops must run.
    """
    (scale, zero_point, pre_scale, pre_zero_point), kind = given, integers.kind
    shares = pre_scale is scale and pre_zero_point is zero_point
    with DisableTorchFunction():  # under a mode each attribute of a tensor would be a call of its function
        if not is_quantizable(region, x, given[:2] if shares else given):
            return NotImplemented
        if region.is_weight(x):
            if rectifies:
                return NotImplemented
            storage_report.report_op(fake_quantize)
            return compute_from_weight(region, integers.quantized, x, *given, gradients=integers.gradients)
        if not shares or kind is None or kind.bit_width > _LARGEST_CODE:
            return NotImplemented
        residual_bits = region.settings.residual_bit_width
        in_bits = scale.requires_grad and kind.clips and residual_bits <= _MOST_RESIDUAL_BITS
        keeps_values = scale.requires_grad and not in_bits
        one_pass = one_pass_for(kind, rectifies, x, *given)
        if one_pass is None or (rectifies and zero_point.requires_grad and not keeps_values):
            return NotImplemented
        storage_report.report_op(fake_quantize)
        source, values = x, None
        if keeps_values and rectifies and one_pass.layout.dtype is x.dtype:
            values = one_pass.layout.empty(x.device)
        elif keeps_values and rectifies:
            source = x.detach().relu()  # the kernels would write another type
        residual_of = ResidualQuantizer(bit_width=residual_bits) if in_bits else None
        found = one_pass.quantize(
            *(source, scale, zero_point),
            keeps_mask=not scale.requires_grad and (kind.clips or rectifies),
            residual_of=residual_of,
            seed=region.seeds.next(x.device) if in_bits else None,
            values=values,
        )
        if found is None:
            return NotImplemented
        of_zero_point = zero_point.shape

        def run(ctx: Any, x: Tensor, *given: Tensor) -> Tensor:
            known_values.register(found.out, *found.codes, is_new=True)
            keeps_ends = in_bits and (not rectifies or zero_point.numel() == 1) and _may_keep_ends(found.codes[1])
            codes = None if keeps_ends or not in_bits else found.codes
            kept = [None if each is None else reported(each) for each in (codes, found.residual, found.mask)]
            if keeps_ends:
                kept[0] = _ends_of(found.codes, kind, rectifies, zero_is_lowest)
            of_relu = source if values is None else values
            kept.append(keep_exact(of_relu if rectifies else x) if keeps_values else None)
            save(ctx, *kept, exact=(given[0], given[1] if keeps_values else None))
            ctx.gradients = functools.partial(_gradients, one_pass, residual_of, of_zero_point, keeps_ends)
            return found.out

        return region.apply(Formula, run, None, x, *given)


def _gradients(
    one_pass: OnePass, residual_of: Any, sizes: torch.Size, keeps_ends: bool, needs: Needs, grad: Tensor, *kept: Any
) -> tuple[Tensor | None, ...]:
    codes, residual, mask, values, scale, zero_point = kept
    if keeps_ends:
        token, *numbers = codes.tensors
        codes = codes._replace(tensors=(integer_codes.load_ends(token), *numbers))
    if zero_point is None:
        zero_point = grad.new_zeros(sizes) if codes is None else codes.tensors[1]
    found = one_pass.gradients(
        *(grad, scale, zero_point),
        codes=None if codes is None else codes.tensors[0],
        mask=None if mask is None else mask.tensors[0],
        values=None if values is None else values.decode(),
        residual_of=residual_of,
        residual=None if residual is None else residual.tensors[0],
        zero_learns=needs[2] or needs[4],
    )
    return tuple(each if needed else None for each, needed in zip(found, needs, strict=True))


def _ends_of(
    codes: tuple[tuple[Tensor, ...], integer_codes.IntegerCodes], kind: Range, rectifies: bool, zero_is_lowest: bool
) -> Saved:
    """Return codes of one bit each, which are right until another op saves the whole ones."""
    (packed, *numbers), decoder = codes
    floor = None
    if rectifies and not zero_is_lowest:
        rounded = numbers[0].detach().reshape(()).to(decoder.layout.dtype).round()
        floor = rounded.clamp(kind.lowest, kind.highest).sub_(kind.lowest)
    ends = integer_codes.keep_ends(packed, decoder.bit_width, decoder.nbytes, top_hooks(True), floor)
    return (ends, *numbers), decoder


def _may_keep_ends(codes: integer_codes.IntegerCodes) -> bool:
    """Return whether one bit can replace each code until an op saves the output; not if one code is a NaN."""
    hooks = top_hooks(True)
    return (
        codes.bit_width in integer_codes.BIT_WIDTHS
        and not codes.has_spare
        and codes.layout.numel >= integer_codes.MIN_NUMEL
        and (hooks is None or storage_report.are_of_report(hooks))  # others would hand out a copy of the token
    )


def is_quantizable(region: Region, x: Any, given: tuple[Any, ...]) -> bool:
    if not region.is_activation(x) or x.numel() < max(region.settings.min_numel, 1):
        return False
    device = x.device
    for each in given:  # a loop: this runs in every call
        if not region.is_activation(each) or each.device != device:
            return False
    return _broadcast(x.shape, *[each.shape for each in given])


@functools.lru_cache(maxsize=4096)
def _broadcast(shape: torch.Size, *others: torch.Size) -> bool:
    return torch.broadcast_shapes(shape, *others) == shape
