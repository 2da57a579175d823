"""Functions of plain torch that save the tensors of libraries' kernels, in their order, under their names.

Each is called with one (64, 128) tensor, beside weights; ``plain`` composes torch's ops to the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.kernel_models import UNSLOTH, linear

EPS = 1e-5


class StandIn(NamedTuple):
    function: Any
    call: Callable[[Any, Tensor], Tensor]
    plain: Callable[[Tensor], Tensor]


STAND_INS: dict[str, StandIn] = {}


def stands_for(path: str, call: Callable[[Any, Tensor], Tensor], plain: Callable[[Tensor], Tensor]) -> Any:
    def made(function: Any) -> Any:
        function.__module__, _, function.__qualname__ = path.rpartition(".")
        function.__name__ = function.__qualname__
        STAND_INS[path] = StandIn(function, call, plain)
        return function

    return made


def weight(like: Tensor, *shape: int, seed: int = 5) -> nn.Parameter:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nn.Parameter(values.to(like.dtype) / (shape[0] ** 0.5 if len(shape) > 1 else 1), requires_grad=False)


def projected(x: Tensor, seed: int = 5) -> Tensor:
    return x @ weight(x, 128, 128, seed=seed)


@stands_for(
    "liger_kernel.ops.rms_norm.LigerRMSNormFunction",
    lambda function, x: function.apply(x, weight(x, 128), EPS, 0.0),
    lambda x: F.rms_norm(x, (128,), weight(x, 128), EPS),
)
class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        rows = x.view(-1, 128)
        invstd = torch.rsqrt(rows.square().mean(1) + eps)
        ctx.save_for_backward(rows, weight, invstd)
        return (rows * invstd[:, None] * (weight + offset)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weight, invstd = ctx.saved_tensors
        scaled, normal = grad.view(rows.shape) * weight, rows * invstd[:, None]
        scaled = scaled - normal * (scaled * normal).mean(1, keepdim=True)
        return (invstd[:, None] * scaled).view(grad.shape), None, None, None


@stands_for(
    "unsloth.kernels.layernorm.Fast_Layernorm",
    lambda function, x: function.apply(x, weight(x, 128), weight(x, 128, seed=6), EPS),
    lambda x: F.layer_norm(x, (128,), weight(x, 128), weight(x, 128, seed=6), EPS),
)
class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        var, mean = torch.var_mean(x, 1, correction=0)
        invstd = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, bias, invstd, mean)
        return (x - mean[:, None]) * invstd[:, None] * weight + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, _, invstd, mean = ctx.saved_tensors
        scaled, normal = grad * weight, (x - mean[:, None]) * invstd[:, None]
        scaled = scaled - scaled.mean(1, keepdim=True) - normal * (scaled * normal).mean(1, keepdim=True)
        return invstd[:, None] * scaled, None, None, None


@stands_for(
    "liger_kernel.ops.swiglu.LigerSiLUMulFunction",
    lambda function, x: function.apply(projected(x), projected(x, 6)),
    lambda x: F.silu(projected(x)) * projected(x, 6),
)
class SiLUMul(torch.autograd.Function):
    """Backward overwrites its saved tensors."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a.view(-1, 128), b.view(-1, 128))
        return F.silu(a) * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        of_a, of_b = torch.ops.aten.silu_backward(grad * b, a), grad * F.silu(a)
        return a.copy_(of_a), b.copy_(of_b)


@stands_for(
    "flash_attn.flash_attn_interface.FlashAttnFunc",
    lambda function, x: function.apply(projected(x), projected(x, 6), projected(x, 7)),
    lambda x: F.scaled_dot_product_attention(*(projected(x, seed)[None] for seed in (5, 6, 7)))[0],
)
class Attention(torch.autograd.Function):
    """Backward computes probabilities again, from scores and the logarithm of their sums."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.t() / 128**0.5
        out = scores.softmax(1) @ v
        ctx.save_for_backward(q, k, v, out, scores.logsumexp(1), torch.zeros(2, dtype=torch.int64))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, sums, _ = ctx.saved_tensors
        p = (q @ k.t() / 128**0.5 - sums[:, None]).exp()
        of_scores = p * (grad @ v.t() - (grad * out).sum(1, keepdim=True)) / 128**0.5
        return of_scores @ k, of_scores.t() @ q, p.t() @ grad


@stands_for(
    "liger_kernel.ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction",
    lambda function, x: function.apply(x, weight(x, 128, 128)),
    lambda x: F.cross_entropy(projected(x), torch.arange(64), reduction="sum"),
)
class Loss(torch.autograd.Function):
    """Forward computes the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        logits = x @ weight
        of_logits = logits.softmax(1) - F.one_hot(torch.arange(64), 128)
        ctx.save_for_backward(of_logits.to(x.dtype) @ weight.t(), None, None)
        return F.cross_entropy(logits, torch.arange(64), reduction="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * ctx.saved_tensors[0], None


def layers(x: Tensor, count: int) -> list[Tensor]:
    """Weights of linear layers and their adapters of rank 4, which depend on x: their gradients do on saved tensors."""
    found = []
    for seed in range(count):
        found += [weight(x, 128, 128, seed=seed), weight(x, 4, 128, seed=seed) + x[:4], weight(x, 128, 4, seed=seed)]
    return found


def of_layers(name: str, count: int, plain: Callable[[Tensor, list[Tensor]], Tensor]) -> None:
    def call(function: Any, x: Tensor) -> Tensor:
        found = function.apply(x, *layers(x, count))
        return found if isinstance(found, Tensor) else torch.cat(found, 1)

    path = f"unsloth.kernels.fast_lora.{name}"
    stands_for(path, call, lambda x: plain(x, layers(x, count)))(UNSLOTH[path])


of_layers("LoRA_W", 1, lambda x, weights: linear(x, *weights))
of_layers("LoRA_QKV", 3, lambda x, weights: torch.cat([linear(x, *weights[at : at + 3]) for at in (0, 3, 6)], 1))
of_layers(
    "LoRA_MLP",
    3,
    lambda x, weights: linear(F.silu(linear(x, *weights[:3])) * linear(x, *weights[3:6]), *weights[6:]),
)
