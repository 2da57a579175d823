"""EfficientNetV2 (S, M, and a nano size) for images of 32 to 224 pixels.

Source: Tan and Le, EfficientNetV2: Smaller Models and Faster Training, arXiv:2104.00298, table 4; the M size and the
initialisation follow the authors' code. Differs: for images of up to 32 pixels the stem has stride 1; `nano` is this
project's own, small enough to train in a minute on a CPU. Shape suffixes: B images, C channels, H and W.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import brevact.nn as bnn


@dataclass(frozen=True)
class Stage:
    """A run of equal blocks; the first one has the stride.

    Attributes:
        kind: "fused" (Fused-MBConv) or "mbconv" (MBConv with squeeze-and-excitation).
        expansion: inner channels as a multiple of the block's input channels.
        stride: stride of the first block.
        channels: output channels.
        blocks: number of blocks.
    """

    kind: Literal["fused", "mbconv"]
    expansion: int
    stride: int
    channels: int
    blocks: int


def _stages(*rows: tuple[Any, ...]) -> tuple[Stage, ...]:
    return tuple(Stage(*row) for row in rows)


_FUSED, _MBCONV = "fused", "mbconv"
#: The stages of each network, and the channels of its last 1x1 convolution.
SIZES = {
    "nano": (
        _stages((_FUSED, 1, 1, 16, 1), (_FUSED, 4, 2, 24, 1), (_FUSED, 4, 2, 32, 1))
        + _stages((_MBCONV, 4, 2, 48, 2), (_MBCONV, 4, 1, 64, 1)),
        256,
    ),
    "s": (
        _stages((_FUSED, 1, 1, 24, 2), (_FUSED, 4, 2, 48, 4), (_FUSED, 4, 2, 64, 4))
        + _stages((_MBCONV, 4, 2, 128, 6), (_MBCONV, 6, 1, 160, 9), (_MBCONV, 6, 2, 256, 15)),
        1280,
    ),
    "m": (
        _stages((_FUSED, 1, 1, 24, 3), (_FUSED, 4, 2, 48, 5), (_FUSED, 4, 2, 80, 5))
        + _stages((_MBCONV, 4, 2, 160, 7), (_MBCONV, 6, 1, 176, 14), (_MBCONV, 6, 2, 304, 18), (_MBCONV, 6, 1, 512, 5)),
        1280,
    ),
}


@dataclass(frozen=True)
class Layers:
    """Makes convolution, normalization, activation and linear layers of `brevact.nn`.

    The two fields are Brevitas' own forward quantizers and go to every convolution and linear layer; None keeps the
    forward pass in full precision. `brevact.quantize_backward(model, ...)` later decides the stored tensors of the
    finished model, ops between layers included (the product in a squeeze-and-excitation, stochastic depth): the same
    model, with the same `state_dict`, is the full-precision reference.

    Attributes:
        weight_quant: injector of a weight quantizer, such as `brevitas.quant.Int8WeightPerTensorFloat`.
        input_quant: injector of an activation quantizer, such as `brevitas.quant.Int8ActPerTensorFloat`.
    """

    weight_quant: type | None = None
    input_quant: type | None = None

    def conv(
        self, channels_in: int, channels_out: int, kernel: int, *, stride: int = 1, groups: int = 1, bias: bool = False
    ) -> nn.Module:
        """A 2-d convolution that keeps the size of the map, up to its stride."""
        return bnn.QuantConv2d(
            channels_in,
            channels_out,
            kernel,
            stride=stride,
            padding=kernel // 2,
            groups=groups,
            bias=bias,
            weight_quant=self.weight_quant,
            input_quant=self.input_quant,
        )

    def linear(self, features_in: int, features_out: int, *, bias: bool = True) -> nn.Module:
        return bnn.QuantLinear(
            features_in, features_out, bias=bias, weight_quant=self.weight_quant, input_quant=self.input_quant
        )

    def norm(self, channels: int) -> nn.Module:
        """Batch normalization with EfficientNetV2's epsilon."""
        return bnn.BatchNorm2d(channels, eps=1e-3)

    def act(self) -> nn.Module:
        """The activation function of the network."""
        return bnn.SiLU()

    def gate(self) -> nn.Module:
        """The function that turns a squeeze-and-excitation's output into factors between 0 and 1."""
        return bnn.Sigmoid()

    def pool(self) -> nn.Module:
        """The mean over a map."""
        return bnn.AdaptiveAvgPool2d(1)

    def dropout(self, probability: float) -> nn.Module:
        return bnn.Dropout(probability)


@dataclass(frozen=True)
class FloatLayers(Layers):
    """The same with the convolutions and linear layers of `torch.nn`, which spare the time of Brevitas' own forward."""

    def conv(
        self, channels_in: int, channels_out: int, kernel: int, *, stride: int = 1, groups: int = 1, bias: bool = False
    ) -> nn.Module:
        """A 2-d convolution that keeps the size of the map, up to its stride."""
        padding = kernel // 2
        return nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=padding, groups=groups, bias=bias)

    def linear(self, features_in: int, features_out: int, *, bias: bool = True) -> nn.Module:
        return nn.Linear(features_in, features_out, bias=bias)


