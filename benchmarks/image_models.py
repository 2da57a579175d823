"""Image classifiers of timm and torchvision with random weights, on 8 images of 64x64: `pip install --no-deps` them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.model_zoo import Subject, WithLoss

# Behind the zoo, which lets them be imported.
import timm  # isort: skip
import torchvision  # isort: skip

CLASSES, SIZE, BATCH = 10, 64, 8

#: Models of timm; those that have one window or one table of positions for a size of image are told the size.
_OF_ANY_SIZE = (
    "resnet18",
    "resnet26d",
    "resnetv2_50",
    "seresnet50",
    "skresnet18",
    "regnety_002",
    "repvgg_a0",
    "nfnet_f0",
    "densenet121",
    "dla34",
    "efficientnet_b0",
    "mobilenetv4_conv_small",
    "ghostnet_100",
    "rexnet_100",
    "convnext_atto",
    "convnextv2_atto",
    "inception_next_atto",
    "poolformerv2_s12",
    "edgenext_xx_small",
    "repvit_m0_9",
    "starnet_s1",
    "pvt_v2_b0",
    "twins_svt_small",
    "davit_tiny",
    "focalnet_tiny_srf",
)
_OF_ONE_SIZE = (
    "vit_tiny_patch16_224",
    "deit3_small_patch16_224",
    "eva02_tiny_patch14_224",
    "mixer_s32_224",
    "swin_tiny_patch4_window7_224",
    "tnt_s_patch16_224",
    "coat_lite_tiny",
    "xcit_nano_12_p16_224",
)
_OF_TORCHVISION = ("squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "mobilenet_v2", "googlenet", "resnext50_32x4d")


class _FirstOutput(nn.Module):
    """A classifier without its auxiliary ones."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.classifier(images)
        return logits if isinstance(logits, torch.Tensor) else logits[0]


def _subject(make: Callable[..., nn.Module], **options: Any) -> Subject:
    model = _FirstOutput(make(num_classes=CLASSES, **options))
    images, labels = torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(0, CLASSES, (BATCH,))
    return Subject(WithLoss(model), {"pixel_values": images, "labels": labels})


#: Builders by name.
IMAGE_MODELS: dict[str, Callable[[], Subject]] = {
    **{name: functools.partial(_subject, functools.partial(timm.create_model, name)) for name in _OF_ANY_SIZE},
    **{
        name: functools.partial(_subject, functools.partial(timm.create_model, name), img_size=SIZE)
        for name in _OF_ONE_SIZE
    },
    **{name: functools.partial(_subject, getattr(torchvision.models, name), weights=None) for name in _OF_TORCHVISION},
}
