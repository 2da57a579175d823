"""Convolutions and transposed convolutions: the input is saved packed, the weight in full precision.

With the decoded input x^ and the output gradient g: dL/dw = g (*) x^, dL/dx = g convolved with w (exact), dL/db = sum
of g. A transposed convolution exchanges the roles of x and g. Unbiased: linear in x^.
Source: thesis section 4.2.2; ActNN, arXiv:2104.14129, eq. 5.

Torch's backward reads only these tensors: if the weight trains, torch's own op runs, and hooks save the packed input.
The Function handles frozen weights (no input saved), and weights that autocast casts (saved uncast).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.call_arguments import BoundCall
from brevact.autograd.deriving.layers import is_large_and_recomputed, remember_output, samples_of_call
from brevact.autograd.ops.base import Formula, Needs, save
from brevact.autograd.ops.norm_formulas import sum_of_channels
from brevact.autograd.ops.op import Op, Saves, Stored, everywhere
from brevact.autograd.saving.saved import Region, Weight
from brevact.private_names.of_torch import is_any_autocast_enabled, suggest_memory_format

#: Dtypes in which gradients of pieces are summed; those of other dtypes are summed in float32.
_SUMMED = torch.float32, torch.float64

_convolution_backward = torch.ops.aten.convolution_backward.default


def to_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Cast as autocast does, never float64; casting here keeps it from caching a weight copy without gradients."""
    if not is_any_autocast_enabled():
        return tensors
    first = tensors[0]
    assert first is not None
    device = first.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple([x.to(dtype) if x is not None and x.dtype is not torch.float64 else x for x in tensors])


#: Options of ``aten.convolution_backward``: stride, padding, dilation, transposed or not, output padding, groups.
_Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int]


def _apply(region: Region, layer: Callable, gradients: Callable, input: Tensor, weight: Tensor, bias: Weight) -> Tensor:
    """Run a layer; ``gradients`` reads the computed type, the output's gradient, and the saved input and weight.

    A linear layer's weight is read for the input's gradient alone.
    """

    def run(ctx: Any, input: Tensor, weight: Tensor, bias: Weight) -> Tensor:
        x, w, b = to_autocast(input, weight, bias)
        needs_input, needs_weight = ctx.needs_input_grad[3:5]
        kept = region.keep(input) if needs_weight else None
        reads_weight = needs_input or (needs_weight and weight.dim() > 2)
        save(ctx, kept, region.keep_weight(weight) if reads_weight else None)
        ctx.gradients = functools.partial(gradients, w.dtype)
        return layer(x, w, b)

    return region.apply(Formula, run, None, input, weight, bias)


def _apply_convolution(
    region: Region, convolve: Callable, geometry: _Geometry, input: Tensor, weight: Tensor, bias: Weight
) -> Tensor:
    shape, stride, bias_sizes = input.shape, input.stride(), None if bias is None else list(bias.shape)
    recomputes = bool(region.recompute)

    def gradients(dtype: torch.dtype, needs: Needs, grad: Tensor, kept: Any, weight: Any) -> tuple[Any, ...]:
        if weight is None:  # only the bias trains
            return None, None, sum_of_channels(grad)
        grad, w = grad.to(dtype), weight.decode_as(dtype)
        if recomputes and kept is not None and kept.decoder.depth and needs[0] and grad.is_cpu:
            return _sample_by_sample(shape, bias_sizes, geometry, grad, kept, w, list(needs))
        if kept is None:  # the values do not matter for the input's gradient
            x = torch.empty_strided(shape, stride, dtype=dtype, device=grad.device)
        else:
            x = kept.decode_as(dtype)
        return _convolution_backward(grad, x, w, bias_sizes, *geometry, list(needs))

    return _apply(region, convolve, gradients, input, weight, bias)


