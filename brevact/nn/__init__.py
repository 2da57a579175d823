"""Layers that take a backward quantizer (``act_quant=``): Brevitas' layers, norms, pools, activation functions."""

from brevact.nn import float_layers, quant_layers
from brevact.nn.float_layers import *
from brevact.nn.quant_layers import *

__all__: list[str] = []
__all__ += float_layers.__all__
__all__ += quant_layers.__all__
