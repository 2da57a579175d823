"""Nets of quantization-aware training by stock Brevitas with learned scales; `NAME, float`: the float net."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import brevitas.nn as qnn
import torch
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, Uint8ActPerTensorFloat
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.step import Model, Step, classified

#: Steps that collect statistics, before scales are learned.
COLLECTED = 4


class Layers:
    """Makes the layers of a net, in float or by Brevitas."""

    def __init__(self, bit_width: int | None) -> None:
        self.bit_width = bit_width
        self.steps = {"collect_stats_steps": COLLECTED - 1}

    def conv(self, inputs: int, outputs: int, kernel_size: int, stride: int = 1, groups: int = 1) -> nn.Module:
        options = {"stride": stride, "padding": kernel_size // 2, "groups": groups, "bias": False}
        if self.bit_width is None:
            return nn.Conv2d(inputs, outputs, kernel_size, **options)
        options |= {"weight_quant": Int8WeightPerTensorFloat, "weight_bit_width": self.bit_width}
        return qnn.QuantConv2d(inputs, outputs, kernel_size, **options)

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        if self.bit_width is None:
            return nn.Linear(inputs, outputs)
        return nn.Sequential(
            self.identity(),
            qnn.QuantLinear(
                inputs, outputs, weight_quant=Int8WeightPerTensorFloat, weight_bit_width=self.bit_width, bias=True
            ),
        )

    def relu(self) -> nn.Module:
        if self.bit_width is None:
            return nn.ReLU()
        return qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=self.bit_width, **self.steps)

    def identity(self, bit_width: int | None = None) -> nn.Module:
        """A quantizer by itself."""
        if self.bit_width is None:
            return nn.Identity()
        width = bit_width or self.bit_width
        return qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat, bit_width=width, **self.steps)


def conv_net(layers: Layers) -> nn.Module:
    """Conv-BN-ReLU with 32, 64, 64 and 128 channels."""
    blocks = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 64), (64, 128)):
        blocks += [layers.conv(inputs, outputs, 3), nn.BatchNorm2d(outputs), layers.relu()]
    return nn.Sequential(layers.identity(8), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def mobile_net(layers: Layers) -> nn.Module:
    """Depthwise and pointwise convolutions in turn, each with batch norm and ReLU."""
    blocks = [layers.conv(3, 32, 3), nn.BatchNorm2d(32), layers.relu()]
    for inputs, outputs, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2)):
        blocks += [layers.conv(inputs, inputs, 3, stride, inputs), nn.BatchNorm2d(inputs), layers.relu()]
        blocks += [layers.conv(inputs, outputs, 1), nn.BatchNorm2d(outputs), layers.relu()]
    return nn.Sequential(layers.identity(8), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


class ViTBlock(nn.Module):
    """Attention and MLP of a vision transformer, between patches of 4x4 pixels and a classifier."""

    def __init__(self, layers: Layers, dim: int = 192, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(3, dim, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.proj = layers.linear(dim, 3 * dim), layers.linear(dim, dim)
        self.operands = nn.ModuleList(layers.identity() for _ in range(4))
        self.mlp = nn.Sequential(layers.linear(dim, 4 * dim), nn.GELU(), layers.linear(4 * dim, dim))
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = x + self.attend(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.head(x.mean(1))

    def attend(self, x: Tensor) -> Tensor:
        """Return self-attention of (B, T, C) tokens."""
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind()
        q, k, v = (operand(part) for operand, part in zip(self.operands, (q, k, v), strict=False))
        weights = (q @ k.transpose(-2, -1) * (dim // self.heads) ** -0.5).softmax(-1)
        mixed = self.operands[3](weights) @ v
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, dim))


class BasicBlock(nn.Module):
    """Two convolutions of a ResNet, and a way around them."""

    def __init__(self, layers: Layers, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(layers.conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs), layers.relu())
        self.second = nn.Sequential(layers.conv(outputs, outputs, 3), nn.BatchNorm2d(outputs))
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(layers.conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.relu = layers.relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.second(self.first(x)) + self.around(x))


def resnet18(layers: Layers) -> nn.Module:
    """ResNet-18, from 64 to 512 channels."""
    blocks = [layers.conv(3, 64, 7, 2), nn.BatchNorm2d(64), layers.relu(), nn.MaxPool2d(3, 2, 1)]
    for inputs, outputs in ((64, 64), (64, 128), (128, 256), (256, 512)):
        stride = 1 if inputs == outputs else 2
        blocks += [BasicBlock(layers, inputs, outputs, stride), BasicBlock(layers, outputs, outputs, 1)]
    return nn.Sequential(layers.identity(8), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class InvertedResidual(nn.Module):
    """A block of MobileNetV2: it widens, convolves each channel, narrows, and adds its input where the sizes agree."""

    def __init__(self, layers: Layers, inputs: int, outputs: int, stride: int, factor: int) -> None:
        super().__init__()
        wide = inputs * factor
        widen = [layers.conv(inputs, wide, 1), nn.BatchNorm2d(wide), layers.relu()] if factor > 1 else []
        depthwise = [layers.conv(wide, wide, 3, stride, wide), nn.BatchNorm2d(wide), layers.relu()]
        narrow = [layers.conv(wide, outputs, 1), nn.BatchNorm2d(outputs), layers.identity()]
        self.convs = nn.Sequential(*widen, *depthwise, *narrow)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convs(x) if self.adds else self.convs(x)


def mobilenetv2(layers: Layers) -> nn.Module:
    """MobileNetV2 for small images: the first convolution does not stride."""
    blocks: list[nn.Module] = [layers.conv(3, 32, 3), nn.BatchNorm2d(32), layers.relu()]
    inputs = 32
    for factor, outputs, count, stride in (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    ):
        for number in range(count):
            blocks.append(InvertedResidual(layers, inputs, outputs, 1 if number else stride, factor))
            inputs = outputs
    blocks += [layers.conv(320, 1280, 1), nn.BatchNorm2d(1280), layers.relu()]
    return nn.Sequential(layers.identity(8), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 10))


class Recurrent(nn.Module):
    """An LSTM over the rows of images, of 128 features, and a classifier."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 32, 128)
        kind = nn.LSTM if layers.bit_width is None else qnn.QuantLSTM
        options = {} if layers.bit_width is None else {"weight_bit_width": layers.bit_width}
        self.lstm = kind(128, 128, batch_first=True, **options)
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.permute(0, 2, 1, 3).flatten(2)
        return self.head(self.lstm(self.embed(rows))[0].mean(1))


