"""Models in training with their batches, at full size and tiny ones of the same kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.qat_nets import BasicBlock, Layers
from recipes.models import FloatLayers, ResNet, Stage, efficientnetv2, resnet50
from recipes.models.efficientnetv2 import EfficientNetV2
from recipes.models.efficientnetv2 import Size as ImageSize
from recipes.models.gpt import GPT
from recipes.models.transformer import Size
from recipes.models.vit import ViT

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model and its batches. The loss is the cross-entropy of what the model returns for each target.

    Args:
        build: makes the model; one of its modules is named `blocks`, and holds the blocks to checkpoint.
        batch: makes inputs and targets of so many samples on a device.
        samples: of a batch.
        size: of a sample, in words.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.device], Batch]
    samples: int
    size: str


class UNet3D(nn.Module):
    """Two halvings of a volume and back, each level of two convolutions, with what was there before beside it.

    Source: Cicek et al., 3D U-Net, arXiv:1606.06650, with instance norms and leaky ReLUs as nnU-Net has them.

    Args:
        width: channels of the first level; each level doubles them.
        classes: outputs.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        sizes = [(1, width), (width, 2 * width), (2 * width, 4 * width), (6 * width, 2 * width), (3 * width, width)]
        self.blocks = nn.ModuleList(self._block(*each) for each in sizes)
        self.head = nn.Conv3d(width, classes, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            convolution = nn.Conv3d(channels, outputs, 3, padding=1, bias=False)
            layers += [convolution, nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01)]
        return nn.Sequential(*layers)

    def forward(self, x_BCDHW: Tensor) -> Tensor:
        """Return (B, D, H, W, classes) logits of (B, 1, D, H, W) volumes."""
        passed: list[Tensor] = []
        x = self.blocks[0](x_BCDHW)
        for block in self.blocks[1:3]:
            passed.append(x)
            x = block(F.max_pool3d(x, 2))
        for block in self.blocks[3:]:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), passed.pop()], 1))
        return self.head(x).movedim(1, -1)


class QuantResNet(nn.Module):
    """A residual net whose weights and activations Brevitas quantizes to 4 bits.

    Args:
        widths: channels of the blocks; the second of each width halves the map.
        classes: outputs.
    """

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        layers = Layers(4, collecting=False)
        first = widths[0]
        self.stem = nn.Sequential(
            layers.identity(8), layers.conv(3, first, 7, 2), nn.BatchNorm2d(first), layers.relu(), nn.MaxPool2d(2)
        )
        pairs = zip((first, *widths), widths, strict=False)
        self.blocks = nn.Sequential(*(BasicBlock(layers, a, b, 2 if a != b else 1) for a, b in pairs))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return (B, classes) logits of (B, 3, H, W) images."""
        return self.head(self.blocks(self.stem(x_BCHW)).mean((2, 3)))


def _images(size: int, classes: int) -> Callable[[int, torch.device], Batch]:
    def batch(samples: int, device: torch.device) -> Batch:
        images = torch.randn(samples, 3, size, size, device=device)
        return images, torch.randint(classes, (samples,), device=device)

    return batch


def _volumes(size: int, classes: int) -> Callable[[int, torch.device], Batch]:
    def batch(samples: int, device: torch.device) -> Batch:
        volumes = torch.randn(samples, 1, size, size, size, device=device)
        return volumes, torch.randint(classes, (samples, size, size, size), device=device)

    return batch


def _tokens(vocabulary: int, length: int) -> Callable[[int, torch.device], Batch]:
    def batch(samples: int, device: torch.device) -> Batch:
        tokens = torch.randint(vocabulary, (samples, length + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


_BASE = Size(depth=12, heads=12, width=768)
WORKLOADS = {
    "resnet50": Workload(lambda: resnet50(classes=1000), _images(224, 1000), 128, "224 x 224"),
    "efficientnetv2-s": Workload(
        lambda: efficientnetv2("s", image_size=224, classes=1000, layers=FloatLayers()),
        _images(224, 1000),
        64,
        "224 x 224",
    ),
    "gpt2": Workload(lambda: GPT(_BASE, vocabulary=50257, context=1024), _tokens(50257, 1024), 8, "1024 tokens"),
    "vit-b": Workload(
        lambda: ViT(_BASE, classes=1000, image_size=224, patch_size=16), _images(224, 1000), 64, "224 x 224"
    ),
    "unet3d": Workload(lambda: UNet3D(32, 3), _volumes(96, 3), 2, "96 x 96 x 96"),
    "resnet18-w4a4": Workload(
        lambda: QuantResNet((64, 64, 128, 128, 256, 256, 512, 512), 1000), _images(224, 1000), 64, "224 x 224"
    ),
}
_TINY_IMAGES = ImageSize((Stage("fused", 4, 2, 8, 1), Stage("mbconv", 4, 2, 16, 1)), head=32)
_TINY = Size(depth=2, heads=2, width=32)
SMOKE_WORKLOADS = {
    "resnet50": Workload(lambda: ResNet((1, 1), classes=10, width=8), _images(64, 10), 4, "64 x 64"),
    "efficientnetv2-s": Workload(
        lambda: EfficientNetV2(_TINY_IMAGES, classes=10, layers=FloatLayers()), _images(32, 10), 4, "32 x 32"
    ),
    "gpt2": Workload(lambda: GPT(_TINY, vocabulary=64, context=64), _tokens(64, 64), 2, "64 tokens"),
    "vit-b": Workload(lambda: ViT(_TINY, classes=10, image_size=32, patch_size=4), _images(32, 10), 4, "32 x 32"),
    "unet3d": Workload(lambda: UNet3D(4, 3), _volumes(16, 3), 2, "16 x 16 x 16"),
    "resnet18-w4a4": Workload(lambda: QuantResNet((8, 8, 16), 10), _images(32, 10), 4, "32 x 32"),
}
