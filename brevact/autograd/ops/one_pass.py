"""Fake quantization in one pass over the elements forward and one backward, where kernels support its arithmetic.

They support tensors on the CPU and on GPUs (copied if they have gaps in memory), with one scale or several, in the
tensor's own dtype or float32: one scale per index of a dimension or of several, or one per group of elements. Saved
bytes and gradients equal those of the ops of ``fake_quantization`` bit for bit.

The gradient of a scale, and of a learned zero point, is a sum. On the CPU, kernels add in torch's order. On a GPU they
write the terms and torch adds them, so the sum equals that of stock ops on that GPU. With few-bit residuals in place of
x, bits are not guaranteed: kernels write sums of eight terms, first to last (``integer_ops.fake_quantize_backward``),
and torch adds these in an order that depends on sizes alone.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.known_values import IntegerCodes, flat_numbers, groups_of
from brevact.autograd.saved import Saved, decoder_of_mask, decoder_of_packed
from brevact.geometry import DEFAULT_BLOCK, IntegerPlan, IntegerRounding, packed_bytes
from brevact.private_names.of_torch import no_dispatch_modes
from brevact.quantizers import Layout, PackedSpec, ResidualQuantizer
from brevact.quantizers.backends import kernels_for
from brevact.quantizers.integer_ops import fake_quantize, fake_quantize_backward

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Kind(NamedTuple):
    bit_width: int
    lowest: int
    highest: int
    rounding: IntegerRounding
    clips: bool
    has_spare: bool


class OnePass(NamedTuple):
    """How kernels quantize tensors of given sizes.

    ``layout`` is the result's. ``by_group``: there are several scales, and torch adds their gradients. ``order``
    permutes the scales' dimensions to memory order; None if they are in it already.
    """

    plan: IntegerPlan
    layout: Layout
    code_decoder: IntegerCodes
    mask_decoder: Any
    by_group: bool
    order: tuple[int, ...] | None

    def quantize(
        self,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        *,
        keeps_mask: bool,
        residual_of: ResidualQuantizer | None,
        seed: int | Tensor | None,
        values: Tensor | None,
    ) -> Quantized | None:
        """Quantize and pack the tensors that the gradient needs; None if a NaN has no code.

        ``x`` may be the input or output of a ReLU, whose output ``values`` receives. ``residual_of`` packs
        rounding errors.
        """
        plan, layout = self.plan, self.layout
        x = self._dense(x)
        out = layout.empty(x.device)
        codes = x.new_empty(packed_bytes(plan.numel, plan.bit_width, DEFAULT_BLOCK), dtype=torch.uint8)
        mask = x.new_empty(packed_bytes(plan.numel, 1, DEFAULT_BLOCK), dtype=torch.uint8) if keeps_mask else None
        spec = None if residual_of is None else PackedSpec.of(residual_of, layout)
        residual = None if spec is None else spec.empty(x)
        missing = None if plan.has_spare else x.new_zeros(1, dtype=torch.uint8)
        numbers = self._flat(scale, zero_point)
        fake_quantize(x, plan, *numbers, residual_of, seed, out, values, codes, mask, residual, missing)
        offset = zero_point.detach().clone()
        if missing is not None and x.is_cpu:
            if missing.item():
                return None
        elif missing is not None:  # no GPU synchronization: all decoded values become NaN
            offset.masked_fill_(missing.view(torch.bool).view(()), torch.nan)
        kept_codes = (codes, offset, scale.detach()), self.code_decoder
        kept_mask = None if mask is None else ((mask,), self.mask_decoder)
        kept_residual = None if residual is None or spec is None else ((residual,), decoder_of_packed(spec))
        return Quantized(out, kept_codes, kept_mask, kept_residual)

    def values(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        out, x = self.layout.empty(x.device), self._dense(x)
        fake_quantize(x, self.plan, *self._flat(scale, zero_point), None, None, out, *[None] * 5)
        return out

    def gradients(
        self,
        grad: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        *,
        codes: Tensor | None = None,
        mask: Tensor | None = None,
        values: Tensor | None = None,
        residual_of: ResidualQuantizer | None = None,
        residual: Tensor | None = None,
        zero_learns: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Return gradients of x, scale, zero point, and pre-rounding scale and zero point, as stock ops do.

        Scales' are None if only a mask is saved; zero points' are None unless they are learned. Without codes,
        everything is recomputed from ``values``, the ReLU's output.
        """
        plan, layout, given = self.plan, self.layout, grad
        if not layout.matches(grad):
            grad = self._dense(grad)
        values = None if values is None else self._dense(values)
        target, rows = torch.empty_like(grad), 4 if zero_learns else 2
        terms = sums = parts = None
        if codes is not None or values is not None or zero_learns:
            if not grad.is_cpu and residual is not None and not self.by_group:
                parts = grad.new_empty(
                    rows, -(-plan.numel // DEFAULT_BLOCK) * (DEFAULT_BLOCK // 8), dtype=torch.float32
                )
            elif self.by_group or grad is not given or grad.dtype is not torch.float32 or not grad.is_cpu:
                terms = _terms(grad, rows, plan.numel)  # torch adds them in its own order
            else:
                sums = grad.new_empty(rows)
        fake_quantize_backward(
            *(grad, plan, *self._flat(scale, zero_point), residual_of, codes, mask, values, residual),
            *(target, terms, sums, parts),
        )
        first = 0 if codes is not None or values is not None else 2
        found: list[Tensor | None] = [None] * 4
        if terms is not None:
            for place in range(first, rows):
                each = layout.restore(terms[place])
                if grad is not given and (place in (0, 2) or not plan.clips):  # the order in which stock ops add
                    each = torch.empty_like(given).copy_(each)
                found[place] = each.sum_to_size(scale.shape if place < 2 else zero_point.shape)
        elif sums is not None or parts is not None:
            totals = (parts.sum(1) if sums is None else sums).unbind()  # type: ignore[union-attr]
            for place in range(first, rows):
                number = scale if place < 2 else zero_point
                found[place] = totals[place].view(number.shape) if number.dim() else totals[place]
        if grad is not given and not plan.clips:  # without a mask in x's order, stock ops keep the gradient's
            target = torch.empty_like(given).copy_(target)
        of_scale, of_pre_scale, of_zero_point, of_pre_zero_point = found
        return target, of_scale, of_zero_point, of_pre_scale, of_pre_zero_point

    def _flat(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        if not self.by_group:
            return scale, zero_point
        dims = len(self.layout.shape)
        return flat_numbers(scale, self.order, dims), flat_numbers(zero_point, self.order, dims)

    def _dense(self, x: Tensor) -> Tensor:
        is_dense = x.dtype is self.layout.dtype and self.layout.matches(x)
        return x if is_dense else self.layout.empty(x.device).copy_(x.detach())

    def takes(self, grad: Tensor) -> bool:
        if grad.dtype is not self.layout.dtype:
            return False
        if self.layout.matches(grad):
            return True
        own, is_known = Layout.of(grad), self.plan.clips or not self.plan.rectifies
        return is_known and own.is_dense and own.numel == self.layout.numel and not grad.is_neg()


class Quantized(NamedTuple):
    out: Tensor
    codes: tuple[tuple[Tensor, ...], IntegerCodes]
    mask: Saved | None
    residual: Saved | None


def one_pass_for(
    kind: Kind, rectifies: bool, x: Tensor, scale: Tensor, zero_point: Tensor, pre_scale: Tensor, pre_zero_point: Tensor
) -> OnePass | None:
    if not (_is_same(pre_scale, scale) and _is_same(pre_zero_point, zero_point)):
        return None
    if not x.is_cpu and kernels_for((x, scale, zero_point)) is None:
        return None
    if x.dtype not in _TYPES or scale.dtype not in _TYPES or zero_point.dtype not in _TYPES:
        return None
    dtype = x.dtype
    if scale.dim() and scale.dtype is zero_point.dtype is torch.float32:
        dtype = torch.float32  # the dtype of torch's computation and result
    elif dtype is torch.float32:
        if not scale.dtype is zero_point.dtype is torch.float32:
            return None
    elif kind.bit_width > 8 or not all(each.dim() == 0 or each.dtype is x.dtype for each in (scale, zero_point)):
        return None  # torch computes in another type, or its ends are no numbers of 16 bits
    if x.is_neg() or scale.is_neg() or zero_point.is_neg():
        return None
    if rectifies and kind.has_spare and x.is_cpu and scale.isnan().any():
        return None  # a ReLU's gradient is 0 behind the division by NaN
    if x.is_cpu and dtype is not torch.float32 and not _is_number_of(zero_point, dtype):
        return None  # torch rounds addends, but not factors
    return _one_pass(kind, rectifies, x.shape, x.stride(), dtype, scale.shape, zero_point.shape)


def _is_number_of(zero_point: Tensor, dtype: torch.dtype) -> bool:
    return zero_point.dtype is dtype or torch.equal(zero_point.detach().to(dtype).to(zero_point.dtype), zero_point)


@functools.lru_cache(maxsize=4096)
def _one_pass(
    kind: Kind,
    rectifies: bool,
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    of_scale: torch.Size,
    of_zero_point: torch.Size,
) -> OnePass | None:
    with no_dispatch_modes():  # a selective checkpoint counts ops, and would miss these when it recomputes
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        scale, zero_point = (torch.empty(sizes, dtype=dtype, device="meta") for sizes in (of_scale, of_zero_point))
        quotient = like / scale + zero_point
    result = Layout.of(quotient)
    if not result.numel or not result.is_dense or result.shape != shape:
        return None
    places = groups_of(result, of_scale, of_zero_point)
    if places is None:
        return None
    inner, groups, repeats, rows, order = places
    plan = IntegerPlan(
        result.numel, kind.bit_width, kind.lowest, kind.highest, kind.rounding, rectifies, kind.clips, kind.has_spare,
        inner, groups, repeats, rows,
    )  # fmt: skip
    decoder = IntegerCodes(result, kind.bit_width, kind.lowest, 1, dtype.itemsize * result.numel, kind.has_spare)
    mask_layout = Layout.of_sizes(result.shape, result.stride, torch.bool)
    return OnePass(plan, result, decoder, decoder_of_mask(mask_layout, 0.0), groups > 1, order)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share memory: autograd returns saved tensors as new objects."""
    if one is other:
        return True
    is_alike = one.shape == other.shape and one.stride() == other.stride() and one.dtype is other.dtype
    return is_alike and one.device == other.device and one.data_ptr() == other.data_ptr()


def _terms(grad: Tensor, rows: int, numel: int) -> Tensor:
    """Return memory for the terms of sums: on a GPU, torch's order of a sum depends on its address."""
    return grad.new_empty(rows, numel if grad.is_cpu else -(-numel // 64) * 64)[:, :numel]
