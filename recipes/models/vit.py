"""Vision Transformer: the tiny and small size of DeiT, and a nano size for images of 32 pixels.

Source: Dosovitskiy et al., An Image is Worth 16x16 Words, arXiv:2010.11929, section 3.1; the sizes are those of Touvron
et al., Training data-efficient image transformers, arXiv:2012.12877, table 1. Differs: `nano` is this project's own,
small enough to train in two minutes on a CPU. Shape suffixes: B images, C channels, H and W, T tokens, P pixels and
channels of a patch.
"""

import torch
from torch import Tensor, nn

from recipes.models.layers import FloatLayers, Layers
from recipes.models.transformer import WEIGHT_STD, Blocks, Size, initialise

VIT_SIZES = {"nano": Size(depth=6, heads=3, width=96), "tiny": Size(12, 3, 192), "small": Size(12, 6, 384)}
POOLS = ("class", "mean")


class ViT(nn.Module):
    """Patches, positions, blocks of bidirectional attention, and a linear classifier.

    Args:
        size: of the transformer.
        classes: outputs.
        image_size: height and width of the images.
        patch_size: height and width of a patch, a divisor of `image_size`.
        channels_in: channels of the images.
        pool: input of the classifier: a token of its own ("class") or the mean of all patches ("mean").
        dropout: as for `transformer.Block`.
        stochastic_depth: as for `transformer.Blocks`.
        layers: makes the linear layers; None for those of torch.nn.

    Raises:
        ValueError: the patches do not cover the image, or `pool` is not known.
    """

    def __init__(
        self,
        size: Size,
        *,
        classes: int,
        image_size: int,
        patch_size: int,
        channels_in: int = 3,
        pool: str = "class",
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        layers: Layers | None = None,
    ) -> None:
        super().__init__()
        if patch_size < 1 or image_size % patch_size:
            raise ValueError(f"patch_size={patch_size} does not divide image_size={image_size}; use a divisor of it")
        if pool not in POOLS:
            raise ValueError(f"pool={pool!r} is not known; accepted: {', '.join(POOLS)}")
        layers = layers or FloatLayers()
        self.patch_size = patch_size
        patches = (image_size // patch_size) ** 2
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.width)) if pool == "class" else None
        self.positions = nn.Parameter(torch.empty(1, patches + (pool == "class"), size.width))
        self.embedding = layers.linear(channels_in * patch_size**2, size.width)
        self.dropout = nn.Dropout(dropout)
        self.transformer = Blocks(layers, size, dropout=dropout, stochastic_depth=stochastic_depth)
        self.classifier = layers.linear(size.width, classes)
        self.apply(initialise)
        nn.init.normal_(self.positions, std=WEIGHT_STD)
        if self.class_token is not None:
            nn.init.normal_(self.class_token, std=WEIGHT_STD)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BTC = self.embedding(cut_into_patches(x_BCHW, self.patch_size))
        if self.class_token is not None:
            x_BTC = torch.cat([self.class_token.expand(len(x_BTC), -1, -1), x_BTC], 1)
        y_BTC = self.transformer(self.dropout(x_BTC + self.positions))
        return self.classifier(y_BTC.mean(1) if self.class_token is None else y_BTC[:, 0])


def cut_into_patches(x_BCHW: Tensor, size: int) -> Tensor:
    """The patches of images, row by row, as vectors: B x T x P.

    A linear layer on them is a convolution whose kernel and stride are `size`, with its weight flattened.
    """
    rows = x_BCHW.unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