class DecoderLayer(nn.Module):
    """A layer of a Llama-like decoder, whose linear layers and their inputs are quantized."""

    def __init__(self, layers: Layers, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.qkv, self.out = layers.linear(dim, 3 * dim), layers.linear(dim, dim)
        self.gate, self.up, self.down = (layers.linear(*sizes) for sizes in ((dim, 3 * dim),) * 2 + ((3 * dim, dim),))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Four decoder layers over tokens, and a classifier."""

    def __init__(self, layers: Layers, dim: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, dim)
        self.layers = nn.Sequential(*(DecoderLayer(layers, dim, heads) for _ in range(4)))
        self.head = nn.Linear(dim, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)).mean(1))


def qat_step(make: Callable[[Layers], nn.Module], bit_width: int | None, batch_size: int, size: int) -> Step:
    """The step of a net on images, or tokens, after the steps that collect statistics."""
    model = make(Layers(bit_width))
    shape = (batch_size, size) if make is Decoder else (batch_size, 3, size, size)
    batch = torch.randint(0, 1000, shape) if make is Decoder else torch.randn(shape)
    with torch.no_grad():
        for _ in range(10 if make is Recurrent else COLLECTED):  # 300 calls, of 32 time steps
            model(batch)
    return Step(model, (batch, torch.randint(0, 10, (batch_size,))), classified)


_NETS: dict[str, tuple[Callable[[Layers], nn.Module], int, int, int]] = {
    "conv-BN-ReLU W4A4": (conv_net, 4, 32, 32),
    "MobileNet W8A8": (mobile_net, 8, 32, 32),
    "MobileNet W4A4": (mobile_net, 4, 64, 32),
    "ViT block W4A4": (ViTBlock, 4, 32, 32),
    "ResNet-18 W4A4": (resnet18, 4, 16, 64),
    "MobileNetV2 W8A8": (mobilenetv2, 8, 16, 64),
    "QuantLSTM W8A8": (Recurrent, 8, 32, 32),
    "decoder W8A8": (Decoder, 8, 8, 128),
}
#: Nets by name: their factories, bits, the batch size, and sides of images or tokens.
QAT: dict[str, Model] = {name: Model((), partial(qat_step, *net)) for name, net in _NETS.items()} | {
    f"{name}, float": Model((), partial(qat_step, make, None, batch, size))
    for name, (make, _, batch, size) in _NETS.items()
}
