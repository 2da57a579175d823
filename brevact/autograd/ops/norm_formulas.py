"""Norms as ATen computes them: output and statistics of a forward pass, and gradients from an input.

One small object per call holds the arguments that are not activations. The normalized input is
N(x) = (x - mean) * invstd, with one mean and one invstd per group of elements that a norm normalizes.

Norms that are written out: their input is saved by rows, each with its own scale.

``x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)``, the RMS norm of Llama and similar models, or ``x`` over a
root: the square and the product, or the quotient, save x, and their gradients multiply its error by powers of a row's
inverse deviation. Rows are divided by their own root mean square before they are packed, which takes two more bytes per
row, once for both ops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from brevact.autograd.deriving.norms import Alignment, NormInput
from brevact.autograd.saving.saved import Region, Saved, Weight, one_object_each
from brevact.private_names.of_torch import (
    batch_norm_impl_index,
    fused_rms_norm,
    fused_rms_norm_backward,
    has_kernel_for_key,
    is_any_autocast_enabled,
    suggest_memory_format,
)
from brevact.quantizers.backends import run_by_kernels
from brevact.quantizers.normalizing import NormalizedPlan

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Mask = list[bool]  # which gradients are needed

_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_group_norm_backward = torch.ops.aten.native_group_norm_backward.default


_OF_LAST_DIMS = Alignment(of_last_dims=True)


@run_by_kernels
def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Weight, mean: Tensor, invstd: Tensor, eps: float, mask: Mask, overwrites: bool
) -> Gradients:
    """Gradients of batch norm by batch statistics; if it ``overwrites``, the input's may reuse the memory of ``x``.
    The kernel adds the terms of sums in another order than ATen.
    """
    return _batch_norm_backward(grad, x, weight, None, None, mean, invstd, True, eps, mask)


@run_by_kernels
def batch_norm(
    x: Tensor,
    weight: Weight,
    bias: Weight,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm of an (N, C, ...) tensor by batch statistics, as PyTorch computes it; the others are (C,) each.

    It moves the running statistics by ``momentum`` of the difference, and returns output, means and inverse deviations.
    cuDNN may run on a GPU if it is enabled.
    """
    running = running_mean, running_var
    out, mean, invstd, _, _ = batch_norm_impl_index(x, weight, bias, *running, True, momentum, eps, cudnn_enabled)
    return out, mean, invstd


