"""EfficientNetV2 (S, M, and a nano size) for images of 32 to 224 pixels.

Source: Tan and Le, EfficientNetV2: Smaller Models and Faster Training, arXiv:2104.00298, table 4; the M size and the
initialisation follow the authors' code. Differs: for images of up to 32 pixels the stem has stride 1; `nano` is this
project's own, small enough to train in a minute on a CPU. Shape suffixes: B images, C channels, H and W.
"""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from recipes.models.layers import Layers
from recipes.models.stochastic_depth import StochasticDepth


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


@dataclass(frozen=True)
class Size:
    """The stages of a network and the channels of its last 1x1 convolution."""

    stages: tuple[Stage, ...]
    head: int


SIZES = {
    "nano": Size(
        (
            Stage("fused", 1, 1, 16, 1),
            Stage("fused", 4, 2, 24, 1),
            Stage("fused", 4, 2, 32, 1),
            Stage("mbconv", 4, 2, 48, 2),
            Stage("mbconv", 4, 1, 64, 1),
        ),
        head=256,
    ),
    "s": Size(
        (
            Stage("fused", 1, 1, 24, 2),
            Stage("fused", 4, 2, 48, 4),
            Stage("fused", 4, 2, 64, 4),
            Stage("mbconv", 4, 2, 128, 6),
            Stage("mbconv", 6, 1, 160, 9),
            Stage("mbconv", 6, 2, 256, 15),
        ),
        head=1280,
    ),
    "m": Size(
        (
            Stage("fused", 1, 1, 24, 3),
            Stage("fused", 4, 2, 48, 5),
            Stage("fused", 4, 2, 80, 5),
            Stage("mbconv", 4, 2, 160, 7),
            Stage("mbconv", 6, 1, 176, 14),
            Stage("mbconv", 6, 2, 304, 18),
            Stage("mbconv", 6, 1, 512, 5),
        ),
        head=1280,
    ),
}


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
        size: Size,
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
        total = sum(stage.blocks for stage in size.stages)
        channels = size.stages[0].channels
        self.stem = nn.Sequential(*conv_norm_act(ends, channels_in, channels, 3, stride=stem_stride))
        blocks: list[nn.Module] = []
        for stage in size.stages:
            for index in range(stage.blocks):
                drop = stochastic_depth * len(blocks) / total
                blocks.append(Block(layers, stage, channels, stage.stride if index == 0 else 1, drop))
                channels = stage.channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(*conv_norm_act(layers, channels, size.head, 1), layers.pool(), nn.Flatten())
        self.dropout = layers.dropout(dropout)
        self.classifier = ends.linear(size.head, classes)
        self.apply(_initialise)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.head(self.blocks(self.stem(x_BCHW)))))


def efficientnetv2(name: str, *, image_size: int, **options: object) -> EfficientNetV2:
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
    return EfficientNetV2(SIZES[name], stem_stride=1 if image_size <= 32 else 2, **options)


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
