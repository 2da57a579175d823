"""Short ways through a region for the calls that nets make most often.

Between small tensors, finding out how a call is to be handled takes longer than the call. What most nets do is known
here by few conditions: layers with parameters behind layers with parameters, without hooks, reports or autocast around
the region. What is stored, and every gradient, is bit for bit as by the handlers in ``ops``, to which all other calls
go (``tests/autograd/test_ways.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd import known_values
from brevact.autograd.decoded_last import MOST_HELD
from brevact.autograd.derivations import MOST_DECODED
from brevact.autograd.derived import Kind, derive, follow, operands_of
from brevact.autograd.keeper import EagerKeeper
from brevact.autograd.ops.elementwise import run_product
from brevact.autograd.ops.norm import planned_batch_norm
from brevact.autograd.ops.smooth import run_torch, run_torch_by_output
from brevact.autograd.saved import ACTIVATION_DTYPES
from brevact.autograd.weights import ModelState, is_known_activation, is_parameter_or_view, tensors_in


class ShortWay(Protocol):
    """Runs a call in a region that packs; returns None for arguments that it does not know."""

    def __call__(self, region: EagerKeeper, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None: ...


def _is_activation(x: Any) -> bool:
    """Return whether a tensor, which is known to be one of no transform, is an activation that can be packed."""
    return is_known_activation(x) and x.dtype in ACTIVATION_DTYPES and x.layout is torch.strided and not x.is_nested


def _convolution(dims: int) -> ShortWay:
    def run(region: EagerKeeper, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        if len(args) != 7 or kwargs:
            return None
        input, weight, bias, stride, padding, dilation, groups = args
        if not is_parameter_or_view(weight) or type(padding) is not tuple or not _is_activation(input):
            return None
        if input.dim() != dims + 2 or not weight.requires_grad:
            return None
        return region.hooks.run_torch(func, input, weight, bias, stride, padding, dilation, groups)

    return run


def _batch_norm(region: EagerKeeper, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    if len(args) + len(kwargs) != 8 or len(args) < 3 or not is_known_activation(args[0]):  # as torch's layers call it
        return None
    return planned_batch_norm.run(region, *args, **kwargs)


def _adaptive_average(region: EagerKeeper, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Run the pooling of a map to one element, for which torch saves nothing; large maps end a chain."""
    if len(args) != 2 or kwargs or type(args[1]) not in (int, tuple) or args[1] not in (1, (1, 1)):
        return None
    input = args[0]
    if not _is_activation(input):
        return None
    if input.dim() != 4 or 0 in input.shape:
        return None
    out: Tensor = func(input, 1)
    ModelState.mark_activation(out)
    if input.shape[2] * input.shape[3] <= MOST_DECODED:
        _follow_result(region, func, args, out, Kind.AVERAGE)
    return out


_INPLACE = frozenset(("inplace",))


def _activation(function: Callable[..., Tensor], run_as_torch: Callable[..., Tensor | None]) -> ShortWay:
    def run(region: EagerKeeper, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        if len(args) != 1 or (kwargs and (kwargs.keys() != _INPLACE or kwargs["inplace"])):
            return None
        (input,) = args
        if not _is_activation(input) or input.numel() > MOST_HELD:
            return None
        return run_as_torch(region, function, input)

    return run


def _sum(region: EagerKeeper, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Run a sum of two tensors of the same sizes, for which torch saves nothing."""
    if len(args) != 2 or kwargs:
        return None
    x, y = args
    if not (is_known_activation(x) and is_known_activation(y)) or x.is_nested or y.is_nested:
        return None
    if not (x.layout is y.layout is torch.strided and x.shape == y.shape and x.device == y.device):
        return None
    out: Tensor = func(x, y)
    ModelState.mark_activation(out)
    if region.settings.derives and out.is_floating_point():
        kept = region.find_kept(x)
        other = None if kept is None else region.find_kept(y)
        if other is not None:
            derive(region, out, torch.add, ((x, kept), (y, other)), is_jointly_linear=True, adds=True, is_new=True)
    return out


def _product(region: EagerKeeper, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    if len(args) != 2 or kwargs:
        return None
    x, y = args
    if not (_is_activation(x) and _is_activation(y)) or x.device != y.device:
        return None
    out = run_product(region, func, x, y)
    if out is not None:
        ModelState.mark_activation(out)
        if not known_values.is_marked(out):
            _follow_result(region, func, args, out, Kind.BILINEAR)
    return out


def _follow_result(region: EagerKeeper, func: Callable, args: tuple, out: Tensor, kind: Kind) -> None:
    """Remember a result as a function of what keeps its arguments, as for calls without a short way."""
    operands = operands_of(region, tensors_in(args))
    if operands is not None:
        follow(region, func, args, {}, out, operands, kind)


SHORT_WAYS: dict[Callable, ShortWay] = {
    torch.conv1d: _convolution(1),
    torch.conv2d: _convolution(2),
    torch.conv3d: _convolution(3),
    F.batch_norm: _batch_norm,
    F.adaptive_avg_pool2d: _adaptive_average,
    **{func: _activation(func, run_torch) for func in (F.silu, F.hardswish)},
    **{func: _activation(func, run_torch_by_output) for func in (torch.sigmoid, Tensor.sigmoid)},
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__), _product),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__), _sum),
}
