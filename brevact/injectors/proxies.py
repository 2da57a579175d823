"""Which modules are Brevitas' own machinery inside a layer."""

from __future__ import annotations

from torch import nn

from brevact.private_names.of_brevitas import QuantProxyFromInjector


def is_quant_proxy(module: nn.Module) -> bool:
    """Return whether a module is a quantizer proxy of a Brevitas layer.

    Its insides run within the layer's forward, are rebuilt when a state dict is loaded, and may be shared by the
    quantizers of different models.
    """
    return isinstance(module, QuantProxyFromInjector)
