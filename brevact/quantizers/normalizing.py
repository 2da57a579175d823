"""Normalized inputs of norms, quantized and given back.

x^ = (x - mean) * invstd is of one scale everywhere, whatever the scales of rows or channels: a bucket that lies in
several of them has the same step for all. The statistics are the norm's own, which keeps them anyway.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.geometry import Place, UniformPlan
from brevact.quantizers import kernel_ops
from brevact.quantizers.formats.uniform import StretchedQuantizer, UniformQuantizer, plan_of
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation, PackedSpec
from brevact.quantizers.quantizer import quantize
from brevact.quantizers.reference import seed_value


def normalize(x: Tensor, mean: Tensor | None, invstd: Tensor) -> Tensor:
    """Normalize a tensor: (x - mean) * invstd, in float32; in float64 if `x` is.

    The statistics broadcast to the shape of `x`; a mean of None is 0. The result is dense, with the shape, memory order
    and expanded dimensions of `x`.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    distinct = [_distinct(part, x) for part in (x, mean, invstd) if part is not None]
    invstd = distinct[-1].to(dtype)
    if mean is None:
        z = torch.mul(distinct[0], invstd)
    else:
        z = torch.sub(distinct[0], distinct[1].to(dtype)).mul_(invstd)
    if Layout.of(z).dims != Layout.of(distinct[0]).dims:  # torch let the strides of the statistics decide
        z = torch.empty_like(distinct[0], dtype=dtype).copy_(z)
    return z if z.shape == x.shape else z.expand(x.shape)


def quantize_normalized(
    quantizer: Any, x: Tensor, mean: Tensor | None, invstd: Tensor, seed: int | Tensor | None
) -> PackedActivation:
    """Quantize a normalized input; the bytes are those of `quantizer.quantize(normalize(x, mean, invstd), seed)`.

    The uniform quantizer's kernels normalize while they load, where its groups are buckets that lie in blocks; other
    formats read a copy that is normalized beforehand.
    """
    if has_uniform_codes(quantizer) and not x.is_neg() and type(x) is Tensor:
        found = plan_of_statistics(quantizer, Layout.of(x), invstd.shape)
        if found is not None and invstd.dtype is not torch.float64:
            buffer = found.spec.empty(x)
            own_seed = seed_value(seed, x.device) if quantizer.is_stochastic else None
            kernel_ops.quantize_uniform(x, found.plan, own_seed, *found.groups(mean, invstd), buffer)
            return PackedActivation(found.spec, buffer)
    return quantize(quantizer, normalize(x, mean, invstd), seed)


