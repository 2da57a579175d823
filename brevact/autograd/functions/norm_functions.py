"""Norms: the input is stored packed; the statistics, one or two numbers a group, as they are.

The backward pass is PyTorch's own formula on the decoded input. It reads the normalized input twice, so that one
packed copy leaves a bias of Var[x^] g / N per element: negligible for the N of a feature map.
Source: ActNN, arXiv:2104.14129, appendix B.2. Batch norm by the statistics of the batch is torch's own op, where it can
be, as convolutions are.

A quantizer with ``of_normalized`` stores N(x) = (x - mean) * invstd instead, on a fixed grid; of a group invstd alone
is stored, which the gradient needs anyway. Where a group held NaN or an infinity invstd is NaN, and so are the
gradients. With ``quantize_forward`` the affine step reads the stored values N^ in place of N(x), and the gradient
passes straight through: out = weight * N^ + bias.
Source: Graham, arXiv:1702.08231, sections 1.3 to 1.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brevact.autograd.functions.base import Saving, load, requires_grad, save
from brevact.autograd.functions.norms import Frozen, Norm, along_channels, sum_of_channels
from brevact.autograd.keeping import Kept, decode_early
from brevact.private_names.of_torch import has_kernel_for_key, is_any_autocast_enabled

if TYPE_CHECKING:
    from brevact.autograd.regions import Region


def reacts(region: Region, input: Any, weight: Tensor | None, bias: Tensor | None, *, has_mean: bool = True) -> bool:
    """Return whether a region has something to do for a norm with these arguments."""
    if has_mean and region.settings.quantizes_forward:
        return region.is_activation(input) and input.numel() > 0
    return region.packs_layer_input(input) and input.numel() > 0 and requires_grad(input, weight, bias)


def apply(region: Region, norm: Norm, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Run a norm that a region :func:`reacts` to."""
    if not (norm.has_mean and region.settings.quantizes_forward):
        return region.apply(_Frozen if isinstance(norm, Frozen) else _Norm, norm, input, weight, bias)
    if torch.is_grad_enabled() and requires_grad(input, weight, bias):
        return region.apply(_FrozenRounded if isinstance(norm, Frozen) else _Norm, norm, input, weight, bias)
    run = _run_frozen if isinstance(norm, Frozen) else _run_normalized
    return run(region, norm, *_to_autocast(norm, input, weight, bias))[0]


