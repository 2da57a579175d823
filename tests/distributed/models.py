"""A model whose gradients are given, and groups of processes to average them in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from brevact.distributed import QuantizedHook

SIZES = {"first": (96, 64), "bias": (64,), "second": (5000,)}


class Given(nn.Module):
    """Parameters, whose gradients under :func:`backward` are the tensors that it is given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=dtype)))

    def forward(self, gradients: Sequence[Tensor | None]) -> Tensor:
        return sum((p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True) if g is not None)


def parallel(hook: QuantizedHook | None, dtype: torch.dtype = torch.float32, **options: object) -> nn.Module:
    model = DistributedDataParallel(Given(dtype), **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def averaged(model: nn.Module, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    model.zero_grad()
    model(gradients).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def normal(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES.values()]