def _sample_by_sample(
    shape: torch.Size, bias_sizes: Any, geometry: _Geometry, grad: Tensor, kept: Any, weight: Tensor, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of weight and bias first: only they need the decoded input.

    Each runs on a few samples at a time, since ATen copies its operands to its own memory order.
    """
    dtype, step = grad.dtype, samples_of_call(shape)
    if weight.numel() > step * math.prod(shape[1:]):
        step = shape[0]  # sums of weights would take long
    samples = [slice(start, start + step) for start in range(0, shape[0], step)]
    totals: list[Tensor | None] = [None, None]
    x = kept.decode_as(dtype)
    for part in samples:
        sums = _convolution_backward(grad[part], x[part], weight, bias_sizes, *geometry, [False, *mask[1:]])[1:]
        for place, sum_of_part in enumerate(sums):
            total = totals[place]
            if total is None:  # sums of many pieces would stagnate in 16 bits
                totals[place] = sum_of_part if sum_of_part is None or dtype in _SUMMED else sum_of_part.float()
            else:
                total.add_(sum_of_part)
    totals = [total if total is None else total.to(dtype) for total in totals]
    order = suggest_memory_format(x)
    del x
    grad_input = torch.empty(shape, dtype=dtype, device=grad.device, memory_format=order)
    for part in samples:
        out = grad_input[part]  # only the sizes and strides of the input matter here
        out.copy_(_convolution_backward(grad[part], out, weight, None, *geometry, [True, False, False])[0])
    return grad_input, *totals


def as_tuples(dims: int, *options: int | Sequence[int]) -> list[tuple[int, ...]]:
    """Return one number per spatial dimension for each option, as torch's layers accept them."""
    found = []
    for option in options:
        values = tuple(map(operator.index, option if isinstance(option, tuple | list) else (option,)))  # NumPy's, too
        found.append(values * dims if len(values) == 1 else values)
    return found


def _convolve(
    region: Region, func: Callable, input: Tensor, weight: Tensor, bias: Weight, options: tuple, geometry: _Geometry
) -> Tensor:
    if input.dim() < weight.dim():  # one sample
        return _convolve(region, func, input.unsqueeze(0), weight, bias, options, geometry).squeeze(0)
    runner = region.torch_runner(input) if weight.requires_grad and input is not weight else None
    if region.recompute and is_large_and_recomputed(region, input):
        runner = None
    if runner is not None:
        out = runner.run_torch(func, input, weight, bias, *options)
    else:
        out = _apply_convolution(region, lambda x, w, b: func(x, w, b, *options), geometry, input, weight, bias)
    if region.recompute:
        weights_of_sample = weight.numel() * (input if geometry[3] else out)[0, 0].numel()
        cost = weights_of_sample / out[0].numel()
        remember_output(region, BoundCall(func, (Tensor, Tensor, Tensor, *options)), input, weight, bias, out, cost)
    return out


def _convolution(
    dims: int,
    region: Region,
    func: Callable,
    input: Tensor,
    weight: Tensor,
    bias: Weight = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Any:
    if not region.can_pack_layer(input, weight, bias, dims):
        return NotImplemented
    if isinstance(padding, str):
        steps, gaps = as_tuples(dims, stride, dilation)
        total = [gap * (size - 1) for gap, size in zip(gaps, weight.shape[2:], strict=True)]
        if padding not in ("same", "valid") or (padding == "same" and any(step != 1 for step in steps)):
            return NotImplemented  # torch raises the error
        if padding == "same" and any(each % 2 for each in total):
            return NotImplemented  # torch pads the input on one side, and hooks pack it
        padding = [each // 2 for each in total] if padding == "same" else 0
    steps, pads, dilation = as_tuples(dims, stride, padding, dilation)
    geometry = steps, pads, dilation, False, [0] * dims, groups
    return _convolve(region, func, input, weight, bias, (steps, pads, dilation, groups), geometry)


def _transposed(
    dims: int,
    region: Region,
    func: Callable,
    input: Tensor,
    weight: Tensor,
    bias: Weight = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Any:
    if not region.can_pack_layer(input, weight, bias, dims):
        return NotImplemented
    steps, pads, more, dilation = as_tuples(dims, stride, padding, output_padding, dilation)
    geometry = steps, pads, dilation, True, more, groups
    return _convolve(region, func, input, weight, bias, (steps, pads, more, groups, dilation), geometry)


STORED = Stored(
    "convolution, transposed convolution", "the input, packed; the weight unpacked", "input exact, weight unbiased"
)


def _apply_linear(region: Region, linear: Callable, input: Tensor, weight: Tensor, bias: Weight) -> Tensor:
    is_flattened = input.dim() <= 2 or input.is_contiguous()
    is_transposed = input.dim() == 2 and input.stride() == (1, input.shape[0])
    has_rows = weight.stride() == (weight.shape[1], 1)

    def gradients(dtype: torch.dtype, needs: Needs, grad: Tensor, kept: Any, weight: Any) -> tuple[Tensor | None, ...]:
        grad = grad.to(dtype)
        rows = grad.reshape(-1, grad.shape[-1]) if grad.dim() != 2 else grad
        grad_input = grad_weight = grad_bias = None
        if kept is not None:  # first: the input's gradient then reuses the memory of the input
            x = kept.decode_as(dtype)
            x = x.reshape(-1, x.shape[-1])
            grad_weight = rows.t() @ x if has_rows else (x.t() @ rows).t()
            del x
        if weight is not None:
            w = weight.decode_as(dtype)
            product = (w.t() @ rows.t()).t() if is_transposed else rows @ w
            grad_input = product.view(*grad.shape[:-1], w.shape[1])
        if needs[2]:
            grad_bias = rows.sum(0) if is_flattened else grad.sum(tuple(range(grad.dim() - 1)))
        return grad_input, grad_weight, grad_bias

    return _apply(region, linear, gradients, input, weight, bias)


def _linear(region: Region, func: Callable, input: Tensor, weight: Tensor, bias: Weight = None) -> Any:
    if not region.can_pack_layer(input, weight, bias) or weight.dim() != 2 or input.dim() == 0:
        return NotImplemented
    runner = region.torch_runner(input) if input is not weight else None
    if region.recompute and is_large_and_recomputed(region, input):
        runner = None
    if runner is not None:
        out = runner.run_torch(func, input, weight, bias, flattens=True)
    else:
        out = _apply_linear(region, func, input, weight, bias)
    if region.recompute:
        remember_output(region, func, input, weight, bias, out, cost=weight.shape[1])
    return out


OPS = (
    *(
        Op(everywhere(f"{name}{dims}d"), functools.partial(handler, dims), STORED, saves=Saves.FACTORS, is_layer=True)
        for name, handler in (("conv", _convolution), ("conv_transpose", _transposed))
        for dims in (1, 2, 3)
    ),
    Op(everywhere("conv_tbc", "convolution"), saves=Saves.FACTORS),
    Op(everywhere("linear"), _linear, STORED._replace(op="linear"), saves=Saves.FACTORS, is_layer=True),
    Op(everywhere("bilinear"), saves=Saves.FACTORS, is_layer=True),
)
