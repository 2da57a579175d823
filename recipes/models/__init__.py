"""Models of the recipes."""

from recipes.models.efficientnetv2 import SIZES, EfficientNetV2, Stage, efficientnetv2
from recipes.models.layers import Layers

__all__ = ["SIZES", "EfficientNetV2", "Layers", "Stage", "efficientnetv2"]