def denormalize(packed: PackedActivation, mean: Tensor | None, invstd: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode a normalized input and undo the normalization: x^ / invstd + mean; a mean of None gives the centred input.

    It is computed in float32 (float64 for float64), with one reciprocal for each deviation, and clamped to the finite
    range where `dtype` is float16. It is NaN where the inverse deviation is; a deviation that is infinite, of elements
    that are 0 as soon as they are normalized, counts as 0.
    """
    return decode_affine(packed, reciprocal_of(invstd.to(packed.spec.layout.dtype)), mean, dtype)


def decode_affine(packed: PackedActivation, scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Decode a tensor z: z * scale + shift, as a tensor of this dtype, the same shape and strides.

    Factors broadcast to the shape of the tensor, addends have theirs; None is 1 and 0. It is computed in float32
    (float64 for float64), and clamped to the finite range where `dtype` is float16.
    """
    found = decode_in_one_pass(packed, scale, shift, dtype)
    if found is not None:
        return found
    z = packed.dequantize()
    x = _distinct(z, z)
    if scale is not None or shift is not None:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    if scale is not None:
        x = x.mul_(_distinct(scale, z))
    if shift is not None:
        x = x.add_(_distinct(shift, z).to(x.dtype))
    if dtype is torch.float16:
        limit = torch.finfo(dtype).max
        x.clamp_(-limit, limit)
    x = x.to(dtype)
    return x if x.shape == z.shape else x.expand(z.shape)


def decode_in_one_pass(
    packed: PackedActivation,
    scale: Tensor | None,
    shift: Tensor | None,
    dtype: torch.dtype,
    addend: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    overwrites: bool = False,
) -> Tensor | None:
    """Decode as `decode_affine`, add a tensor and set elements outside of a mask to 0, if one pass does all of that.

    None for formats, types and orders that no kernel takes. `addend` is of float32, for a result of that type, and of
    the packed shape; the result may take its memory if that `overwrites`. `mask` comes from `pack_mask`.
    """
    spec, buffer = packed.spec, packed.buffer
    if scale is None or scale.dtype is torch.float64 or type(buffer) is not Tensor:
        return None
    plan = plan_of_decoding(spec, scale.shape, dtype)
    if plan is None or (addend is not None and not plan.matches(addend)):
        return None
    return plan.decode_affine(buffer, scale, shift, addend, mask, overwrites=overwrites)


def plan_of_decoding(spec: PackedSpec[Any], shape: tuple[int, ...], dtype: torch.dtype) -> NormalizedPlan | None:
    """Plan that decodes to a data type with factors of a shape that broadcasts; None where no kernel does."""
    layout = spec.layout
    if not has_uniform_codes(spec.quantizer) or layout.dtype is not torch.float32:  # rounded to a type of 16 bits
        return None
    return plan_of_statistics(spec.quantizer, Layout.of_sizes(layout.shape, layout.stride, dtype), shape)


def has_uniform_codes(quantizer: Any) -> bool:
    """Whether the kernel ops of `plan_of` write and read its bytes; a subclass may quantize in another way."""
    return type(quantizer) in (UniformQuantizer, StretchedQuantizer) and quantizer.bit_width != 32


def _distinct(part: Tensor, x: Tensor) -> Tensor:
    """The part of a tensor, or of one that broadcasts to it, without the repeats of expanded dimensions."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        place = dim - x.dim() + part.dim()
        if stride == 0 and size > 1 and place >= 0 and part.shape[place] > 1:
            part = part.narrow(place, 0, 1)
    return part


#: Types that kernels normalize on the way; of float64 the reference is in float64.
FUSED = frozenset((torch.float32, torch.bfloat16, torch.float16))
#: Means and factors of groups, (M,) float32 in a tensor's memory order, and which is whose.
Groups = tuple[Tensor | None, Tensor, Place]


class NormalizedPlan(NamedTuple):
    """How tensors of one layout are normalized by statistics of one shape, packed, and decoded.

    >>> x, mean, invstd = torch.randn(8, 4, 16), torch.zeros(4), torch.ones(4)
    >>> plan = plan_of_channels(UniformQuantizer(bit_width=8), Layout.of(x))
    >>> buffer = plan.spec.empty(x)
    >>> kernel_ops.quantize_uniform(x, plan.plan, 0, mean, invstd, plan.place, buffer)
    >>> bool((plan.dequantize_centred(buffer, invstd) - x).abs().max() < 0.05)
    True
    """

    spec: PackedSpec[UniformQuantizer]
    plan: UniformPlan
    place: Place
    layout: Layout
    order: tuple[int, ...] | None = None

    def matches(self, x: Tensor) -> bool:
        """Whether a kernel may add a tensor to decoded ones: both are of float32 and dense in the same memory order."""
        return x.dtype is self.layout.dtype is torch.float32 and self.layout.matches(x)

    def groups(self, mean: Tensor | None, scale: Tensor) -> Groups:
        first = None if mean is None else _in_order(mean, self.layout, self.order)
        return first, _in_order(scale, self.layout, self.order), self.place

    def dequantize_centred(self, buffer: Tensor, invstd: Tensor) -> Tensor:
        """Decode x less its means from the inverse deviations; the values are those of `denormalize`."""
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
        """Decode z * scale + shift, and add and mask as `decode_in_one_pass` does, with the same values."""
        target = addend if addend is not None and overwrites else self.layout.empty(buffer.device)
        shift, scale, place = self.groups(shift, scale)
        kernel_ops.dequantize_uniform(buffer, self.plan, shift, scale, place, addend, mask, target)
        return target


@functools.lru_cache(maxsize=4096)
def plan_of_statistics(quantizer: UniformQuantizer, layout: Layout, shape: tuple[int, ...]) -> NormalizedPlan | None:
    """Plan for statistics of a shape that broadcasts; None for float64, gaps, no elements, orders without a place."""
    found = find_place(layout, tuple(shape)) if layout.is_dense and layout.numel and layout.dtype in FUSED else None
    if found is None:
        return None
    spec = PackedSpec.of(quantizer, Layout.of_sizes(layout.shape, layout.stride, torch.float32))
    return NormalizedPlan(spec, plan_of(spec), found[0], layout, found[1])


@functools.lru_cache(maxsize=4096)
def plan_of_channels(quantizer: Any, layout: Layout) -> NormalizedPlan | None:
    """Plan of tensors whose second dimension is that of channels, and of (C,) statistics; None as above."""
    if not has_uniform_codes(quantizer) or len(layout.shape) < 2:
        return None
    found = plan_of_statistics(quantizer, layout, (1, layout.shape[1], *[1] * (len(layout.shape) - 2)))
    return None if found is None or found.order is not None else found


def reciprocal_of(invstd: Tensor) -> Tensor:
    """Deviations of inverse ones: NaN of NaN, and 0 of an infinite deviation, whose elements are 0 when normalized."""
    return invstd.reciprocal().nan_to_num_(nan=float("nan"), posinf=0.0)


def _in_order(statistic: Tensor, layout: Layout, order: tuple[int, ...] | None) -> Tensor:
    """The distinct numbers of a statistic in a tensor's memory order."""
    if order is not None:
        statistic = statistic[tuple(slice(None) if dim in layout.dims else slice(1) for dim in range(len(order)))]
        statistic = statistic.permute(order)
    statistic = statistic.float().contiguous()
    return statistic if statistic.dim() == 1 else statistic.view(-1)


@functools.lru_cache(maxsize=4096)
def find_place(layout: Layout, shape: tuple[int, ...]) -> tuple[Place, tuple[int, ...] | None] | None:
    """Place of statistics of a shape that broadcasts, and the order of their dimensions if they have to be moved.

    In memory order, dimensions are of groups, of elements of one, of groups, of elements, any of these missing. Other
    orders have no place.
    """
    if len(shape) != len(layout.shape):
        return None
    sizes, position = [1, 1, 1, 1], 0
    for dim, size in zip(layout.dims, layout.sizes, strict=True):
        if (position % 2 == 0) != (shape[dim] > 1):
            position += 1
        if position > 3:
            return None
        sizes[position] *= size
    _, elements, row, run = sizes
    order = (*layout.dims, *(dim for dim in range(len(shape)) if dim not in layout.dims))
    several = [dim for dim in order if shape[dim] > 1]
    is_in_order, is_whole = several == sorted(several), all(dim in layout.dims for dim in several)
    return Place(elements * row * run, row, row * run, run), None if is_in_order and is_whole else order
