"""Models of the recipes that no library has."""

from recipes.models.efficientnetv2 import SIZES, EfficientNetV2, FloatLayers, Layers, efficientnetv2
from recipes.models.resnet import ResNet20

__all__ = ["SIZES", "EfficientNetV2", "FloatLayers", "Layers", "ResNet20", "efficientnetv2"]
