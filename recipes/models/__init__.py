"""Models of the recipes."""

from recipes.models.efficientnetv2 import SIZES, EfficientNetV2, Stage, efficientnetv2
from recipes.models.layers import FloatLayers, Layers
from recipes.models.resnet import ResNet, ResNet20, resnet50

__all__ = [
    "SIZES",
    "EfficientNetV2",
    "FloatLayers",
    "Layers",
    "ResNet",
    "ResNet20",
    "Stage",
    "efficientnetv2",
    "resnet50",
]
