"""Normalized inputs: what a norm computes from its input on the way, quantized and given back.

x^ = (x - mean) * invstd is of one scale everywhere, whatever the scales of rows or channels: a bucket that lies in
several of them has the same step for all. The statistics are the norm's own, which keeps them anyway.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from brevact.geometry import Geometry, Place, Segments
from brevact.private_names.of_torch import is_functorch_tensor
from brevact.quantizers import passes
from brevact.quantizers.formats.uniform.quantizer import plan_of
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation, PackedSpec
from brevact.quantizers.philox import seed_value
from brevact.quantizers.quantizer import quantize
from brevact.quantizers.text_form import to_text
from brevact.quantizers.tracing import is_traced


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
    if Layout.of(z).dims != Layout.of(distinct[0]).dims:  # torch let the strides of the statistics decide
        z = torch.empty_like(distinct[0], dtype=dtype).copy_(z)
    return z if z.shape == x.shape else z.expand(x.shape)


def quantize_normalized(
    quantizer: Any, x: Tensor, mean: Tensor | None, invstd: Tensor, seed: int | Tensor | None
) -> PackedActivation:
    """Quantize a normalized input; the bytes are those of `quantizer.quantize(normalize(x, mean, invstd), seed)`.

    The uniform quantizer's kernels normalize what they load, where its groups are buckets that lie in blocks; other
    formats read a copy that is normalized beforehand.

    Args:
        quantizer: Any activation quantizer.
        x: Floating-point tensor of any shape and strides.
        mean: Means, of a shape that broadcasts to that of `x`; None for 0.
        invstd: Inverse deviations, of a shape that broadcasts as well.
        seed: Seed of the quantizer.

    Returns:
        The packed normalized values.
    """
    layout = Layout.of(x)
    if not getattr(quantizer, "packs_by_plan", False) or x.dtype not in _FUSED or not layout.is_dense or x.is_neg():
        return quantize(quantizer, normalize(x, mean, invstd), seed)
    values = PackedSpec.of(quantizer, Layout.of_sizes(layout.shape, layout.stride, torch.float32))
    if is_traced(x):
        key = seed if isinstance(seed, Tensor) else None
        buffer = torch.ops.brevact.quantize_normalized(x, mean, invstd, key, to_text(quantizer), x.stride())
        return PackedActivation(values, buffer)
    if type(x) is Tensor:
        norm = _groups(layout, mean, invstd)
        if norm is not None:
            buffer = values.empty(x)
            own_seed = seed_value(seed, x.device) if quantizer.is_stochastic else None
            passes.quantize_normalized(x, plan_of(values), own_seed, *norm, buffer)
            return PackedActivation(values, buffer)
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
        Tensor of the normalized one's shape and strides. NaN where the inverse deviation is; a deviation that is
        infinite, of elements that are 0 as soon as they are normalized, counts as 0.
    """
    layout, buffer = packed.layout, packed.buffer
    if is_traced(buffer) and _is_fused(packed, dtype):
        return torch.ops.brevact.denormalize(buffer, mean, invstd, *packed.spec.op_arguments[:3], dtype)
    return decode_affine(packed, reciprocal_of(invstd.to(layout.dtype)), mean, dtype)


def reciprocal_of(invstd: Tensor) -> Tensor:
    """Deviations of inverse ones: NaN of NaN, and 0 of an infinite deviation, whose elements are 0 when normalized."""
    return invstd.reciprocal().nan_to_num_(nan=float("nan"), posinf=0.0)


