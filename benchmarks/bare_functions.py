"""The least that custom Functions cost: convolutions, batch norms and ReLUs with Functions of a few lines.

They store what torch stores, but for ReLU, which packs its mask; by no region, no hooks, no sharing.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from brevact.quantizers import Layout, mask_multiply, pack_mask

_convolution_backward = torch.ops.aten.convolution_backward.default
_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *geometry: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return torch.conv2d(x, weight, None, *geometry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        stride, padding, dilation, groups = ctx.geometry
        mask = [*ctx.needs_input_grad[:2], False]
        geometry = stride, padding, dilation, False, (0, 0), groups
        grad_x, grad_weight, _ = _convolution_backward(grad, *ctx.saved_tensors, None, *geometry, mask)
        return grad_x, grad_weight, None, None, None, None


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        mean, var, momentum, eps = rest
        out, *statistics, _, _ = torch._batch_norm_impl_index(x, weight, bias, mean, var, True, momentum, eps, True)
        ctx.save_for_backward(x, weight, *statistics)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *statistics = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        grads = _batch_norm_backward(grad, x, weight, None, None, *statistics, True, ctx.eps, mask)
        return *grads, None, None, None, None


class _ReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        ctx.save_for_backward(pack_mask(x))
        ctx.layout = Layout.of(x)
        if inplace:
            ctx.mark_dirty(x)
            return torch.relu_(x)
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return mask_multiply(*ctx.saved_tensors, ctx.layout, grad), None


class _BareConv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return _Convolution.apply(input, self.weight, self.stride, self.padding, self.dilation, self.groups)


class _BareBatchNorm2d(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        return _BatchNorm.apply(input, self.weight, self.bias, *statistics, self.momentum, self.eps)


class _BareReLU(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return _ReLU.apply(input, self.inplace)


_BARE = {nn.Conv2d: _BareConv2d, nn.BatchNorm2d: _BareBatchNorm2d, nn.ReLU: _BareReLU}


def bare_functions(model: nn.Module) -> nn.Module:
    """Copy a model, with Functions for its convolutions, batch norms and ReLUs.

    Args:
        model: any module in training mode whose convolutions have no bias.
    """
    model = copy.deepcopy(model)
    for module in model.modules():
        module.__class__ = _BARE.get(type(module), type(module))
    return model
