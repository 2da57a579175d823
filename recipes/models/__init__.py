"""Models of the recipes."""

from recipes.models.efficientnetv2 import SIZES, EfficientNetV2, Stage, efficientnetv2
from recipes.models.gpt import GPT, GPT_SIZES, HEADS
from recipes.models.layers import FloatLayers, Layers
from recipes.models.resnet import ResNet, ResNet20, resnet50
from recipes.models.transformer import MLPS, NORMS
from recipes.models.vit import POOLS, VIT_SIZES, ViT

__all__ = [
    "GPT",
    "GPT_SIZES",
    "HEADS",
    "MLPS",
    "NORMS",
    "POOLS",
    "SIZES",
    "VIT_SIZES",
    "EfficientNetV2",
    "FloatLayers",
    "Layers",
    "ResNet",
    "ResNet20",
    "Stage",
    "ViT",
    "efficientnetv2",
    "resnet50",
]
