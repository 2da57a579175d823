"""ResNet-50 for images of 32 to 224 pixels and ResNet-20 for 32 pixels, of plain `torch.nn` layers.

Source: He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385, table 1 and section 4.2. Differs: as
in most later work, the stride of a bottleneck is in its 3x3 convolution, and a shortcut that changes the shape is a
1x1 convolution in ResNet-20 too; ResNet-50 for images of up to 32 pixels begins with a 3x3 convolution of stride 1, as
is usual for CIFAR. Shape suffixes: B images, C channels, H and W.
"""

from collections.abc import Sequence

from torch import Tensor, nn

EXPANSION = 4
"""Output channels of a block as a multiple of the channels inside it."""
STAGES_50 = (3, 4, 6, 3)
"""Blocks of each stage of ResNet-50."""
STAGES_20 = ((3, 16), (3, 32), (3, 64))
"""Blocks and channels of each stage of ResNet-20."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: y = relu(body(x) + shortcut(x))."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm_act(channels_in, channels_out, 3, stride), *_conv_norm(channels_out, channels_out, 3)
        )
        self.shortcut = _shortcut(channels_in, channels_out, stride)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.act(self.body(x_BCHW) + self.shortcut(x_BCHW))


class ResNet20(nn.Module):
    """Stem, three stages (the last two halve the map), mean over the map, classifier."""

    def __init__(self, *, classes: int, channels_in: int = 3) -> None:
        super().__init__()
        channels = STAGES_20[0][1]
        self.stem = nn.Sequential(*_conv_norm_act(channels_in, channels, 3))
        blocks: list[nn.Module] = []
        for stage, (count, channels_out) in enumerate(STAGES_20):
            for index in range(count):
                blocks.append(BasicBlock(channels, channels_out, stride=2 if stage > 0 and index == 0 else 1))
                channels = channels_out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(channels, classes)
        self.apply(_initialise)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.classifier(self.head(self.blocks(self.stem(x_BCHW))))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut: y = relu(body(x) + shortcut(x))."""

    def __init__(self, channels_in: int, inner: int, stride: int) -> None:
        super().__init__()
        channels_out = EXPANSION * inner
        self.body = nn.Sequential(
            *_conv_norm_act(channels_in, inner, 1),
            *_conv_norm_act(inner, inner, 3, stride),
            *_conv_norm(inner, channels_out, 1),
        )
        self.shortcut = _shortcut(channels_in, channels_out, stride)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.act(self.body(x_BCHW) + self.shortcut(x_BCHW))


class ResNet(nn.Module):
    """Stem, stages of blocks (each but the first halves the map), mean over the map, classifier.

    Args:
        stages: number of blocks of each stage.
        classes: outputs.
        width: channels of the stem and inside the blocks of the first stage; each stage doubles them.
        channels_in: channels of the images.
        stem_stride: 4, of a convolution and a pooling; or 1, of a small convolution alone.
    """

    def __init__(
        self, stages: Sequence[int], *, classes: int, width: int = 64, channels_in: int = 3, stem_stride: int = 4
    ) -> None:
        super().__init__()
        small, pool = stem_stride == 1, nn.MaxPool2d(3, stride=2, padding=1)
        stem = _conv_norm_act(channels_in, width, 3) if small else [*_conv_norm_act(channels_in, width, 7, 2), pool]
        self.stem = nn.Sequential(*stem)
        blocks: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(stages):
            inner = width << stage
            for index in range(count):
                blocks.append(Bottleneck(channels, inner, stride=2 if stage > 0 and index == 0 else 1))
                channels = EXPANSION * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(channels, classes)
        self.apply(_initialise)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.classifier(self.head(self.blocks(self.stem(x_BCHW))))


def resnet50(*, classes: int, channels_in: int = 3, image_size: int = 224) -> ResNet:
    """Builds ResNet-50 for square images.

    Args:
        classes: outputs.
        channels_in: channels of the images.
        image_size: height and width; up to 32 the stem has stride 1, so that the last map is not a single pixel.

    Returns:
        The model, initialised, in training mode.
    """
    return ResNet(STAGES_50, classes=classes, channels_in=channels_in, stem_stride=1 if image_size <= 32 else 4)


def _conv_norm(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(channels_out)]


def _conv_norm_act(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [*_conv_norm(channels_in, channels_out, kernel, stride), nn.ReLU(inplace=True)]


def _shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(*_conv_norm(channels_in, channels_out, 1, stride))


def _initialise(module: nn.Module) -> None:
    """Normal with variance 2/fan_out for convolutions (He et al., arXiv:1502.01852); PyTorch's default otherwise."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