class StochasticDepth(nn.Module):
    """Drops whole samples of a residual branch: y = x * keep / (1 - p), keep ~ Bernoulli(1 - p) for each sample.

    Source: Huang et al., Deep Networks with Stochastic Depth, arXiv:1603.09382.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0.0:
            return x
        kept = 1.0 - self.probability
        draws = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device)
        return x * ((draws < kept).to(x.dtype) / kept)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a factor computed from the means of all: y = x * sigmoid(W2 silu(W1 mean(x)))."""

    def __init__(self, layers: Layers, channels: int, squeezed: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            layers.pool(),
            layers.conv(channels, squeezed, 1, bias=True),
            layers.act(),
            layers.conv(squeezed, channels, 1, bias=True),
            layers.gate(),
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW * self.gate(x_BCHW)


class Block(nn.Module):
    """One Fused-MBConv or MBConv block, with a residual connection where input and output have the same shape."""

    def __init__(self, layers: Layers, stage: Stage, channels_in: int, stride: int, drop: float) -> None:
        super().__init__()
        inner = channels_in * stage.expansion
        if stage.kind == "mbconv":
            body = [
                *conv_norm_act(layers, channels_in, inner, 1),
                *conv_norm_act(layers, inner, inner, 3, stride=stride, groups=inner),
                SqueezeExcitation(layers, inner, max(1, channels_in // 4)),
                *conv_norm(layers, inner, stage.channels, 1),
            ]
        elif stage.expansion == 1:
            body = conv_norm_act(layers, channels_in, stage.channels, 3, stride=stride)
        else:
            body = [
                *conv_norm_act(layers, channels_in, inner, 3, stride=stride),
                *conv_norm(layers, inner, stage.channels, 1),
            ]
        self.body = nn.Sequential(*body)
        self.residual = stride == 1 and channels_in == stage.channels
        self.drop = StochasticDepth(drop)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = self.body(x_BCHW)
        return x_BCHW + self.drop(y_BCHW) if self.residual else y_BCHW


class EfficientNetV2(nn.Module):
    """Stem, blocks, a 1x1 convolution, mean over the map, dropout and a linear classifier.

    Stem and classifier are made of `ends`, all else of `layers`.
    """

    def __init__(
        self,
        stages: tuple[Stage, ...],
        head: int,
        *,
        classes: int,
        channels_in: int = 3,
        stem_stride: int = 2,
        dropout: float = 0.2,
        stochastic_depth: float = 0.0,
        layers: Layers | None = None,
        ends: Layers | None = None,
    ) -> None:
        super().__init__()
        layers = layers or Layers()
        ends = ends or layers
        total = sum(stage.blocks for stage in stages)
        channels = stages[0].channels
        self.stem = nn.Sequential(*conv_norm_act(ends, channels_in, channels, 3, stride=stem_stride))
        blocks: list[nn.Module] = []
        for stage in stages:
            for index in range(stage.blocks):
                drop = stochastic_depth * len(blocks) / total
                blocks.append(Block(layers, stage, channels, stage.stride if index == 0 else 1, drop))
                channels = stage.channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(*conv_norm_act(layers, channels, head, 1), layers.pool(), nn.Flatten())
        self.dropout = layers.dropout(dropout)
        self.classifier = ends.linear(head, classes)
        self.apply(_initialise)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.head(self.blocks(self.stem(x_BCHW)))))


def efficientnetv2(name: str, *, image_size: int, **options: Any) -> EfficientNetV2:
    """Builds the size `name` for square images of `image_size` pixels.

    Args:
        name: a key of `SIZES`.
        image_size: height and width; up to 32 the stem has stride 1, so that the last map is not a single pixel.
        **options: the keyword arguments of `EfficientNetV2`.

    Returns:
        The model, initialised, in training mode.

    Raises:
        ValueError: `name` is not a size.
    """
    if name not in SIZES:
        raise ValueError(f"name={name!r} is not a size of EfficientNetV2; accepted: {', '.join(SIZES)}")
    return EfficientNetV2(*SIZES[name], stem_stride=1 if image_size <= 32 else 2, **options)


def conv_norm(layers: Layers, channels_in: int, channels_out: int, kernel: int, **options: int) -> list[nn.Module]:
    return [layers.conv(channels_in, channels_out, kernel, **options), layers.norm(channels_out)]


def conv_norm_act(layers: Layers, channels_in: int, channels_out: int, kernel: int, **options: int) -> list[nn.Module]:
    return [*conv_norm(layers, channels_in, channels_out, kernel, **options), layers.act()]


def _initialise(module: nn.Module) -> None:
    """Normal with variance 2/fan_out for convolutions, uniform within 1/sqrt(outputs) for the classifier."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.Linear):
        bound = 1.0 / math.sqrt(module.out_features)
        nn.init.uniform_(module.weight, -bound, bound)
    if isinstance(module, (nn.Conv2d, nn.Linear)) and module.bias is not None:
        nn.init.zeros_(module.bias)
