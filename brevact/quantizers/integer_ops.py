"""Fake quantization to integers and its gradient, one pass over the elements each: the definitions in plain torch.

The ops of ``brevitas.core.quant.IntQuant``, in their order, compute each element and round once each: results, and
terms of sums, equal Brevitas' bit for bit. Kernels of these names write the same bytes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.geometry import DEFAULT_BLOCK, IntegerPlan
from brevact.quantizers import reference
from brevact.quantizers.backends import refuse_wrapped, run_by_kernels
from brevact.quantizers.formats.residual import ResidualQuantizer
from brevact.quantizers.kernel_ops import flat_memory
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedSpec


@run_by_kernels
def fake_quantize(
    x: Tensor,
    plan: IntegerPlan,
    scale: Tensor,
    zero_point: Tensor,
    residual_of: ResidualQuantizer | None,
    seed: int | Tensor | None,
    out: Tensor,
    values: Tensor | None,
    codes: Tensor | None,
    mask: Tensor | None,
    residual: Tensor | None,
    missing: Tensor | None,
) -> None:
    """Quantize to integers and back, and pack the integers and the tensors that the gradient needs.

    `x` and the written `out` and `values` (the ReLU's output) are dense tensors of one type, to which each op rounds.
    There are (), (1,) or (groups,) scales and zero points; several are of this type. Other results, None if unwanted:
    `codes` are the packed integers, NaN the last code if that is spare, else 0; `mask` is that of the elements with a
    gradient; `residual` are x / s + z - round(x / s + z), rounded by `residual_of` with the seed, clipped elements
    marked; `missing`, (1,) uint8, is set to 1 if an integer is NaN.
    """
    refuse_wrapped(x)
    n = plan.numel
    v = flat_memory(x.detach(), n)
    v = v.relu() if plan.rectifies else v
    shifted, rounded, q, passes = _quantized(v, plan, scale, zero_point)
    flat_memory(out, n).copy_((q - _each(zero_point, plan)) * _each(scale, plan))
    if values is not None:
        flat_memory(values, n).copy_(v)
    if codes is not None:
        number = (q - plan.lowest).nan_to_num(float(2**plan.bit_width - 1 if plan.has_spare else 0))
        codes.copy_(reference.pack(number.to(torch.uint8), plan.bit_width, DEFAULT_BLOCK))
    if missing is not None:
        missing.logical_or_(q.isnan().any())
    if mask is not None:
        mask.copy_(reference.pack(passes.to(torch.uint8), 1, DEFAULT_BLOCK))
    if residual is not None and residual_of is not None:
        left = (shifted - rounded).clamp_(-0.5, 0.5).masked_fill_(~passes, residual_of.clipped)
        spec = PackedSpec.of(residual_of, Layout.of(left))
        residual_of.encode(left, spec, seed, residual)


@run_by_kernels
def fake_quantize_backward(
    grad: Tensor,
    plan: IntegerPlan,
    scale: Tensor,
    zero_point: Tensor,
    residual_of: ResidualQuantizer | None,
    codes: Tensor | None,
    mask: Tensor | None,
    values: Tensor | None,
    residual: Tensor | None,
    target: Tensor,
    terms: Tensor | None,
    parts: Tensor | None,
) -> None:
    """Gradients of the elements and of their scale, in the order of Brevitas' ops.

    With q = y - z, g' = g s where an element was not clipped, else 0: the gradient of x is g' / s; that of the scale is
    the sum of g q and of -g' ((x / s) / s). With residuals, x / s = q + r, and terms with q cancel where nothing was
    clipped: there q counts as 0, or as NaN if it is, and x / s as r. The gradient of a zero point that learns is the
    sum of -g s and of g', for which a ReLU in front sets nothing to 0. Clipping and q are recomputed from x without
    codes; a ReLU in front of a zero point that learns demands that.

    `grad` and the written `target` are dense in the memory order of the codes. There are `values`, x behind the ReLU;
    or residuals with their codes; or a mask, None for all elements. No integer was NaN, unless a code is spare. Of the
    results, at most one of which is wanted, `terms` are the (k, n) terms of the sums, k = 2, or 4 if the zero point
    learns; `parts` are (k, 64 * ceil(n / 512)) float32 sums of the eight terms of each column of each packing block,
    first to last, 0 for columns that the last block lacks. Their first two rows are left alone with a mask.
    """
    n = plan.numel
    g, s = flat_memory(grad, n), _each(scale, plan)
    through = g * s
    passes = inside = None
    steps = q = g
    if values is not None:
        v = flat_memory(values, n)
        _, rounded, q, passes = _quantized(v, plan, scale, zero_point)
        inside, steps, q = _inside(rounded, plan), v / s, q - _each(zero_point, plan)
    elif codes is not None and residual is not None and residual_of is not None:
        steps = g.new_empty(n)
        residual_of.decode(residual, PackedSpec.of(residual_of, Layout.of(steps)), steps)
        passes = steps != residual_of.clipped
        q = _integers(codes, plan, g.dtype) - _each(zero_point, plan)
        q = torch.where(passes, q * 0.0, q)
    elif mask is not None:
        passes = reference.unpack(mask, 1, n, DEFAULT_BLOCK).bool()
    clipped = through if passes is None else torch.where(passes, through, 0.0)
    flat_memory(target, n).copy_(clipped / s)
    wanted = terms if parts is None else parts
    if wanted is None:
        return
    found = [g * q, -clipped * (steps / s)] if q is not g else []
    if len(wanted) == 4:
        found += [-through, clipped if inside is None else torch.where(inside, through, 0.0)]
    wanted[-len(found) :] = torch.stack(found if parts is None else [_columns(each) for each in found])


@run_by_kernels
def decode_integers(codes: Tensor, plan: IntegerPlan, scale: Tensor, zero_point: Tensor, target: Tensor) -> None:
    """Decode (q - z) s from packed integers q, by plan and numbers of `fake_quantize`."""
    q = _integers(codes, plan, target.dtype) - _each(zero_point, plan)
    flat_memory(target, plan.numel).copy_(q * _each(scale, plan))


def _quantized(
    v: Tensor, plan: IntegerPlan, scale: Tensor, zero_point: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x / s + z of elements behind a ReLU, this rounded, and clipped, and where there is a gradient."""
    shifted = v / _each(scale, plan) + _each(zero_point, plan)
    rounded = shifted.round()
    q = torch.where(rounded > plan.highest, float(plan.highest), rounded)
    q = torch.where(q < plan.lowest, float(plan.lowest), q)
    passes = _inside(rounded, plan)
    if plan.rectifies:
        passes &= ~(v <= 0.0)
    return shifted, rounded, q, passes


def _inside(rounded: Tensor, plan: IntegerPlan) -> Tensor:
    if not plan.clips:
        return torch.ones_like(rounded, dtype=torch.bool)
    return ((rounded > plan.highest) | (rounded < plan.lowest)).logical_not_()


def _columns(terms: Tensor) -> Tensor:
    """Sums of the columns of packing blocks, (64 * ceil(n / 512),) in float32."""
    whole = terms.numel() // DEFAULT_BLOCK * DEFAULT_BLOCK
    rest = terms[whole:].float()
    blocks = [terms[:whole].float().view(-1, 8, DEFAULT_BLOCK // 8)]
    if rest.numel():
        columns = -(-rest.numel() // 8)
        planes = F.pad(rest, (0, 8 * columns - rest.numel())).view(1, 8, columns)
        blocks.append(F.pad(planes, (0, DEFAULT_BLOCK // 8 - columns)))
    planes = torch.cat(blocks)
    return functools.reduce(torch.add, planes.unbind(1)).view(-1)


def _integers(codes: Tensor, plan: IntegerPlan, dtype: torch.dtype) -> Tensor:
    numbers = reference.unpack(codes, plan.bit_width, plan.numel, DEFAULT_BLOCK)
    q = numbers.to(dtype) + plan.lowest
    return q.masked_fill_(numbers == 2**plan.bit_width - 1, torch.nan) if plan.has_spare else q


def _each(of_groups: Tensor, plan: IntegerPlan) -> Tensor:
    """A number for each element, or one for all, which leaves the type of elements alone."""
    if of_groups.numel() == 1:
        return of_groups.reshape(())
    return of_groups[torch.arange(plan.numel, device=of_groups.device) // plan.inner % plan.groups]