class Norm:
    """A norm by statistics of its input; weights and biases have one number per channel."""

    name: str
    has_mean = True
    packing: NormalizedPlan | None = None
    alignment = Alignment()

    @property
    def running(self) -> tuple[Tensor | None, Tensor | None]:
        return None, None

    def forward(self, x: Tensor, weight: Weight, bias: Weight) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the output, the means and the inverse deviations, as ATen does."""
        raise NotImplementedError

    def backward(self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Weight, mask: Mask) -> Gradients:
        raise NotImplementedError

    @property
    def key(self) -> Hashable | None:
        """Equal for norms that normalize a tensor to the same values; None for norms with statistics of their own."""
        return None

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return sum_of_channels(grad)


def runs_in_float32(name: str, x: Tensor) -> bool:
    if not is_any_autocast_enabled():
        return False
    device = x.device.type
    is_known = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return is_known and _has_autocast_kernel(name, device)


@functools.cache
def _has_autocast_kernel(name: str, device: str) -> bool:
    return has_kernel_for_key(f"aten::{name}", f"Autocast{device.upper()}")


def sum_of_channels(x: Tensor) -> Tensor:
    return x.sum([0, *range(2, x.dim())])


@dataclass(eq=False)
class BatchNorm(Norm):
    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float
    eps: float
    cudnn_enabled: bool
    #: How the input is packed if the gradients are computed from packed values.
    packing: NormalizedPlan | None = None
    name = "batch_norm"

    @property
    def running(self) -> tuple[Tensor | None, Tensor | None]:
        return self.running_mean, self.running_var

    def forward(self, x: Tensor, weight: Weight, bias: Weight) -> tuple[Tensor, Tensor, Tensor]:
        run = batch_norm.reference if self.packing is None else batch_norm
        return run(x, weight, bias, *self.running, self.momentum, self.eps, self.cudnn_enabled)

    def backward(self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Weight, mask: Mask) -> Gradients:
        return _batch_norm_backward(grad, x, weight, None, None, mean, invstd, True, self.eps, mask)

    @property
    def key(self) -> Hashable:
        return self.name, self.eps


@dataclass(eq=False)
class InstanceNorm(BatchNorm):
    """Instance norm by sample statistics: batch norm of one sample with N * C channels."""

    name = "instance_norm"

    def forward(self, x: Tensor, weight: Weight, bias: Weight) -> tuple[Tensor, Tensor, Tensor]:
        n, c = x.shape[:2]
        running = [_repeat(kept, n) for kept in self.running]
        out, mean, invstd, _, _ = batch_norm_impl_index(
            *(_as_one(x), _repeat(weight, n), _repeat(bias, n), *running, True),
            *(self.momentum, self.eps, self.cudnn_enabled),
        )
        for kept, repeated in zip(self.running, running, strict=True):
            if kept is not None and repeated is not None:
                kept.copy_(repeated.view(n, c).mean(0))
        return out.view(x.shape), mean, invstd

    def backward(self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Weight, mask: Mask) -> Gradients:
        found = super().backward(_as_one(grad), _as_one(x), mean, invstd, _repeat(weight, len(x)), mask)
        grad_input, *totals = found
        of_weight, of_bias = (None if total is None else total.view(x.shape[:2]).sum(0) for total in totals)
        return None if grad_input is None else grad_input.view(x.shape), of_weight, of_bias


def _repeat(x: Tensor | None, samples: int) -> Tensor | None:
    return None if x is None else x.repeat(samples)


def _as_one(x: Tensor) -> Tensor:
    return x.contiguous().view(1, x.shape[0] * x.shape[1], *x.shape[2:])


@dataclass(eq=False)
class Frozen(Norm):
    """A batch or instance norm with constant statistics: one mean and one variance per channel."""

    function: Callable[..., Tensor]
    mean: Tensor
    var: Tensor
    momentum: float
    eps: float
    cudnn_enabled: bool

    def __post_init__(self) -> None:
        self.name, self.alignment = self.function.__name__, Alignment(self.eps)

    def forward(self, x: Tensor, weight: Weight, bias: Weight) -> tuple[Tensor, Tensor, Tensor]:
        """Return output, means and variances."""
        rest = False, self.momentum, self.eps, self.cudnn_enabled
        out = self.function(x, weight, bias, self.mean, self.var, *rest)
        if self.function is torch.instance_norm:  # it writes to the statistics even so
            return out, self.mean.clone(), self.var.clone()
        return out, self.mean, self.var

    def backward(self, grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, weight: Weight, mask: Mask) -> Gradients:
        if self.function is torch.instance_norm:  # it lays out samples as channels
            grad, x = grad.contiguous(), x.contiguous()
        return _batch_norm_backward(grad, x, weight, mean, var, None, None, False, self.eps, mask)


@dataclass(eq=False)
class _OfLastDims(Norm):
    normalized_shape: tuple[int, ...]
    eps: float | None
    alignment = _OF_LAST_DIMS

    @property
    def key(self) -> Hashable:
        return self.name, self.normalized_shape, self.eps


@dataclass(eq=False)
class LayerNorm(_OfLastDims):
    eps: float
    name = "layer_norm"

    def forward(self, x: Tensor, weight: Weight, bias: Weight) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(x, self.normalized_shape, weight, bias, self.eps)

    def backward(self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Weight, mask: Mask) -> Gradients:
        # ATen reads the bias's dtype alone, which is the weight's.
        return _layer_norm_backward(grad, x, self.normalized_shape, mean, invstd, weight, weight, mask)

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return grad.sum_to_size(self.normalized_shape)


@dataclass(eq=False)
class GroupNorm(Norm):
    groups: int
    eps: float
    name = "group_norm"

    def _sizes(self, x: Tensor) -> tuple[int, int, int, int]:
        n, c = x.shape[:2]
        return n, c, x.numel() // (n * c), self.groups

    def forward(self, x: Tensor, weight: Weight, bias: Weight) -> tuple[Tensor, Tensor, Tensor]:
        dense = x.contiguous(memory_format=_format_of(x))
        return torch.native_group_norm(dense, _dense(weight), _dense(bias), *self._sizes(x), self.eps)

    def backward(self, grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Weight, mask: Mask) -> Gradients:
        order = _format_of(x)
        grad, x = grad.contiguous(memory_format=order), x.contiguous(memory_format=order)
        return _group_norm_backward(grad, x, mean, invstd, _dense(weight), *self._sizes(x), mask)

    def __post_init__(self) -> None:
        self.alignment = Alignment(groups=self.groups)

    @property
    def key(self) -> Hashable:
        return self.name, self.groups, self.eps


def _dense(weight: Weight) -> Tensor | None:
    """Make a weight contiguous: ATen's group norm ignores its strides."""
    return None if weight is None else weight.contiguous()


