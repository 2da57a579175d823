"""Parses calls of torch's norms into `formulas` for `functions`; torch handles the arguments that it refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.base import requires_grad
from brevact.autograd.ops.norm.formulas import BatchNorm, Frozen, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from brevact.autograd.ops.norm.functions import apply, reacts
from brevact.autograd.ops.norm.planned_batch_norm import find_plan, packs_anew
from brevact.autograd.ops.norm.planned_batch_norm import run as run_planned
from brevact.autograd.ops.op import Op, Stored, everywhere
from brevact.private_names.of_torch import verify_batch_size, verify_spatial_size
from brevact.quantizers import is_traced


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


def _have_last_dims(input: Any, shape: Any) -> bool:
    if not (isinstance(input, Tensor) and isinstance(shape, tuple | list) and shape):
        return False
    return tuple(input.shape[-len(shape) :]) == tuple(shape)


def _by_torch(region: Keeper, norm: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    """Run torch's own norm, which supports double backward, on its input less its means."""
    if region.settings.for_normalized is not None or not requires_grad(input, weight):
        return NotImplemented
    runner = region.torch_runner(input, *norm.running)
    return NotImplemented if runner is None else runner.run_torch_norm(norm, input, weight, bias)


def _torch_batch_norm(
    region: Keeper,
    func: Callable,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    if not (isinstance(input, Tensor) and input.dim() >= 2 and _fit((input.shape[1],), weight, bias)):
        return NotImplemented
    if not (training or (running_mean is not None and running_var is not None)):
        return NotImplemented  # torch raises the error
    for statistic in (running_mean, running_var):
        if statistic is not None and not (isinstance(statistic, Tensor) and not statistic.requires_grad):
            return NotImplemented  # here, too
    if not isinstance(training, bool):
        return NotImplemented
    if not reacts(region, input, weight, bias):
        return NotImplemented
    running = running_mean, running_var
    if not training and region.settings.double_backward:
        return NotImplemented
    if not training:
        assert running_mean is not None and running_var is not None
        frozen = Frozen(torch.batch_norm, running_mean, running_var, momentum, eps, cudnn_enabled)
        return apply(region, frozen, input, weight, bias)
    norm = BatchNorm(*running, momentum, eps, cudnn_enabled)
    if region.settings.double_backward:
        return _by_torch(region, norm, input, weight, bias)
    is_torchs = requires_grad(input, weight) and region.settings.for_normalized is None
    plan = None
    if is_torchs and not is_traced(input):
        plan = find_plan(region.settings, input, *running, weight, bias, eps)
    if plan is not None:
        if packs_anew(region, input):  # type: ignore[arg-type]  # eager: the input is not traced
            return run_planned(region, plan, norm, input, weight, bias)  # type: ignore[arg-type]
        norm.packing = plan.packing
        return apply(region, norm, input, weight, bias)
    runner = region.torch_runner(input, *running) if is_torchs else None
    if runner is not None:
        return runner.run_torch_norm(norm, input, weight, bias)
    return apply(region, norm, input, weight, bias)


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
    cudnn = torch.backends.cudnn.enabled
    return _torch_batch_norm(
        region, func, input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn
    )


def _torch_instance_norm(
    region: Keeper,
    func: Callable,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    if not (isinstance(input, Tensor) and input.dim() >= 3 and _fit((input.shape[1],), weight, bias)):
        return NotImplemented
    if not (use_input_stats or (running_mean is not None and running_var is not None)):
        return NotImplemented
    if not reacts(region, input, weight, bias):
        return NotImplemented
    if use_input_stats:
        norm = InstanceNorm(running_mean, running_var, momentum, eps, cudnn_enabled)
        return apply(region, norm, input, weight, bias)
    assert running_mean is not None and running_var is not None
    frozen = Frozen(torch.instance_norm, running_mean, running_var, momentum, eps, cudnn_enabled)
    return apply(region, frozen, input, weight, bias)


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
    cudnn = torch.backends.cudnn.enabled
    return _torch_instance_norm(
        region, func, input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn
    )


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
    if not (_have_last_dims(input, normalized_shape) and _fit(tuple(normalized_shape), weight, bias)):
        return NotImplemented
    if not reacts(region, input, weight, bias):
        return NotImplemented
    run = _by_torch if region.settings.double_backward else apply
    return run(region, LayerNorm(tuple(normalized_shape), eps), input, weight, bias)


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
    if not (isinstance(input, Tensor) and input.dim() >= 2 and _fit((input.shape[1],), weight, bias)):
        return NotImplemented
    if num_groups <= 0 or input.shape[1] % num_groups or not reacts(region, input, weight, bias):
        return NotImplemented
    run = _by_torch if region.settings.double_backward else apply
    return run(region, GroupNorm(num_groups, eps), input, weight, bias)


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
    if not (_have_last_dims(input, normalized_shape) and _fit(tuple(normalized_shape), weight)):
        return NotImplemented
    if not reacts(region, input, weight, None, has_mean=False):
        return NotImplemented
    return apply(region, RMSNorm(tuple(normalized_shape), eps), input, weight, None)


_STORED = Stored(
    "batch, layer, group, instance and RMS norm",
    "the normalized input, packed, which has one scale across rows and channels; the inverse deviations as they are",
    "bias Var/N of one packed copy, negligible for maps",
)
_WITH_MEAN: dict[Callable, Callable] = {
    F.batch_norm: _batch_norm,
    torch.batch_norm: _torch_batch_norm,
    F.instance_norm: _instance_norm,
    torch.instance_norm: _torch_instance_norm,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _torch_group_norm,
}
#: Torch's own instance norm saves its input in another layout.
_TWICE = (_batch_norm, _torch_batch_norm, _layer_norm, _group_norm, _torch_group_norm)
OPS = (
    *(
        Op(
            *((func,), handler, _STORED, handler if handler in _TWICE else None),
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
