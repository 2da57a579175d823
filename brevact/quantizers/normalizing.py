"""Normalized inputs: what a norm computes from its input on the way, quantized and given back.

x^ = (x - mean) * invstd is of one scale everywhere, whatever the scales of rows or channels: a bucket that lies in
several of them has the same step for all. The statistics are the norm's own, which keeps them anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brevact.quantizers.packed import PackedActivation, quantize


def normalize(x: Tensor, mean: Tensor | None, invstd: Tensor) -> Tensor:
    """Normalize a tensor: (x - mean) * invstd.

    Args:
        x: Floating-point tensor of any shape and strides.
        mean: Means, of a shape that broadcasts to that of `x`; None for 0.
        invstd: Inverse deviations, of a shape that broadcasts as well.

    Returns:
        A dense tensor of the shape, memory order and expanded dimensions of `x`, in float32; in float64 where `x` is.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    distinct = [_distinct(part, x) for part in (x, mean, invstd) if part is not None]
    invstd = distinct[-1].to(dtype)
    if mean is None:
        z = torch.mul(distinct[0], invstd)
    else:
        z = torch.sub(distinct[0], distinct[1].to(dtype)).mul_(invstd)
    return z if z.shape == x.shape else z.expand(x.shape)


def quantize_normalized(
    quantizer: Any, x: Tensor, mean: Tensor | None, invstd: Tensor, seed: int | Tensor | None
) -> PackedActivation:
    """Quantize a normalized input; the bytes are those of `quantizer.quantize(normalize(x, mean, invstd), seed)`.

    Args:
        quantizer: Any activation quantizer.
        x: Floating-point tensor of any shape and strides.
        mean: Means, of a shape that broadcasts to that of `x`; None for 0.
        invstd: Inverse deviations, of a shape that broadcasts as well.
        seed: Seed of the quantizer.

    Returns:
        The packed normalized values.
    """
    return quantize(quantizer, normalize(x, mean, invstd), seed)


def denormalize(packed: PackedActivation, mean: Tensor | None, invstd: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode a normalized input and undo the normalization: x^ / invstd + mean.

    It is computed in float32 (float64 for float64), with one reciprocal for each deviation, and clamped to the finite
    range where `dtype` is float16.

    Args:
        packed: What :func:`quantize_normalized` returned.
        mean: What to add, of a shape that broadcasts; None for 0: the result is then centred.
        invstd: The inverse deviations that it was normalized with.
        dtype: Data type of the result.

    Returns:
        Tensor of the normalized one's shape and strides. NaN where the inverse deviation is.
    """
    z = packed.dequantize()
    sigma = _distinct(invstd, z).to(z.dtype).reciprocal()
    x = _distinct(z, z).mul_(sigma)
    if mean is not None:
        x.add_(_distinct(mean, z).to(z.dtype))
    if dtype is torch.float16:
        limit = torch.finfo(dtype).max
        x.clamp_(-limit, limit)
    x = x.to(dtype)
    return x if x.shape == z.shape else x.expand(z.shape)


def _distinct(part: Tensor, x: Tensor) -> Tensor:
    """The part of a tensor, or of one that broadcasts to it, without the repeats of expanded dimensions."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        place = dim - x.dim() + part.dim()
        if stride == 0 and size > 1 and place >= 0 and part.shape[place] > 1:
            part = part.narrow(place, 0, 1)
    return part
