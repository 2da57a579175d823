"""Parses calls of torch's norms into `formulas` for `functions`; torch handles the arguments that it refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact.autograd.ops.base import requires_grad
from brevact.autograd.ops.norm.formulas import (
    BatchNorm,
    Frozen,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    Norm,
    RMSNorm,
    runs_in_float32,
)
from brevact.autograd.ops.norm.functions import apply, reacts
from brevact.autograd.ops.op import Op, Stored, everywhere
from brevact.autograd.saved import Keeper
from brevact.autograd.settings import BackwardSettings
from brevact.autograd.weights import is_parameter
from brevact.private_names.of_torch import verify_batch_size, verify_spatial_size
from brevact.quantizers import Layout
from brevact.quantizers.normalizing_plans import NormalizedPlan, plan_of_channels


def _fit(shape: tuple[int, ...], *weights: Any) -> bool:
    """Return whether weights are None, or tensors of this shape whose class does not override torch functions."""
    for x in weights:
        if x is not None and not (isinstance(x, Tensor) and x.shape == shape and not _has_rules(type(x))):
            return False
    return True


@functools.cache
def _has_rules(kind: type[Tensor]) -> bool:
    """Return whether a class overrides torch functions, as weights with per-sample gradients do."""
    rule = getattr(kind.__torch_function__, "__func__", None)  # nn.Parameter has none
    return rule is not None and rule is not Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def _has_channels(input: Any, weight: Any, bias: Any, least_dims: int = 2) -> bool:
    return isinstance(input, Tensor) and input.dim() >= least_dims and _fit((input.shape[1],), weight, bias)


def _have_last_dims(input: Any, shape: Any, *weights: Any) -> bool:
    if not (isinstance(input, Tensor) and isinstance(shape, tuple | list) and shape):
        return False
    return tuple(input.shape[-len(shape) :]) == tuple(shape) and _fit(tuple(shape), *weights)


def _run(region: Keeper, norm: Norm, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    """Run a norm; under double backward, torch's own on its input less its means."""
    if not reacts(region, input, weight, bias, has_mean=norm.has_mean):
        return NotImplemented
    return (_by_torch if region.settings.double_backward else apply)(region, norm, input, weight, bias)


