"""Quantization-aware training: EfficientNetV2 with 4-bit weights and activations by Brevitas.

    python -m recipes.qat --dataset cifar10 --compare LosslessBackward StochBackward2bit

trains the same model, from the same seed, with stock Brevitas ("plain") and with each backward quantizer beside it. For
the same weights forward passes are the same. `LosslessBackward` stores integers and masks in place of Brevitas'
floating-point tensors and computes the same gradients, so that its runs end in the same weights; `StochBackward2bit`
packs all else too, at the price of unbiased noise in the gradients.

Weights have a scale for each output channel, taken from their largest magnitude; activations one for each tensor,
collected from `--calibration-batches` batches before training and learned from then on. First and last layer have the
bit width that their quantizers are named after, 8.

`LosslessBackward` with noise in the gradients of activation scales alone, but less memory:

    python -m recipes.qat --act-quant LosslessBackward:residual_bit_width=2
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from brevitas.graph.calibrate import calibration_mode
from torch import nn

from recipes import command_line, efficientnetv2
from recipes.models import Layers
from recipes.recipe import setting

_BITS = (lambda value: 2 <= value <= 8, "use 2 to 8")


@dataclass(frozen=True)
class QatSettings(efficientnetv2.EfficientNetV2Settings):
    weight_quant: str | None = setting(
        "Int8WeightPerChannelFloat", "forward weight quantizer of brevitas.quant: Int8WeightPerTensorFloat"
    )
    input_quant: str | None = setting(
        "Int8ActPerTensorFloat", "forward input quantizer of brevitas.quant: Int8ActPerTensorFixedPoint"
    )
    weight_bit_width: int = setting(4, "of weights; not those of the first and the last layer", check=_BITS)
    input_bit_width: int = setting(4, "of layers' inputs; not those of the first and the last layer", check=_BITS)
    calibration_batches: int = setting(8, "batches that the first scales of activations are taken from", least=1)


class QatTask(efficientnetv2.ImageTask):
    def build_model(self) -> nn.Module:
        """The model with scales of activations from a few training batches; training steps then learn them."""
        ends, own = self.layers(), self.settings
        widths = own.weight_bit_width, own.input_bit_width
        inner = (each.let(bit_width=width) for each, width in zip(vars(ends).values(), widths, strict=True))
        model = self.network(Layers(*inner), ends).to(self.device)
        with torch.no_grad(), calibration_mode(model):
            for images, _ in islice(self.train_batches.epoch(), own.calibration_batches):
                model(images)
        return model


RECIPE = replace(
    efficientnetv2.RECIPE,
    module="recipes.qat",
    description=__doc__,
    settings=QatSettings,
    task=QatTask,
    variants=("plain", "LosslessBackward", "DEFAULT"),
)
main = partial(command_line.main, RECIPE)

if __name__ == "__main__":
    sys.exit(main())