def _format_of(x: Tensor) -> torch.memory_format:
    return suggest_memory_format(x) if x.device.type in ("cpu", "xpu") else torch.contiguous_format


@dataclass(eq=False)
class RMSNorm(_OfLastDims):
    """RMS norm over the last dimensions: x * invstd, where invstd is the inverse root of the mean square."""

    name = "rms_norm"
    has_mean = False

    def forward(  # type: ignore[override]
        self, x: Tensor, weight: Weight, bias: None
    ) -> tuple[Tensor, None, Tensor]:
        if x.is_cuda and not self._is_fused(x, weight):  # ATen's fused kernel supports one dtype and memory order
            square, eps = x.to(torch.promote_types(x.dtype, torch.float32)).square(), self.eps
            eps = torch.finfo(square.dtype).eps if eps is None else eps
            invstd = square.mean(self._dims, keepdim=True).add_(eps).rsqrt_()
            return torch.rms_norm(x, self.normalized_shape, weight, self.eps), None, invstd
        out, invstd = fused_rms_norm(x, self.normalized_shape, weight, self.eps)
        return out, None, invstd

    def backward(  # type: ignore[override]
        self, grad: Tensor, x: Tensor, mean: None, invstd: Tensor, weight: Weight, mask: Mask
    ) -> Gradients:
        """dx = invstd * (g w - x^ mean(g w x^)), dw = sum of g x^, with x^ = x * invstd."""
        if x.is_cuda and grad.dtype is x.dtype and self._is_fused(x, weight):
            return *fused_rms_norm_backward(grad, x, self.normalized_shape, invstd, weight, mask[:2]), None
        normalized = x.to(invstd.dtype) * invstd
        grad_input = grad_weight = None
        if mask[1]:
            grad_weight = (grad * normalized).sum_to_size(self.normalized_shape)
        if mask[0]:
            grad_input = grad.to(invstd.dtype) if weight is None else grad.to(invstd.dtype) * weight
            average = (grad_input * normalized).mean(self._dims, keepdim=True)
            grad_input = grad_input.addcmul(normalized, average, value=-1).mul_(invstd)
        return grad_input, grad_weight, None

    @property
    def _dims(self) -> tuple[int, ...]:
        return tuple(range(-len(self.normalized_shape), 0))

    @staticmethod
    def _is_fused(x: Tensor, weight: Weight) -> bool:
        is_alike = weight is None or weight.dtype is x.dtype
        return is_alike and suggest_memory_format(x) is torch.contiguous_format