def _by_torch(region: Keeper, norm: Norm, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    if region.settings.for_normalized is not None or not requires_grad(input, weight):
        return NotImplemented
    runner = region.torch_runner(input, *norm.running)
    return NotImplemented if runner is None else runner.run_torch_norm(norm, input, weight, bias)


def _of_statistics(
    kind: type[BatchNorm],
    region: Keeper,
    func: Callable,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: Any = None,
    momentum: Any = None,
    eps: Any = None,
    cudnn_enabled: Any = None,
    use_input_stats: Any = None,
) -> Any:
    by_batch = training if use_input_stats is None else use_input_stats
    if not isinstance(by_batch, bool) or cudnn_enabled is None:
        return NotImplemented
    if not _has_channels(input, weight, bias, 3 if kind is InstanceNorm else 2):
        return NotImplemented
    if not reacts(region, input, weight, bias):
        return NotImplemented
    running = running_mean, running_var
    if not all([(x is None and by_batch) or (isinstance(x, Tensor) and not x.requires_grad) for x in running]):
        return NotImplemented  # torch raises the error
    rest = momentum, eps, cudnn_enabled
    if not by_batch:
        if region.settings.double_backward:
            return NotImplemented
        assert running_mean is not None and running_var is not None
        function = torch.instance_norm if kind is InstanceNorm else torch.batch_norm
        return apply(region, Frozen(function, running_mean, running_var, *rest), input, weight, bias)
    norm = kind(*running, *rest)
    is_torchs = kind is BatchNorm and requires_grad(input, weight) and region.settings.for_normalized is None
    if is_torchs and not region.settings.double_backward:
        norm.packing = _plan_of_call(region.settings, input, *running, weight, bias, eps)
        found = NotImplemented if norm.packing is not None else _by_torch(region, norm, input, weight, bias)
        if found is not NotImplemented:
            return found
    return (_by_torch if region.settings.double_backward else apply)(region, norm, input, weight, bias)


def _plan_of_call(
    settings: BackwardSettings,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> NormalizedPlan | None:
    """Return how batch norm by batch statistics packs its input, in any surroundings; None for unusual arguments."""
    if not getattr(settings.quantizer, "has_uniform_codes", False) or input.numel() < settings.min_numel:
        return None
    if type(eps) is not float or eps <= 0.0 or type(input) is not Tensor:
        return None
    if input._is_view() and (is_parameter(input._base) or input._base.numel() != input.numel()):  # type: ignore[union-attr]
        return None
    device = input.device
    for statistic in (running_mean, running_var):
        if statistic is not None and not (type(statistic) is Tensor and statistic.device == device):
            return None
    for y in (weight, bias):
        if y is not None and not (type(y) is nn.Parameter and y.dtype is torch.float32 and y.device == device):
            return None
    if input.is_neg() or input.layout is not torch.strided or (weight is None and bias is not None):
        return None
    if input.dtype is not torch.float32 and (weight is None or runs_in_float32(BatchNorm.name, input)):
        return None  # its statistics may have its dtype, or autocast casts it
    return _plan_of(settings.quantizer, input.shape, input.stride(), input.dtype)


@functools.lru_cache(maxsize=4096)
def _plan_of(quantizer: Any, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> NormalizedPlan | None:
    layout = Layout.of_sizes(shape, stride, dtype)
    return plan_of_channels(quantizer, layout) if shape.numel() == layout.numel > shape[1] else None


def _batch_norm(
    region: Keeper,
    func: Callable,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training and isinstance(input, Tensor) and input.dim() >= 2:
        verify_batch_size(input.size())
    if not isinstance(eps, float | int) or eps <= 0:
        return NotImplemented
    options = training, momentum, eps, torch.backends.cudnn.enabled
    return _of_statistics(BatchNorm, region, func, input, weight, bias, running_mean, running_var, *options)


def _instance_norm(
    region: Keeper,
    func: Callable,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if use_input_stats and isinstance(input, Tensor) and input.dim() >= 2:
        verify_spatial_size(input.size())
    options = use_input_stats, momentum, eps, torch.backends.cudnn.enabled
    return _of_statistics(InstanceNorm, region, func, input, weight, bias, running_mean, running_var, *options)


def _layer_norm(
    region: Keeper,
    func: Callable,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if not _have_last_dims(input, normalized_shape, weight, bias):
        return NotImplemented
    return _run(region, LayerNorm(tuple(normalized_shape), eps), input, weight, bias)


def _torch_group_norm(
    region: Keeper,
    func: Callable,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    if not _has_channels(input, weight, bias) or num_groups <= 0 or input.shape[1] % num_groups:
        return NotImplemented
    return _run(region, GroupNorm(num_groups, eps), input, weight, bias)


def _group_norm(
    region: Keeper,
    func: Callable,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if isinstance(input, Tensor) and input.dim() >= 2 and num_groups > 0:
        n, c, *sizes = input.shape
        verify_batch_size([n * c // num_groups, num_groups, *sizes])
    return _torch_group_norm(region, func, input, num_groups, weight, bias, eps)


def _rms_norm(
    region: Keeper,
    func: Callable,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    if not _have_last_dims(input, normalized_shape, weight):
        return NotImplemented
    return _run(region, RMSNorm(tuple(normalized_shape), eps), input, weight, None)


_STORED = Stored(
    "batch, layer, group, instance and RMS norm",
    "the normalized input, packed, which has one scale across rows and channels; the inverse deviations as they are",
    "bias Var/N of one packed copy, negligible for maps",
)
_WITH_MEAN: dict[Callable, Callable] = {
    F.batch_norm: _batch_norm,
    torch.batch_norm: functools.partial(_of_statistics, BatchNorm),
    F.instance_norm: _instance_norm,
    torch.instance_norm: functools.partial(_of_statistics, InstanceNorm),
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _torch_group_norm,
}
#: Torch's own instance norm saves its input in another layout.
_ONCE = F.instance_norm, torch.instance_norm
OPS = (
    *(
        Op(
            *((func,), handler, _STORED, None if func in _ONCE else handler),
            is_bit_exact=False,
            is_layer=True,
            is_norm=True,
            rounds_forward=True,
        )
        for func, handler in _WITH_MEAN.items()
    ),
    Op((F.rms_norm, torch.rms_norm), _rms_norm, _STORED, is_bit_exact=False, is_layer=True, is_norm=True),
    Op(everywhere("native_layer_norm", "local_response_norm"), is_layer=True),
)
