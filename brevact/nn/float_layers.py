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


class BatchNorm1d(BackwardSlot, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` with a backward quantizer (``act_quant=``)."""


class BatchNorm2d(BackwardSlot, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` with a backward quantizer (``act_quant=``)."""


class BatchNorm3d(BackwardSlot, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` with a backward quantizer (``act_quant=``)."""


class InstanceNorm1d(BackwardSlot, nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d`` with a backward quantizer (``act_quant=``)."""


class InstanceNorm2d(BackwardSlot, nn.InstanceNorm2d):
    """``torch.nn.InstanceNorm2d`` with a backward quantizer (``act_quant=``)."""


class InstanceNorm3d(BackwardSlot, nn.InstanceNorm3d):
    """``torch.nn.InstanceNorm3d`` with a backward quantizer (``act_quant=``)."""


class LayerNorm(BackwardSlot, nn.LayerNorm):
    """``torch.nn.LayerNorm`` with a backward quantizer (``act_quant=``)."""


class GroupNorm(BackwardSlot, nn.GroupNorm):
    """``torch.nn.GroupNorm`` with a backward quantizer (``act_quant=``)."""


class RMSNorm(BackwardSlot, nn.RMSNorm):
    """``torch.nn.RMSNorm`` with a backward quantizer (``act_quant=``)."""


class ReLU(BackwardSlot, nn.ReLU):
    """``torch.nn.ReLU`` with a backward quantizer (``act_quant=``)."""


class ReLU6(BackwardSlot, nn.ReLU6):
    """``torch.nn.ReLU6`` with a backward quantizer (``act_quant=``)."""


class LeakyReLU(BackwardSlot, nn.LeakyReLU):
    """``torch.nn.LeakyReLU`` with a backward quantizer (``act_quant=``)."""


class ELU(BackwardSlot, nn.ELU):
    """``torch.nn.ELU`` with a backward quantizer (``act_quant=``)."""


class SiLU(BackwardSlot, nn.SiLU):
    """``torch.nn.SiLU`` with a backward quantizer (``act_quant=``)."""


class GELU(BackwardSlot, nn.GELU):
    """``torch.nn.GELU`` with a backward quantizer (``act_quant=``)."""


class Mish(BackwardSlot, nn.Mish):
    """``torch.nn.Mish`` with a backward quantizer (``act_quant=``)."""


class Softplus(BackwardSlot, nn.Softplus):
    """``torch.nn.Softplus`` with a backward quantizer (``act_quant=``)."""


class Hardswish(BackwardSlot, nn.Hardswish):
    """``torch.nn.Hardswish`` with a backward quantizer (``act_quant=``)."""


class Hardsigmoid(BackwardSlot, nn.Hardsigmoid):
    """``torch.nn.Hardsigmoid`` with a backward quantizer (``act_quant=``)."""


class Sigmoid(BackwardSlot, nn.Sigmoid):
    """``torch.nn.Sigmoid`` with a backward quantizer (``act_quant=``)."""


class Tanh(BackwardSlot, nn.Tanh):
    """``torch.nn.Tanh`` with a backward quantizer (``act_quant=``)."""


class Softmax(BackwardSlot, nn.Softmax):
    """``torch.nn.Softmax`` with a backward quantizer (``act_quant=``)."""


class MaxPool1d(BackwardSlot, nn.MaxPool1d):
    """``torch.nn.MaxPool1d`` with a backward quantizer (``act_quant=``)."""


class MaxPool2d(BackwardSlot, nn.MaxPool2d):
    """``torch.nn.MaxPool2d`` with a backward quantizer (``act_quant=``)."""


class MaxPool3d(BackwardSlot, nn.MaxPool3d):
    """``torch.nn.MaxPool3d`` with a backward quantizer (``act_quant=``)."""


class AvgPool1d(BackwardSlot, nn.AvgPool1d):
    """``torch.nn.AvgPool1d`` with a backward quantizer (``act_quant=``)."""


class AvgPool2d(BackwardSlot, nn.AvgPool2d):
    """``torch.nn.AvgPool2d`` with a backward quantizer (``act_quant=``)."""


class AvgPool3d(BackwardSlot, nn.AvgPool3d):
    """``torch.nn.AvgPool3d`` with a backward quantizer (``act_quant=``)."""


class AdaptiveAvgPool1d(BackwardSlot, nn.AdaptiveAvgPool1d):
    """``torch.nn.AdaptiveAvgPool1d`` with a backward quantizer (``act_quant=``)."""


class AdaptiveAvgPool2d(BackwardSlot, nn.AdaptiveAvgPool2d):
    """``torch.nn.AdaptiveAvgPool2d`` with a backward quantizer (``act_quant=``)."""


class AdaptiveAvgPool3d(BackwardSlot, nn.AdaptiveAvgPool3d):
    """``torch.nn.AdaptiveAvgPool3d`` with a backward quantizer (``act_quant=``)."""


class AdaptiveMaxPool1d(BackwardSlot, nn.AdaptiveMaxPool1d):
    """``torch.nn.AdaptiveMaxPool1d`` with a backward quantizer (``act_quant=``)."""


class AdaptiveMaxPool2d(BackwardSlot, nn.AdaptiveMaxPool2d):
    """``torch.nn.AdaptiveMaxPool2d`` with a backward quantizer (``act_quant=``)."""


class AdaptiveMaxPool3d(BackwardSlot, nn.AdaptiveMaxPool3d):
    """``torch.nn.AdaptiveMaxPool3d`` with a backward quantizer (``act_quant=``)."""


class Dropout(BackwardSlot, nn.Dropout):
    """``torch.nn.Dropout`` with a backward quantizer (``act_quant=``)."""


if not TYPE_CHECKING:
    __all__ = layers_in(globals())
