"""Quantization-aware training: EfficientNetV2 with 4-bit weights and activations by Brevitas.

    python -m recipes.qat --dataset cifar10 --compare LosslessBackward StochBackward2bit

trains the same model, from the same seed, with stock Brevitas and with each backward quantizer beside it. For the same
weights forward passes are the same. `LosslessBackward` stores integers and masks in place of Brevitas' floating-point
tensors and computes the same gradients, so that its runs end in the same weights; `StochBackward2bit` packs all else
too, at the price of unbiased noise in the gradients.

Weights have a scale for each output channel, taken from their largest magnitude; activations one for each tensor,
collected from `--calibration-batches` batches before training and learned from then on. First and last layer have the
bit width that their quantizers are named after, 8.

`LosslessBackward` with noise in the gradients of activation scales alone, but less memory:

    python -m recipes.qat --act-quant LosslessBackward --act-override residual_bit_width=2
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import ClassVar

import torch
from brevitas.graph.calibrate import calibration_mode
from torch import nn

from recipes import efficientnetv2
from recipes.command_line import main as run_command_line
from recipes.data import ImageDataset
from recipes.models import Layers
from recipes.options import Limit, setting
from recipes.recipe import BatchSource


@dataclass(frozen=True)
class QatSettings(efficientnetv2.EfficientNetV2Settings):
    LIMITS: ClassVar[tuple[Limit, ...]] = (
        ("weight_bit_width", lambda value: 2 <= value <= 8, "use 2 to 8"),
        ("input_bit_width", lambda value: 2 <= value <= 8, "use 2 to 8"),
        ("calibration_batches", lambda value: value >= 1, "use at least 1"),
        *efficientnetv2.EfficientNetV2Settings.LIMITS,
    )
    REFERENCE: ClassVar[str] = "stock Brevitas"

    weight_quant: str | None = setting(
        "Int8WeightPerChannelFloat", "forward weight quantizer of brevitas.quant: Int8WeightPerTensorFloat"
    )
    input_quant: str | None = setting(
        "Int8ActPerTensorFloat", "forward input quantizer of brevitas.quant: Int8ActPerTensorFixedPoint"
    )
    weight_bit_width: int = setting(4, "of weights; not those of the first and the last layer", type=int)
    input_bit_width: int = setting(4, "of layers' inputs; not those of the first and the last layer", type=int)
    calibration_batches: int = setting(8, "batches that the first scales of activations are taken from", type=int)


def build_model(settings: QatSettings, data: ImageDataset, layers: Layers) -> nn.Module:
    inner = Layers(
        layers.weight_quant.let(bit_width=settings.weight_bit_width),
        layers.input_quant.let(bit_width=settings.input_bit_width),
    )
    return efficientnetv2.build_model(settings, data, inner, ends=layers)


@torch.no_grad()
def calibrate(model: nn.Module, settings: QatSettings, batches: BatchSource) -> None:
    """Collects the scales of activations from a few training batches; training steps then learn them."""
    with calibration_mode(model):
        for images, _ in islice(batches.epoch(), settings.calibration_batches):
            model(images)


RECIPE = replace(
    efficientnetv2.RECIPE,
    module="qat",
    description=__doc__,
    settings=QatSettings,
    folder=lambda settings: (
        f"qat-{settings.dataset}-{settings.model}-w{settings.weight_bit_width}a{settings.input_bit_width}"
    ),
    title=lambda settings: (
        f"EfficientNetV2 {settings.model} W{settings.weight_bit_width}A{settings.input_bit_width}, {settings.dataset}, "
        f"batches of {settings.batch_size}"
    ),
    build_model=build_model,
    prepare=calibrate,
)
main = partial(run_command_line, RECIPE)

if __name__ == "__main__":
    sys.exit(main())
