"""Decoding with a function on the way: applied to the values of codes, where these are fewer than the elements."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from brevact.geometry import Place, Segments, UniformPlan
from brevact.private_names.of_torch import is_functorch_tensor
from brevact.quantizers import kernel_ops
from brevact.quantizers.formats.uniform import plan_of
from brevact.quantizers.layout import Layout
from brevact.quantizers.normalizing import FUSED, NormalizedPlan, decode_affine, has_uniform_codes, plan_of_statistics
from brevact.quantizers.packed import PackedActivation, PackedSpec

#: Means and factors of groups, and which is whose; None where there is no affine map.
Groups = tuple[Tensor | None, Tensor | None, Place | None]
#: Elements of a segment from which on a table pays; at 4 bits it has a quarter of the tensor's size then.
_LEAST_OF_SEGMENTS = 64
#: Elements to which a function is applied at once: few enough for a cache on the CPU, enough for a whole GPU.
_CPU_PIECE, _GPU_PIECE = 1 << 17, 1 << 24


#: A function of one number, applied to each element of a tensor: it returns a new tensor of its shape and strides.
#: Hashable, equal where it computes the same.
PointFunction: TypeAlias = Callable[[Tensor], Tensor]


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
    more in the mean, the function is applied to a table of the values of each run's codes, and elements are looked up
    there: equal codes of a run have equal values. Otherwise, it is applied to pieces of the decoded tensor. Torch's own
    functions may differ by roundings between the two, as they do between elements of one tensor on the CPU. Which way
    is taken depends on quantizer, layout, types and the shape of `scale` alone.

    `scale` and `shift` are those of `decode_affine`; the function's argument is of this dtype, and of any shape. The
    result has the packed tensor's shape and strides (dense ones where those leave gaps), and the type that the function
    gives. With a gradient it is of the type of `grad * values`, and of the strides of one that lies in the same memory
    order, otherwise of those that torch gives the product.
    """
    layout, buffer = packed.layout, packed.buffer
    decode = functools.partial(decode_affine, packed, scale, shift, dtype)
    if layout.numel == 0 or not layout.is_dense or not _has_memory(buffer, scale, shift):
        return _multiplied(function(decode()), grad)
    groups: Groups | None = (None, None, None)
    if not (has_uniform_codes(packed.spec.quantizer) and layout.dtype in FUSED and dtype in FUSED):
        groups = None
    elif scale is not None or shift is not None:
        factor = torch.ones_like(shift) if scale is None else scale  # type: ignore[arg-type]
        plan = plan_of_statistics(packed.spec.quantizer, layout, factor.shape)
        groups = None if plan is None or factor.dtype is torch.float64 else plan.groups(shift, factor)
    return _apply(function, packed.spec, buffer, groups, dtype, decode, grad)


def decode_through_plan(
    plan: NormalizedPlan,
    buffer: Tensor,
    function: PointFunction,
    scale: Tensor,
    shift: Tensor | None,
    grad: Tensor | None,
) -> Tensor:
    """The result of :func:`decode_through` for normalized values that a plan has packed, whose layout has its type."""
    decode = functools.partial(plan.decode_affine, buffer, scale, shift)
    if not _has_memory(buffer, scale, shift):
        return _multiplied(function(decode()), grad)
    return _apply(function, plan.spec, buffer, plan.groups(shift, scale), plan.layout.dtype, decode, grad)


def _apply(
    function: PointFunction,
    spec: PackedSpec[Any],
    buffer: Tensor,
    groups: Groups | None,
    dtype: torch.dtype,
    decode: Callable[[], Tensor],
    grad: Tensor | None,
) -> Tensor:
    """Return f of decoded values, times `grad` if given: from a table, or, as without groups, in pieces."""
    other = grad if grad is not None and _is_readable(grad, spec.layout) else None
    values = None if groups is None else _looked_up(buffer, spec, function, groups, dtype, other)
    if values is None:
        values = _in_pieces(decode(), function, other)
    return values if other is not None else _multiplied(values, grad)


