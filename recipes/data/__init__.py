"""Data sets of the recipes."""

from recipes.data.batches import Batches
from recipes.data.images import LOADERS, ImageDataset, Split

__all__ = ["LOADERS", "Batches", "ImageDataset", "Split"]
