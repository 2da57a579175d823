"""PyTorch's layers without weights to quantize, each with ``act_quant=``; Brevitas has no counterparts with it.

Each class otherwise equals the ``torch.nn`` class of the same name; settings take the prefix ``act_``.

>>> from brevact.injectors import StochBackward2bit
>>> norm = BatchNorm2d(128, act_quant=StochBackward2bit, act_bit_width=4)
>>> norm.act_quant.settings.quantizer.bit_width
4
"""

from typing import TYPE_CHECKING

from torch import nn

from brevact.nn.slot import BackwardSlot, layers_in


class BatchNorm1d(BackwardSlot, nn.BatchNorm1d): ...


class BatchNorm2d(BackwardSlot, nn.BatchNorm2d): ...


class BatchNorm3d(BackwardSlot, nn.BatchNorm3d): ...


class InstanceNorm1d(BackwardSlot, nn.InstanceNorm1d): ...


class InstanceNorm2d(BackwardSlot, nn.InstanceNorm2d): ...


class InstanceNorm3d(BackwardSlot, nn.InstanceNorm3d): ...


class LayerNorm(BackwardSlot, nn.LayerNorm): ...


class GroupNorm(BackwardSlot, nn.GroupNorm): ...


class RMSNorm(BackwardSlot, nn.RMSNorm): ...


class ReLU(BackwardSlot, nn.ReLU): ...


class ReLU6(BackwardSlot, nn.ReLU6): ...


class LeakyReLU(BackwardSlot, nn.LeakyReLU): ...


class ELU(BackwardSlot, nn.ELU): ...


class SiLU(BackwardSlot, nn.SiLU): ...


class GELU(BackwardSlot, nn.GELU): ...


class Mish(BackwardSlot, nn.Mish): ...


class Softplus(BackwardSlot, nn.Softplus): ...


class Hardswish(BackwardSlot, nn.Hardswish): ...


class Hardsigmoid(BackwardSlot, nn.Hardsigmoid): ...


class Sigmoid(BackwardSlot, nn.Sigmoid): ...


class Tanh(BackwardSlot, nn.Tanh): ...


class Softmax(BackwardSlot, nn.Softmax): ...


class MaxPool1d(BackwardSlot, nn.MaxPool1d): ...


class MaxPool2d(BackwardSlot, nn.MaxPool2d): ...


class MaxPool3d(BackwardSlot, nn.MaxPool3d): ...


class AvgPool1d(BackwardSlot, nn.AvgPool1d): ...


class AvgPool2d(BackwardSlot, nn.AvgPool2d): ...


class AvgPool3d(BackwardSlot, nn.AvgPool3d): ...


class AdaptiveAvgPool1d(BackwardSlot, nn.AdaptiveAvgPool1d): ...


class AdaptiveAvgPool2d(BackwardSlot, nn.AdaptiveAvgPool2d): ...


class AdaptiveAvgPool3d(BackwardSlot, nn.AdaptiveAvgPool3d): ...


class AdaptiveMaxPool1d(BackwardSlot, nn.AdaptiveMaxPool1d): ...


class AdaptiveMaxPool2d(BackwardSlot, nn.AdaptiveMaxPool2d): ...


class AdaptiveMaxPool3d(BackwardSlot, nn.AdaptiveMaxPool3d): ...


class Dropout(BackwardSlot, nn.Dropout): ...


if not TYPE_CHECKING:
    __all__ = layers_in(globals())
