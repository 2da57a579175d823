"""Brevitas' layers with weights, each with ``act_quant=``, and its settings with the prefix ``act_``.

Each class otherwise equals the Brevitas class of the same name: arguments, forward, ``state_dict`` keys, export.

>>> from brevact.injectors import StochBackward2bit
>>> conv = QuantConv2d(64, 128, 3, act_quant=StochBackward2bit, act_bucket_size=256)
>>> conv.act_quant.settings.quantizer.bucket_size
256
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import brevitas.nn as qnn

from brevact.nn.slot import BackwardSlot, layers_in
from brevact.private_names.of_brevitas import QuantRecurrentLayerMixin


class QuantConv1d(BackwardSlot, qnn.QuantConv1d): ...


class QuantConv2d(BackwardSlot, qnn.QuantConv2d): ...


class QuantConv3d(BackwardSlot, qnn.QuantConv3d): ...


class QuantConvTranspose1d(BackwardSlot, qnn.QuantConvTranspose1d): ...


class QuantConvTranspose2d(BackwardSlot, qnn.QuantConvTranspose2d): ...


class QuantConvTranspose3d(BackwardSlot, qnn.QuantConvTranspose3d): ...


class QuantLinear(BackwardSlot, qnn.QuantLinear): ...


class QuantEmbedding(BackwardSlot, qnn.QuantEmbedding):
    """``brevitas.nn.QuantEmbedding`` with ``act_quant=``, which packs the indices without loss."""


class QuantScaleBias(BackwardSlot, qnn.QuantScaleBias): ...


class BatchNorm1dToQuantScaleBias(BackwardSlot, qnn.BatchNorm1dToQuantScaleBias): ...


class BatchNorm2dToQuantScaleBias(BackwardSlot, qnn.BatchNorm2dToQuantScaleBias): ...


class QuantMultiheadAttention(BackwardSlot, qnn.QuantMultiheadAttention):
    """``brevitas.nn.QuantMultiheadAttention`` with ``act_quant=``, which covers projections, softmax and products."""


class _PicklableCells:
    """Omits from pickles the cells that Brevitas compiles on first use and rebuilds when missing."""

    def __getstate__(self: Any) -> dict[str, Any]:
        for layer in self.modules():
            if isinstance(layer, QuantRecurrentLayerMixin):
                layer._fast_cell = None
        return self.__dict__


class QuantRNN(_PicklableCells, BackwardSlot, qnn.QuantRNN):
    """``brevitas.nn.QuantRNN`` with ``act_quant=``, which covers all of its layers and steps."""


class QuantLSTM(_PicklableCells, BackwardSlot, qnn.QuantLSTM):
    """``brevitas.nn.QuantLSTM`` with ``act_quant=``, which covers all of its layers and steps."""


if not TYPE_CHECKING:
    __all__ = layers_in(globals())
