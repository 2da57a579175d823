"""A small Vision Transformer with 2 or 4 bits an activation for backward.

    python -m recipes.vit --compare DEFAULT StochBackward2bit
    python -m recipes.vit --dataset cifar10 --patch-size 4 --epochs 50 --act-quant StochBackward2bit

The first one trains the nano size (six blocks of 96 channels, patches of 8 x 8 pixels) on scikit-learn's digits three
times. The tiny and small sizes are those of DeiT; a token of its own or the mean of all patches is classified:

    python -m recipes.vit --dataset cifar100 --model tiny --patch-size 4 --pool mean --stochastic-depth 0.1 \\
        --epochs 100 --batch-size 128 --warmup-epochs 5 --act-quant StochBackward4bit

An interrupted run or comparison goes on with `--resume DIR`, and ends in the weights of an uninterrupted one.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import nn

from recipes import images
from recipes.command_line import main as run_command_line
from recipes.data import ImageDataset
from recipes.errors import RecipeError
from recipes.metrics import ACCURACY
from recipes.models import POOLS, VIT_SIZES, FloatLayers, Layers, ViT
from recipes.options import Limit, setting
from recipes.recipe import Recipe


@dataclass(frozen=True)
class VitSettings(images.ImageSettings):
    LIMITS: ClassVar[tuple[Limit, ...]] = (
        *images.ImageSettings.LIMITS,
        ("patch_size", lambda value: value >= 1, "use at least 1"),
    )

    model: str = setting("nano", "size of the Vision Transformer", choices=tuple(VIT_SIZES))
    patch_size: int = setting(8, "height and width of a patch, in pixels", type=int)
    pool: str = setting("class", "what is classified: a token of its own, or the mean of all patches", choices=POOLS)

    epochs: int = setting(20, "passes over the training images", type=int)
    lr: float = setting(1e-3, "largest learning rate of AdamW", type=float)
    clip_grad_norm: float | None = setting(1.0, "largest norm of all gradients together", type=float)
    dropout: float = setting(0.0, "dropout of embeddings, attention and residual branches", type=float)


def load_data(settings: VitSettings) -> ImageDataset:
    """The images that the settings name."""
    data = images.load_data(settings)
    if data.image_size % settings.patch_size:
        raise RecipeError(
            f"--patch-size {settings.patch_size} is not possible: images of {settings.dataset} have {data.image_size} "
            "pixels a side; use a divisor of it"
        )
    return data


def build_model(settings: VitSettings, data: ImageDataset, layers: Layers) -> nn.Module:
    return ViT(
        VIT_SIZES[settings.model],
        classes=data.classes,
        image_size=data.image_size,
        patch_size=settings.patch_size,
        channels_in=data.channels,
        pool=settings.pool,
        dropout=settings.dropout,
        stochastic_depth=settings.stochastic_depth,
        layers=layers,
    )


RECIPE = Recipe(
    module="vit",
    description=__doc__,
    settings=VitSettings,
    metric=ACCURACY,
    folder=lambda settings: f"vit-{settings.dataset}-{settings.model}",
    title=lambda settings: f"ViT {settings.model}, {settings.dataset}, batches of {settings.batch_size}",
    load_data=load_data,
    make_batches=images.make_batches,
    build_model=build_model,
    layers=FloatLayers(),
)
main = partial(run_command_line, RECIPE)

if __name__ == "__main__":
    sys.exit(main())
