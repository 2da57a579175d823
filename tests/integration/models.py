from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from tests.autograd.measuring import watch_saved

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(7))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))


class Attention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind())
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def images_net() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 16, 3, groups=4), nn.GroupNorm(4, 16), nn.ReLU(inplace=True)),
        *(nn.ConvTranspose2d(16, 8, 2, 2), nn.Hardswish(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 4)),
    )


def quantized(model: nn.Module, source: object = brevact.StochBackward8bit, **overrides: object) -> nn.Module:
    return brevact.quantize_backward(model, source, **{"min_numel": 0, **overrides})


def twins(make: Callable[[], nn.Module] = mlp, source: object = brevact.StochBackward8bit, **overrides: object):
    model = make()
    return model, quantized(copy.deepcopy(model), source, **overrides)


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def codes(model: Callable, *args: object) -> tuple[list[Tensor], list[Tensor], Tensor]:
    with watch_saved() as saved:
        out = model(*args)
    packed = [x for x in saved.tensors if x.dtype is torch.uint8]
    return packed, [x for x in saved.tensors if x.is_floating_point()], out


def assert_near(found: list[Tensor], expected: list[Tensor], bit_width: int = 8) -> None:
    """Compare gradients by norm; each depends on at most four stored tensors.

    An element's error is at most a step, 1/(2^b - 1) of its bucket's range, here at most 8 standard deviations; its
    variance is at most step^2 / 4.
    """
    top = max(grad.norm() for grad in expected)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 4 * 8 / (2**bit_width - 1) / 2 * top
