"""Normalized inputs of norms, quantized and given back.

x^ = (x - mean) * invstd is of one scale everywhere, whatever the scales of rows or channels: a bucket that lies in
several of them has the same step for all. The statistics are the norm's own, which keeps them anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brevact.quantizers import kernel_ops
from brevact.quantizers.layout import Layout
from brevact.quantizers.normalizing_plans import plan_of_statistics, reciprocal_of
from brevact.quantizers.packed import PackedActivation, PackedSpec
from brevact.quantizers.philox import seed_value
from brevact.quantizers.quantizer import quantize


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
    if getattr(quantizer, "has_uniform_codes", False) and not x.is_neg() and type(x) is Tensor:
        found = plan_of_statistics(quantizer, Layout.of(x), invstd.shape)
        if found is not None and invstd.dtype is not torch.float64:
            buffer = found.spec.empty(x)
            own_seed = seed_value(seed, x.device) if quantizer.is_stochastic else None
            kernel_ops.quantize_normalized(x, found.plan, own_seed, *found.groups(mean, invstd), buffer)
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

    Args:
        packed: A packed tensor.
        scale: Factors, of a shape that broadcasts to that of the tensor.
        shift: Addends, of the same shape as `scale`; None for 0.
        dtype: Data type of the result.
        addend: float32 tensor of the packed one's shape, for a result of that type; None for 0.
        mask: Result of `pack_mask` for a tensor of the packed one's shape and memory order; None for no mask.
        overwrites: Whether the result may take the memory of `addend`.

    Returns:
        Tensor of the packed one's shape and memory order; None for formats, types and orders that no kernel takes.
    """
    spec, layout, buffer = packed.spec, packed.layout, packed.buffer
    if scale is None or scale.dtype is torch.float64 or type(buffer) is not Tensor or not has_uniform_codes(spec):
        return None
    if layout.dtype is not torch.float32:  # rounded to a type of 16 bits
        return None
    plan = plan_of_statistics(spec.quantizer, Layout.of_sizes(layout.shape, layout.stride, dtype), scale.shape)
    if plan is None or (addend is not None and not plan.matches(addend)):
        return None
    return plan.decode_affine(buffer, scale, shift, addend, mask, overwrites=overwrites)


def has_uniform_codes(spec: PackedSpec[Any]) -> bool:
    """Whether kernels of the uniform format decode the tensor."""
    return getattr(spec.quantizer, "has_uniform_codes", False)


def _distinct(part: Tensor, x: Tensor) -> Tensor:
    """The part of a tensor, or of one that broadcasts to it, without the repeats of expanded dimensions."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        place = dim - x.dim() + part.dim()
        if stride == 0 and size > 1 and place >= 0 and part.shape[place] > 1:
            part = part.narrow(place, 0, 1)
    return part