def decode_affine(packed: PackedActivation, scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Decode a tensor z and apply an affine map to it: z * scale + shift.

    It is computed in float32 (float64 for float64), and clamped to the finite range where `dtype` is float16.

    Args:
        packed: A packed tensor.
        scale: Factors, of a shape that broadcasts to that of the tensor; None for 1.
        shift: What to add, of the same shape as `scale`; None for 0.
        dtype: Data type of the result.

    Returns:
        Tensor of the packed one's shape and strides.
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
    """What `decode_affine` gives, and a tensor added to it, with zeros outside of a mask, if one pass does all of that.

    Args:
        packed: A packed tensor.
        scale: Factors, of a shape that broadcasts to that of the tensor.
        shift: What to add, of the same shape as `scale`; None for 0.
        dtype: Data type of the result.
        addend: float32 tensor of the packed one's shape, whose sum with values of that type is the result; None for 0.
        mask: What `pack_mask` returned for a tensor of the packed one's shape and memory order; None for no mask.
        overwrites: Whether the result may take the memory of `addend`.

    Returns:
        Tensor of the packed one's shape and memory order; None for formats, types and orders that no kernel takes.
    """
    layout, buffer = packed.layout, packed.buffer
    if scale is None or type(buffer) is not Tensor or not _is_fused(packed, dtype):
        return None
    wanted = Layout.of_sizes(layout.shape, layout.stride, dtype)
    if addend is not None and not (addend.dtype is dtype is torch.float32 and wanted.matches(addend)):
        return None
    norm = _groups(layout, shift, scale)
    if norm is None:
        return None
    x = addend if addend is not None and overwrites else wanted.empty(buffer.device)
    passes.denormalize(buffer, plan_of(packed.spec), *norm, addend, mask, x)
    return x


class PointFunction(Protocol):
    """A function of one number, applied to each element of a tensor; hashable, equal where it computes the same."""

    def __hash__(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return a new tensor of the shape and strides of `x`."""
        ...


def decode_through(
    packed: PackedActivation,
    function: PointFunction,
    scale: Tensor | None,
    shift: Tensor | None,
    dtype: torch.dtype,
    grad: Tensor | None = None,
) -> Tensor:
    """Decode a tensor z and apply a function behind an affine map: f(z * scale + shift), or its product with `grad`.

    Up to 4 bits, where runs of elements that share a bucket and a scale (see `geometry.Segments`) have 64 elements or
    more in the mean, the function is applied to a table of what the codes of each run stand for, and elements are
    looked up there: equal codes of a run have equal values. Otherwise, it is applied to pieces of the decoded tensor.
    Torch's own functions may differ by roundings between the two, as they do between elements of one tensor on the CPU.
    Which way is taken depends on quantizer, layout, types and the shape of `scale` alone.

    Args:
        packed: A packed tensor.
        function: The function f; it is applied to float32, bfloat16 or float16 tensors of any shape, or to float64.
        scale: Factors, of a shape that broadcasts to that of the tensor; None for 1.
        shift: What to add, of the same shape as `scale`; None for 0.
        dtype: Data type of what the function is applied to.
        grad: Tensor of the packed one's shape, to multiply; None for the values alone.

    Returns:
        Tensor of the packed one's shape and strides (dense ones where those leave gaps), of the type that the function
        gives. With a gradient it is of the type of `grad * values`, and of the strides of one that lies in the same
        memory order, otherwise of those that torch gives the product.
    """
    layout, buffer = packed.layout, packed.buffer
    if layout.numel == 0 or not layout.is_dense or not _has_memory(buffer, scale, shift):
        values = function(decode_affine(packed, scale, shift, dtype))
        return values if grad is None else grad * values
    other = grad if grad is not None and _is_readable(grad, layout) else None
    found = _looked_up(packed, function, scale, shift, dtype, other) if _is_uniform(packed, dtype) else None
    values = _in_pieces(decode_affine(packed, scale, shift, dtype), function, other) if found is None else found
    return values if grad is None or other is not None else grad * values


def _looked_up(
    packed: PackedActivation,
    function: PointFunction,
    scale: Tensor | None,
    shift: Tensor | None,
    dtype: torch.dtype,
    other: Tensor | None,
) -> Tensor | None:
    """What `decode_through` returns, by a table of all codes of all segments; None where segments are short."""
    layout, buffer = packed.layout, packed.buffer
    mean, factor, place = None, None, None
    if shift is not None and scale is None:
        scale = torch.ones_like(shift)
    if scale is not None:
        norm = _groups(layout, shift, scale)
        if norm is None:
            return None
        mean, factor, place = norm
    plan = plan_of(packed.spec)
    segments = _long_segments(plan.geometry, place)
    if segments is None:
        return None
    levels = torch.empty(segments.rows, 1 << plan.geometry.bit_width, dtype=dtype, device=buffer.device)
    passes.map_levels(buffer, plan, layout.dtype, mean, factor, place, segments, levels)
    table = function(levels)
    del levels
    if table.dtype not in _FUSED:
        return None
    target = layout if other is None else Layout.of(other)
    wanted = table.dtype if other is None else torch.promote_types(table.dtype, other.dtype)
    values = target.empty(buffer.device, wanted)
    passes.look_up(buffer, plan, segments, table.float().contiguous(), other, values)
    return values


def _in_pieces(x: Tensor, function: PointFunction, other: Tensor | None) -> Tensor:
    """function(x), times a tensor of its memory order; `x` is overwritten, and temporaries are of a piece each."""
    layout = Layout.of(x)
    flat, factor = layout.flatten(x), None if other is None else layout.flatten(other)
    step = _GPU_PIECE if x.is_cuda else max(_CPU_PIECE, torch.get_num_threads() << 15)
    result = flat
    for start in range(0, layout.numel, step):
        piece = function(flat[start : start + step])
        if factor is not None:
            piece = factor[start : start + step] * piece
        if start == 0 and piece.dtype is not x.dtype:
            result = layout.flatten(layout.empty(x.device, piece.dtype))
        result[start : start + step] = piece
    return layout.restore(result)


@functools.lru_cache(maxsize=4096)
def _long_segments(geometry: Geometry, place: Place | None) -> Segments | None:
    """Segments of a tensor, if codes are few, and elements of a segment are many in the mean."""
    if geometry.bit_width > 4:
        return None
    segments = Segments.of(geometry, place)
    return segments if geometry.numel >= _LEAST_OF_SEGMENTS * segments.rows else None


def _has_memory(buffer: Tensor, *statistics: Tensor | None) -> bool:
    """Whether bytes and statistics are plain tensors, and none of a traced graph or of a transform of torch.func."""
    if type(buffer) is not Tensor or is_functorch_tensor(buffer):
        return False
    return all(x is None or not is_functorch_tensor(x) for x in statistics)


def _is_readable(grad: Tensor, layout: Layout) -> bool:
    """Whether a gradient may be read as it lies, and is no part of a graph."""
    is_constant = not (grad.requires_grad and torch.is_grad_enabled())
    return grad.dtype in _FUSED and is_constant and not is_functorch_tensor(grad) and layout.matches(grad)


def _is_uniform(packed: PackedActivation, dtype: torch.dtype) -> bool:
    """Whether kernels of the uniform format decode the tensor."""
    packs_by_plan = getattr(packed.quantizer, "packs_by_plan", False)
    return packs_by_plan and packed.layout.dtype in _FUSED and dtype in _FUSED


def _is_fused(packed: PackedActivation, dtype: torch.dtype) -> bool:
    """Whether they map every element on the way, too: what is not rounded before."""
    return packed.layout.dtype is torch.float32 and _is_uniform(packed, dtype)


#: Types that kernels normalize on the way; of float64 the law is in float64.
_FUSED = frozenset((torch.float32, torch.bfloat16, torch.float16))
#: Elements of a segment from which on a table pays; at 4 bits it has a quarter of the tensor's size then.
_LEAST_OF_SEGMENTS = 64
#: Elements to which a function is applied at once: few enough for a cache on the CPU, enough for a whole GPU.
_CPU_PIECE, _GPU_PIECE = 1 << 17, 1 << 24


class Groups(NamedTuple):
    """Statistics of the groups of a tensor, in its memory order, for kernels: (M,) float32 means, None for 0, and
    factors.

    The place says which is whose.
    """

    mean: Tensor | None
    scale: Tensor
    place: Place


def _groups(layout: Layout, mean: Tensor | None, scale: Tensor) -> Groups | None:
    """Statistics of the elements of a dense tensor, if their order is one that kernels know."""
    if not layout.is_dense or layout.numel == 0 or scale.dtype is torch.float64:
        return None
    found = place_of(layout, tuple(scale.shape))
    if found is None:
        return None
    place, order = found
    return Groups(None if mean is None else _in_order(mean, layout, order), _in_order(scale, layout, order), place)


def _in_order(statistic: Tensor, layout: Layout, order: tuple[int, ...] | None) -> Tensor:
    """The distinct numbers of a statistic in a tensor's memory order."""
    if order is not None:
        statistic = statistic[tuple(slice(None) if dim in layout.dims else slice(1) for dim in range(len(order)))]
        statistic = statistic.permute(order)
    return statistic.float().contiguous().view(-1)


@functools.lru_cache(maxsize=4096)
def place_of(layout: Layout, shape: tuple[int, ...]) -> tuple[Place, tuple[int, ...] | None] | None:
    """Place of the statistics of a shape that broadcasts, and the order of their dimensions if they have to be moved.

    In memory order, dimensions are of groups, then of elements of one, then of groups and of elements once more, any of
    these missing. Other orders have no place.
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
    is_in_order = order == tuple(range(len(shape))) or [dim for dim in order if shape[dim] > 1] == [
        dim for dim in range(len(shape)) if shape[dim] > 1
    ]
    is_whole = all(dim in layout.dims for dim in range(len(shape)) if shape[dim] > 1)
    return Place(elements * row * run, row, row * run, run), None if is_in_order and is_whole else order


def _distinct(part: Tensor, x: Tensor) -> Tensor:
    """The part of a tensor, or of one that broadcasts to it, without the repeats of expanded dimensions."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        place = dim - x.dim() + part.dim()
        if stride == 0 and size > 1 and place >= 0 and part.shape[place] > 1:
            part = part.narrow(place, 0, 1)
    return part
