"""Rules that many models share: functions of a module's name and the module."""

from __future__ import annotations

from torch import nn

#: Modules of `torch.nn.modules.activation` that are layers with weights of their own.
_LAYERS = (nn.MultiheadAttention, nn.PReLU)
_RECTIFIERS = (nn.Hardshrink, nn.Hardsigmoid, nn.Hardtanh, nn.LeakyReLU, nn.ReLU, nn.ReLU6, nn.RReLU, nn.Threshold)


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


def is_rectified(name: str, module: nn.Module) -> bool:
    """Rule: modules in which the activation functions are piecewise linear, all of them, and there is one.

    Args:
        name: qualified name of the module, not looked at.
        module: any module.
    """
    found = [each for each in module.modules() if is_activation_function("", each)]
    return bool(found) and all(isinstance(each, _RECTIFIERS) for each in found)