#: Elements of the shortest rows that get their own scale.
SHORTEST_ROW = 64
#: Magnitude from which elements may stand for what is left out, and do not count in a norm: buckets mark them.
_SENTINEL = 1e6
#: Bounds of a row's norm as a divisor: inverses, and inverses of these, are normal bfloat16 numbers.
_SMALLEST_NORM, _LARGEST_NORM = 1e-30, torch.finfo(torch.float32).max
#: Nodes whose results are inverse deviations: roots, reciprocals, and powers, which may be either.
_INVERSES = ("RsqrtBackward", "ReciprocalBackward", "PowBackward")
#: Nodes whose results are deviations or norms, ours included; and nodes that add to a result, bound or convert it.
_DEVIATIONS = (*("SqrtBackward", "StdBackward", "LinalgVectorNormBackward", "NormBackward", "PowBackward"),)
_ON_THE_WAY = ("AddBackward", "ClampBackward", "ClampMinBackward", "MaximumBackward", "ToCopyBackward")


class RowScale(NamedTuple):
    """Rows along dimensions, counted from the last, with the inverse of their root mean square."""

    dims: tuple[int, ...]

    @property
    def alignment(self) -> Alignment:
        return _OF_LAST_DIMS

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        return "rows", self.dims


def keep_by_rows(region: Region, x: Tensor, dims: tuple[int, ...]) -> Saved:
    """Save an activation by rows along ``dims``, counted from the last: if packed, with a bfloat16 scale per row."""
    length = math.prod(map(x.shape.__getitem__, dims))
    inverse = math.sqrt(length) / _finite_norm(x.detach(), dims).clamp(_SMALLEST_NORM, _LARGEST_NORM)
    return region.keep(x, norm=NormInput(RowScale(dims), None, inverse.bfloat16(), x.dtype, alone=True))


def _finite_norm(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """2-norm of each row, without its sentinels; where a check is free, without a copy if there are none."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    norm_of = functools.partial(torch.linalg.vector_norm, dim=dims, keepdim=True, dtype=dtype)
    if type(x) is Tensor and x.is_cpu:
        norm = norm_of(x)
        if (norm < _SENTINEL).all():
            return norm
    norm = norm_of(torch.where(x.abs() < _SENTINEL, x, 0))
    return torch.where(norm > 0, norm, norm_of(x.nan_to_num(0.0, 0.0, 0.0)))


def are_rows(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) > 0 and math.prod(map(shape.__getitem__, dims)) >= SHORTEST_ROW


def dims_of_inverses(x: Tensor, factor: Tensor) -> tuple[int, ...]:
    """Dimensions, from the last, of the rows of ``x`` if ``factor`` has their inverse deviations, else ()."""
    node = factor.grad_fn
    return dims_of_rows(x.shape, factor.shape) if node is not None and node.name().startswith(_INVERSES) else ()


def is_deviation(x: Tensor) -> bool:
    """Return whether a tensor is the result of a root, a norm or a deviation, perhaps with an addend or a bound."""
    node = x.grad_fn
    while node is not None and node.name().startswith(_ON_THE_WAY):
        node = node.next_functions[0][0]
    return node is not None and (hasattr(node, "is_deviation") or node.name().startswith(_DEVIATIONS))


@one_object_each
def dims_of_rows(shape: torch.Size, of_factor: torch.Size) -> tuple[int, ...]:
    """Dimensions, from the last, of the rows of a tensor if a factor has one number per row, else ()."""
    if len(of_factor) != len(shape):
        return ()
    dims = tuple(dim for dim in range(-len(shape), 0) if of_factor[dim] == 1 and shape[dim] > 1)
    is_factor = all(of_factor[dim] == shape[dim] for dim in range(-len(shape), 0) if dim not in dims)
    return dims if dims and is_factor and are_rows(shape, dims) else ()