def _multiplied(values: Tensor, grad: Tensor | None) -> Tensor:
    return values if grad is None else grad * values


def _looked_up(
    buffer: Tensor,
    spec: PackedSpec[Any],
    function: PointFunction,
    groups: Groups,
    dtype: torch.dtype,
    other: Tensor | None,
) -> Tensor | None:
    """Return the result of `decode_through` from a table of all codes of all segments; None if segments are short."""
    mean, factor, place = groups
    plan: UniformPlan = spec.plan or plan_of(spec)
    segments = _long_segments(plan, place)
    if segments is None:
        return None
    levels = torch.empty(segments.rows, 1 << plan.geometry.bit_width, dtype=dtype, device=buffer.device)
    kernel_ops.map_levels(buffer, plan, spec.layout.dtype, mean, factor, place, segments, levels)
    table = function(levels)
    del levels
    if table.dtype not in FUSED:
        return None
    target = spec.layout if other is None else Layout.of(other)
    wanted = table.dtype if other is None else torch.promote_types(table.dtype, other.dtype)
    values = target.empty(buffer.device, wanted)
    kernel_ops.look_up(buffer, plan, segments, table.float().contiguous(), other, values)
    return values


def multiply_by_function(x: Tensor, function: PointFunction, grad: Tensor, *, overwrites: bool) -> Tensor:
    """Return grad * function(x), with temporaries of a piece each where both lie in one order of memory.

    Shapes are equal, strides any. If it `overwrites`, the result may take the memory of `x`; see
    :func:`decode_through`.
    """
    layout = Layout.of(x)
    if not layout.is_dense or layout.numel != x.numel() or x.dtype is not grad.dtype or not _has_memory(x):
        return grad * function(x)
    if not _is_readable(grad, layout) or layout.numel == 0:
        return grad * function(x)
    return _in_pieces(x, function, grad, overwrites=overwrites, piece=_CPU_PIECE // 2)


def _in_pieces(
    x: Tensor, function: PointFunction, other: Tensor | None, *, overwrites: bool = True, piece: int = _CPU_PIECE
) -> Tensor:
    """function(x), times a tensor of its memory order; `x` may be overwritten, and temporaries are of a piece each."""
    layout = Layout.of(x)
    flat, factor = layout.flatten(x), None if other is None else layout.flatten(other)
    step = _GPU_PIECE if x.is_cuda else max(piece, torch.get_num_threads() << 15)
    if layout.numel <= step:
        values = function(flat)
        return layout.restore((values if factor is None else factor * values).contiguous())
    result = flat if overwrites else layout.flatten(layout.empty(x.device, x.dtype))
    for start in range(0, layout.numel, step):
        values = function(flat[start : start + step])
        if factor is not None:
            values = factor[start : start + step] * values
        if start == 0 and values.dtype is not x.dtype:
            result = layout.flatten(layout.empty(x.device, values.dtype))
        result[start : start + step] = values
    return layout.restore(result)


@functools.lru_cache(maxsize=4096)
def _long_segments(plan: UniformPlan, place: Place | None) -> Segments | None:
    """Segments of a tensor, if codes are few and segments long in the mean."""
    geometry = plan.geometry
    if geometry.bit_width > 4:
        return None
    segments = Segments.of(geometry, place)
    return segments if geometry.numel >= _LEAST_OF_SEGMENTS * segments.rows else None


def _has_memory(buffer: Tensor, *statistics: Tensor | None) -> bool:
    """Whether bytes and statistics are plain tensors, and none of a transform of torch.func."""
    if type(buffer) is not Tensor or is_functorch_tensor(buffer):
        return False
    for x in statistics:
        if x is not None and is_functorch_tensor(x):
            return False
    return True


def _is_readable(grad: Tensor, layout: Layout) -> bool:
    """Whether a gradient may be read as it lies, and is no part of a graph."""
    is_constant = not (grad.requires_grad and torch.is_grad_enabled())
    return grad.dtype in FUSED and is_constant and not is_functorch_tensor(grad) and layout.matches(grad)
