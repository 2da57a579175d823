"""Llamas with the kernels that people fine-tune with: Liger's, Unsloth's, bitsandbytes' 4 bits, torchao's float8.

    TRITON_INTERPRET=1 python -m benchmarks kernels --measure bytes        # without a GPU Triton interprets Liger's

Unsloth's need a GPU: Functions of plain torch save the tensors of its Functions, in their order, under their names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.step import Model, Step, own_loss, supervised
from brevact.autograd.interop import library_functions
from brevact.autograd.interop.other_code import watch_forward

_WIDTH, _WIDE, _HEADS, _LAYERS, _TOKENS, _VOCABULARY, _RANK = 512, 1408, 8, 2, 64, 512, 8


class LoraW(torch.autograd.Function):
    """A frozen linear layer and its adapter; A is (R, I), B (O, R)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(a, b, x)
        return linear(x, weight, a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, x = ctx.saved_tensors
        of_x, *of_adapter = linear_backward(grad, x, ctx.weight, a, b)
        return of_x, None, *of_adapter


class LoraQKV(torch.autograd.Function):
    """Three such layers of one input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.frozen, adapters = weights[::3], [each for place, each in enumerate(weights) if place % 3]
        ctx.save_for_backward(x, *adapters)
        return tuple(linear(x, *weights[place : place + 3]) for place in (0, 3, 6))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *adapters = ctx.saved_tensors
        found = [
            linear_backward(grad, x, ctx.frozen[place], *adapters[2 * place : 2 * place + 2])
            for place, grad in enumerate(grads)
        ]
        return sum(each[0] for each in found), *(part for each in found for part in (None, *each[1:]))


class LoraMLP(torch.autograd.Function):
    """A gated MLP of three such layers, whose product backward computes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.frozen, adapters = weights[::3], [each for place, each in enumerate(weights) if place % 3]
        gate, up = linear(x, *weights[:3]), linear(x, *weights[3:6])
        ctx.save_for_backward(*adapters, x, gate, up)
        return linear(F.silu(gate) * up, *weights[6:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *adapters, x, gate, up = ctx.saved_tensors
        h, (w_gate, w_up, w_down) = F.silu(gate) * up, ctx.frozen
        of_h, *of_down = linear_backward(grad, h, w_down, *adapters[4:])
        of_gate = torch.ops.aten.silu_backward(of_h * up, gate)
        x_gate, *of_gate = linear_backward(of_gate, x, w_gate, *adapters[:2])
        x_up, *of_up = linear_backward(of_h * F.silu(gate), x, w_up, *adapters[2:4])
        return x_gate + x_up, None, *of_gate, None, *of_up, None, *of_down


class RMSNorm(torch.autograd.Function):
    """A norm of rows, without a gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        invstd = torch.rsqrt(rows.square().mean(1) + eps)
        ctx.save_for_backward(rows, weight, invstd)
        return (rows * invstd[:, None] * weight).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, invstd = ctx.saved_tensors
        scaled, normal = grad.view(rows.shape) * weight, rows * invstd[:, None]
        scaled = scaled - normal * (scaled * normal).mean(1, keepdim=True)
        return (invstd[:, None] * scaled).view(grad.shape), None, None


def linear(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, weight) + F.linear(F.linear(x, a), b)


def linear_backward(grad: Tensor, x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input and the adapter."""
    g, x_NI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    return grad @ weight + grad @ b @ a, (g @ b).t() @ x_NI, g.t() @ F.linear(x_NI, a)


#: Functions by the paths of Unsloth's.
UNSLOTH: dict[str, Any] = {
    "unsloth.kernels.fast_lora.LoRA_W": LoraW,
    "unsloth.kernels.fast_lora.LoRA_QKV": LoraQKV,
    "unsloth.kernels.fast_lora.LoRA_MLP": LoraMLP,
    "unsloth.kernels.rms_layernorm.Fast_RMS_Layernorm": RMSNorm,
}
for _path, _function in UNSLOTH.items():
    _function.__module__, _, _function.__qualname__ = _path.rpartition(".")
    _function.__name__ = _function.__qualname__


class _Lora(nn.Module):
    """A frozen weight and its adapter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5, requires_grad=False)
        self.a = nn.Parameter(torch.randn(_RANK, inputs) / inputs**0.5)
        self.b = nn.Parameter(torch.zeros(outputs, _RANK))

    def parts(self) -> tuple[Tensor, ...]:
        return self.weight, self.a, self.b


class _Block(nn.Module):
    """A block of Llama by Unsloth's Functions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(_Lora(_WIDTH, _WIDTH) for _ in range(4))
        self.mlp = nn.ModuleList(map(_Lora, (_WIDTH, _WIDTH, _WIDE), (_WIDE, _WIDE, _WIDTH)))
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(_WIDTH), requires_grad=False) for _ in range(2))

    def forward(self, x_BTC: Tensor) -> Tensor:
        shape = (*x_BTC.shape[:2], _HEADS, -1)
        *qkv, out = (each.parts() for each in self.attention)
        q, k, v = LoraQKV.apply(RMSNorm.apply(x_BTC, self.norms[0], 1e-6), *(x for each in qkv for x in each))
        heads = (each.view(shape).transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x_BTC.shape)
        x = x_BTC + LoraW.apply(attended, *out)
        return x + LoraMLP.apply(RMSNorm.apply(x, self.norms[1], 1e-6), *(x for each in self.mlp for x in each.parts()))


def _of_unsloth() -> Step:
    library_functions.READ.pop("unsloth", None)  # its Functions count as read, though it is not installed
    for function in UNSLOTH.values():
        watch_forward(function)
    head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
    model = nn.Sequential(nn.Embedding(_VOCABULARY, _WIDTH), *(_Block() for _ in range(_LAYERS)), head)
    ids = torch.randint(_VOCABULARY, (1, _TOKENS))
    return Step(model, (ids, ids), supervised(lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten())))


def _llama(change: Callable[[Any], Any]) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": _WIDTH, "intermediate_size": _WIDE, "num_hidden_layers": _LAYERS, "use_cache": False}
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), _HEADS)
    model = change(LlamaForCausalLM(LlamaConfig(vocab_size=_VOCABULARY, **sizes, **heads)))
    ids = torch.randint(_VOCABULARY, (1, _TOKENS))
    return Step(model, {"input_ids": ids, "labels": ids}, own_loss)


def _with_liger(model: Any, lora: bool = False) -> Any:
    from recipes.finetune import take_liger, with_adapters

    take_liger(model, has_fused_loss=True)
    return with_adapters(model, _RANK) if lora else model


def _with_quarters(model: Any) -> Any:
    from recipes.finetune import take_quarters, with_adapters

    take_quarters(model)
    return with_adapters(model, _RANK).to("cpu")  # which packs the weights


def _with_float8(model: Any) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    is_emulated = not torch.cuda.is_available()
    return convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=is_emulated), module_filter_fn=lambda layer, name: name != "lm_head"
    )


_LIGER = ("transformers", "liger_kernel")
KERNELS: dict[str, Model] = {
    "Llama with Liger": Model(_LIGER, partial(_llama, _with_liger)),
    "Llama with Liger and LoRA": Model((*_LIGER, "peft"), partial(_llama, partial(_with_liger, lora=True))),
    "Llama of Unsloth's functions": Model((), _of_unsloth),
    "Llama with 4-bit weights and LoRA": Model(
        ("transformers", "bitsandbytes", "peft"), partial(_llama, _with_quarters)
    ),
    "Llama with float8": Model(("transformers", "torchao"), partial(_llama, _with_float8)),
}
