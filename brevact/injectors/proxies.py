"""Which modules of a model may have a rule, and which are Brevitas' own machinery inside a layer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from brevact.autograd import has_region
from brevact.private_names.of_brevitas import QuantProxyFromInjector


def is_quant_proxy(module: nn.Module) -> bool:
    """Return whether a module is a quantizer proxy of a Brevitas layer.

    Its insides run within the layer's forward, are rebuilt when a state dict is loaded, and may be shared by the
    quantizers of different models.
    """
    return isinstance(module, QuantProxyFromInjector)


def modules_without_own_region(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules under each of their names, down to layers with a quantizer of their own and Brevitas' proxies."""
    if has_region(module) or is_quant_proxy(module):
        return
    yield name, module
    for child_name, child in module._modules.items():
        if child is not None:
            yield from modules_without_own_region(child, f"{name}.{child_name}" if name else child_name)
