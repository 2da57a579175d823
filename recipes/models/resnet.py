"""ResNet-20 for images of 32 pixels, of plain `torch.nn` layers.

Source: He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385, section 4.2. Differs: a shortcut that
changes the shape is a 1x1 convolution. Shape suffixes: B images, C channels, H and W.
"""

from torch import Tensor, nn

STAGES = ((3, 16), (3, 32), (3, 64))
"""Blocks and channels of each stage."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: y = relu(body(x) + shortcut(x))."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm(channels_in, channels_out, 3, stride),
            nn.ReLU(inplace=True),
            *_conv_norm(channels_out, channels_out, 3),
        )
        is_same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_conv_norm(channels_in, channels_out, 1, stride))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.act(self.body(x_BCHW) + self.shortcut(x_BCHW))


class ResNet20(nn.Module):
    """Stem, three stages (the last two halve the map), mean over the map, classifier."""

    def __init__(self, *, classes: int, channels_in: int = 3) -> None:
        super().__init__()
        channels = STAGES[0][1]
        self.stem = nn.Sequential(*_conv_norm(channels_in, channels, 3), nn.ReLU(inplace=True))
        blocks: list[nn.Module] = []
        for stage, (count, channels_out) in enumerate(STAGES):
            for index in range(count):
                blocks.append(BasicBlock(channels, channels_out, stride=2 if stage > 0 and index == 0 else 1))
                channels = channels_out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(channels, classes)
        for module in self.modules():  # He et al., arXiv:1502.01852
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.classifier(self.head(self.blocks(self.stem(x_BCHW))))


def _conv_norm(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(channels_out)]
