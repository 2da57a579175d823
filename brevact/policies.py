"""Rules that many models share, and the policies that are shipped."""

from __future__ import annotations

from torch import nn

#: Modules of `torch.nn.modules.activation` that are layers with weights of their own.
_LAYERS = (nn.MultiheadAttention, nn.PReLU)


def is_norm(name: str, module: nn.Module) -> bool:
    """Rule: batch, layer, group, instance and RMS norm, those of other libraries too, by the name of their class.

    Args:
        name: qualified name of the module, not looked at.
        module: any module.
    """
    return "norm" in type(module).__name__.lower() and not any(module.children())


def is_activation_function(name: str, module: nn.Module) -> bool:
    """Rule: ReLU, GELU, SiLU and the like, those of other libraries too, by the name of their class.

    Args:
        name: qualified name of the module, not looked at.
        module: any module.
    """
    kind = type(module)
    if kind.__module__ == nn.ReLU.__module__:
        return not isinstance(module, _LAYERS)
    return kind.__name__.endswith(("Activation", "GELU", "ReLU", "SiLU", "Swish")) and not any(module.parameters())


def computes_attention(name: str, module: nn.Module) -> bool:
    """Rule: what computes attention in its own forward, by the name of its class.

    Args:
        name: qualified name of the module, not looked at.
        module: any module.
    """
    return "attention" in type(module).__name__.lower()