class _Norm(Saving):
    """A norm by statistics of its input."""

    @staticmethod
    def forward(
        ctx: Any, region: Region, norm: Norm, input: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        reads_x = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        x, w, b = _to_autocast(norm, input, weight, bias)
        ctx.norm, ctx.is_normalized = norm, _stores_normalized(region, norm, x, reads_x)
        if ctx.is_normalized:
            out, kept, invstd = _run_normalized(region, norm, x, w, b)
            mean, ctx.dtypes = None, (invstd.dtype, invstd.dtype)
        else:
            out, mean, invstd = norm.forward(x, w, b)
            kept = region.keep(input) if reads_x else None
            ctx.dtypes = x.dtype, None if w is None else w.dtype
        save(ctx, kept if reads_x else None, exact=(weight, mean, invstd) if reads_x else (None, None, None))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, mean, invstd = load(ctx)
        norm, mask = ctx.norm, list(ctx.needs_input_grad[2:5])
        grad_input = grad_weight = None
        if kept is not None:
            dtype, weight_dtype = ctx.dtypes
            x = kept.decode()
            x = x if x.dtype is dtype else x.to(dtype)
            w = weight if weight is None or weight.dtype is weight_dtype else weight.to(weight_dtype)
            wanted = [*mask[:2], mask[2] and w is not None]  # ATen gives no bias its gradient without a weight
            if ctx.is_normalized:
                grads = norm.backward_of_normalized(grad.to(dtype), x, invstd, w, wanted)
            else:
                grads = norm.backward(grad, x, mean, invstd, w, wanted)
            if wanted == mask:
                return None, None, *grads
            grad_input, grad_weight, _ = grads
        return None, None, grad_input, grad_weight, norm.bias_gradient(grad) if mask[2] else None


class _Frozen(Saving):
    """A norm whose statistics are constants: it reads its input for the gradient of the weight alone."""

    @staticmethod
    def forward(
        ctx: Any, region: Region, norm: Frozen, input: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        x, w, b = _to_autocast(norm, input, weight, bias)
        kept = region.keep(input) if ctx.needs_input_grad[3] else None
        out, mean, var = norm.forward(x, w, b)
        save(ctx, kept, exact=(weight, mean, var))
        ctx.norm, ctx.dtype = norm, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, mean, var = load(ctx)
        mask = list(ctx.needs_input_grad[2:5])
        if kept is None:
            return None, None, *_frozen_backward(grad, weight, torch.rsqrt(var + ctx.norm.eps), mask)
        return None, None, *ctx.norm.backward(grad, kept.decode().to(ctx.dtype), mean, var, weight, mask)


class _FrozenRounded(Saving):
    """A norm whose statistics are constants and whose affine step reads rounded values."""

    @staticmethod
    def forward(
        ctx: Any, region: Region, norm: Frozen, input: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        out, kept, invstd, mark = _run_frozen(region, norm, *_to_autocast(norm, input, weight, bias))
        save(ctx, kept if ctx.needs_input_grad[3] else None, exact=(weight, invstd, mark))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, invstd, mark = load(ctx)
        grads = _frozen_backward(grad, weight, invstd, list(ctx.needs_input_grad[2:5]))
        grad_weight = None if kept is None else sum_of_channels(kept.multiply(grad)).add(mark)
        return None, None, grads[0], grad_weight, grads[2]


def _frozen_backward(
    grad: Tensor, weight: Tensor | None, invstd: Tensor, mask: list[bool]
) -> tuple[Tensor | None, None, Tensor | None]:
    """Gradients of x and bias when mean and variance are constants: g * weight * invstd, sum of g."""
    grad_input = grad_bias = None
    if mask[0]:
        factor = invstd if weight is None else weight * invstd
        grad_input = grad * along_channels(factor.to(grad.dtype), grad)
    if mask[2]:
        grad_bias = sum_of_channels(grad)
    return grad_input, None, grad_bias


def _stores_normalized(region: Region, norm: Norm, x: Tensor, reads_x: bool) -> bool:
    """Whether N(x) is stored in place of x, or its rounded values are what the forward pass reads."""
    settings = region.settings.of_normalized if norm.has_mean else None
    if settings is None:
        return False
    return region.settings.quantizes_forward or (reads_x and x.numel() >= settings.min_numel)


def _run_normalized(
    region: Region, norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Kept, Tensor]:
    """Output, what keeps N(x), and invstd, NaN for groups whose statistics are no finite numbers."""
    out, mean, invstd = norm.forward(x, weight, bias)
    dtype = torch.promote_types(x.dtype, torch.float32)
    mean = mean.to(dtype)
    invstd = mean * 0 + invstd
    z = torch.sub(x, norm.align(mean, x)).mul_(norm.align(invstd, x))
    kept = region.keep_normalized(z)
    if region.settings.quantizes_forward:
        _write_affine(out, norm, kept, norm.align(invstd - invstd, x), weight, bias)
    return out, kept, invstd


def _run_frozen(
    region: Region, norm: Frozen, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Kept, Tensor, Tensor]:
    """Output, what keeps N(x), invstd, and a zero a channel, NaN where the channel holds a value that is not finite."""
    out, mean, var = norm.forward(x, weight, bias)
    dtype = torch.promote_types(x.dtype, torch.float32)
    mean, invstd = mean.to(dtype), torch.rsqrt(var.to(dtype) + norm.eps)
    z = torch.sub(x, along_channels(mean, x)).mul_(along_channels(invstd, x))
    kept = region.keep_normalized(z)
    mark = z * 0
    _write_affine(out, norm, kept, mark, weight, bias)
    return out, kept, invstd, sum_of_channels(mark)


def _write_affine(
    out: Tensor, norm: Norm, kept: Kept, mark: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Overwrite ``out`` with weight * N^ + bias, N^ being what is kept; ``mark`` is 0, or NaN where N(x) was none."""
    levels = decode_early(kept).add_(mark)
    if weight is not None:
        levels.mul_(norm.align_weight(weight, levels))
    if bias is not None:
        levels.add_(norm.align_weight(bias, levels))
    out.copy_(levels)


def _to_autocast(norm: Norm, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast to float32 where autocast runs this norm in it."""
    if not is_any_autocast_enabled():
        return tensors
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not (
        torch.is_autocast_enabled(device) and has_kernel_for_key(f"aten::{norm.name}", f"Autocast{device.upper()}")
    ):
        return tensors
    return tuple(x.float() if x is not None and x.dtype is not torch.float64 else x for x in tensors)
