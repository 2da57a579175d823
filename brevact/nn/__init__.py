"""Layers that take a backward quantizer (``act_quant=``): Brevitas' layers, norms, pools, activation functions."""

from brevact.private_names.of_brevitas import IS_INSTALLED, MISSING

if not IS_INSTALLED:
    raise ImportError(f"brevact.nn {MISSING}; layers of torch.nn take policies: brevact.quantize_backward(model)")

from brevact.nn.float_layers import *
from brevact.nn.quant_layers import *
from brevact.nn.slot import layers_in

__all__ = layers_in(globals())
