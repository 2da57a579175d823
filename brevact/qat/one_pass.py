"""Fake quantization in one pass over the elements forward and one backward, where kernels support its arithmetic.

They support tensors on the CPU and on GPUs (copied if they have gaps in memory), with one scale or several, in the
tensor's own dtype or float32: one scale per index of a dimension or of several, or one per group of neighbours.
Results and gradients equal those of Brevitas' ops bit for bit.

The gradient of a scale, and of a learned zero point, is a sum. Kernels write the terms and torch adds them, so the sum
equals that of stock ops on the device. With few-bit residuals in place of x, bits are not guaranteed: kernels write
sums of eight terms, first to last (``integer_ops.fake_quantize_backward``), and torch adds these in an order that
depends on sizes alone.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.saving.saved import Saved, decoder_of_mask, decoder_of_packed
from brevact.geometry import DEFAULT_BLOCK, IntegerPlan, packed_bytes
from brevact.private_names.of_torch import no_dispatch_modes
from brevact.qat.integer_codes import IntegerCodes, groups_of
from brevact.quantizers import Layout, PackedSpec, ResidualQuantizer
from brevact.quantizers.backends import kernels_for
from brevact.quantizers.integer_ops import fake_quantize, fake_quantize_backward

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Range(NamedTuple):
    """Integers that kernels round to the nearest; a narrow range reserves the last, spare code for NaN."""

    bit_width: int
    lowest: int
    highest: int
    clips: bool
    has_spare: bool


class OnePass(NamedTuple):
    """How kernels quantize tensors of given sizes.

    ``layout`` is the result's. ``by_group``: there are several scales, and torch adds their gradients.
    """

    plan: IntegerPlan
    layout: Layout
    code_decoder: IntegerCodes
    mask_decoder: Any
    by_group: bool

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

        ``x`` may be the input or output of a ReLU, whose output ``values`` receives. ``residual_of`` packs rounding
        errors.
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
        plan, layout = self.plan, self.layout
        own = None if layout.matches(grad) else Layout.of(grad)
        # Stock ops add in the order of a gradient without gaps, and in that of the result for others.
        like = None if own is None or not own.is_dense or own.numel != plan.numel else grad
        grad, values = self._dense(grad), None if values is None else self._dense(values)
        target, rows = torch.empty_like(grad), 4 if zero_learns else 2
        terms = parts = None
        if codes is not None or values is not None or zero_learns:
            if residual is not None and not self.by_group:
                columns = -(-plan.numel // DEFAULT_BLOCK) * (DEFAULT_BLOCK // 8)
                parts = grad.new_empty(rows, columns, dtype=torch.float32)
            else:
                terms = _terms(grad, rows, plan.numel)  # torch adds them in its own order
        numbers = self._flat(scale, zero_point)
        fake_quantize_backward(grad, plan, *numbers, residual_of, codes, mask, values, residual, target, terms, parts)
        found: list[Tensor | None] = [None] * 4
        for place in range(0 if codes is not None or values is not None else 2, rows):
            number = scale if place < 2 else zero_point
            if terms is not None:
                each = layout.restore(terms[place])
                if like is not None and (place in (0, 2) or not plan.clips):
                    each = torch.empty_like(like).copy_(each)
                found[place] = each.sum_to_size(number.shape)
            elif parts is not None:
                total = parts[place].sum()
                found[place] = total.view(number.shape) if number.dim() else total
        if like is not None and not plan.clips:  # without a mask in x's order, stock ops keep the gradient's
            target = torch.empty_like(like).copy_(target)
        of_scale, of_pre_scale, of_zero_point, of_pre_zero_point = found
        return target, of_scale, of_zero_point, of_pre_scale, of_pre_zero_point

    def _flat(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        if not self.by_group:
            return scale, zero_point
        return scale.detach().reshape(-1), zero_point.detach().reshape(-1)

    def _dense(self, x: Tensor) -> Tensor:
        is_dense = x.dtype is self.layout.dtype and self.layout.matches(x)
        return x if is_dense else self.layout.empty(x.device).copy_(x.detach())


class Quantized(NamedTuple):
    out: Tensor
    codes: tuple[tuple[Tensor, ...], IntegerCodes]
    mask: Saved | None
    residual: Saved | None


def one_pass_for(kind: Range | None, rectifies: bool, x: Tensor, *given: Tensor) -> OnePass | None:
    scale, zero_point, pre_scale, pre_zero_point = given
    if kind is None or not (_is_same(pre_scale, scale) and _is_same(pre_zero_point, zero_point)):
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
    if x.is_cpu and zero_point.dtype is not dtype is not torch.float32:
        if not torch.equal(zero_point.detach().to(dtype).to(zero_point.dtype), zero_point):
            return None  # torch rounds addends, but not factors
    return _one_pass(kind, rectifies, x.shape, x.stride(), dtype, scale.shape, zero_point.shape)


@functools.lru_cache(maxsize=4096)
def _one_pass(
    kind: Range, rectifies: bool, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, *numbers: torch.Size
) -> OnePass | None:
    with no_dispatch_modes():  # a selective checkpoint counts ops, and would miss these when it recomputes
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        scale, zero_point = (torch.empty(sizes, dtype=dtype, device="meta") for sizes in numbers)
        quotient = like / scale + zero_point
    result = Layout.of(quotient)
    if not result.numel or not result.is_dense or result.shape != shape:
        return None
    places = groups_of(result, *numbers)
    if places is None:
        return None
    ends = kind.bit_width, kind.lowest, kind.highest
    plan = IntegerPlan(result.numel, *ends, rectifies, kind.clips, kind.has_spare, *places)
    decoder = IntegerCodes(result, kind.bit_width, kind.lowest, dtype.itemsize * result.numel, kind.has_spare)
    mask_layout = Layout.of_sizes(result.shape, result.stride, torch.bool)
    return OnePass(plan, result, decoder, decoder_of_mask(mask_layout, 0.0), plan.groups > 1)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share memory: autograd returns saved tensors as new objects."""
    if one is other:
        return True
    is_alike = one.shape == other.shape and one.stride() == other.stride() and one.dtype is other.dtype
    return is_alike and one.device == other.device and one.data_ptr() == other.data_ptr()


def _terms(grad: Tensor, rows: int, numel: int) -> Tensor:
    """Return memory for the terms of sums: on a GPU, torch's order of a sum depends on its address."""
    return grad.new_empty(rows, numel if grad.is_cpu else -(-numel // 64) * 64)[:, :numel]
