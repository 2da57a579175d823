"""Batch normalization: the input is stored packed; mean and inverse deviation, one number a channel, as they are.

The backward pass is PyTorch's own formula on the decoded input. It reads the normalized input twice, so that one
packed copy leaves a bias of Var[x^] g / N per element: negligible for the N of a feature map.
Source: ActNN, arXiv:2104.14129, appendix B.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.functions.base import Saving, load, requires_grad, save

if TYPE_CHECKING:
    from brevact.autograd.regions import Region


_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default


class _BatchNorm(Saving):
    @staticmethod
    def forward(
        ctx: Any,
        region: Region,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Tensor:
        out, mean, invstd, _, _ = torch._batch_norm_impl_index(
            input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
        )
        needs_input, needs_weight = ctx.needs_input_grad[1:3]
        needs_x = needs_weight or (training and needs_input)
        statistics = (mean, invstd) if training else (running_mean, running_var)
        save(ctx, region.keep(input) if needs_x else None, exact=(weight, *statistics))
        ctx.training, ctx.eps, ctx.dtype = training, eps, input.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, mean, spread = load(ctx)
        mask = list(ctx.needs_input_grad[1:4])
        if kept is None:  # statistics are constants and the weight does not train
            grads = _frozen_backward(grad, weight, spread, ctx.eps, mask)
        else:
            saved = (None, None, mean, spread) if ctx.training else (mean, spread, None, None)
            grads = _batch_norm_backward(grad, kept.decode(), weight, *saved, ctx.training, ctx.eps, mask)
        return None, *grads, None, None, None, None, None, None


def _frozen_backward(
    grad: Tensor, weight: Tensor | None, variance: Tensor | None, eps: float, mask: list[bool]
) -> tuple[Tensor | None, None, Tensor | None]:
    """Gradients of x and bias when mean and variance are constants: g * weight / sqrt(var + eps), sum of g."""
    grad_input = grad_bias = None
    if mask[0]:
        factor = torch.rsqrt(variance + eps) if weight is None else weight * torch.rsqrt(variance + eps)
        grad_input = grad * factor.to(grad.dtype).view(1, -1, *[1] * (grad.dim() - 2))
    if mask[2]:
        grad_bias = grad.sum([0, *range(2, grad.dim())])
    return grad_input, None, grad_bias


def _torch_batch_norm(
    region: Region,
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
    if not (
        region.packs_layer_input(input) and input.dim() >= 2 and input.numel() and requires_grad(input, weight, bias)
    ):
        return NotImplemented
    if not training and (running_mean is None or running_var is None):
        return NotImplemented  # torch explains what is missing
    return region.apply(
        _BatchNorm, input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
    )


def _batch_norm(
    region: Region,
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
        F._verify_batch_size(input.size())
    cudnn = torch.backends.cudnn.enabled
    return _torch_batch_norm(
        region, func, input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn
    )


HANDLERS = {F.batch_norm: _batch_norm, torch.batch_norm: _torch_batch_norm}
