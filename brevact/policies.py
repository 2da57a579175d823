"""Rules that many models share, and the policies that are shipped."""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F

from brevact.injectors import StochBackward2bit, StochBackward3bit, StochBackward4bit, StochBackward6bit
from brevact.rules import Policy

#: Modules of `torch.nn.modules.activation` that are layers with weights of their own.
_LAYERS = (nn.MultiheadAttention, nn.PReLU)
_RECTIFIERS = (nn.Hardshrink, nn.Hardsigmoid, nn.Hardtanh, nn.LeakyReLU, nn.ReLU, nn.ReLU6, nn.RReLU, nn.Threshold)
_CONVOLUTIONS = (*(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),)


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


#: Where no quantizer is named: what others derive from at 4 bits, which smooth functions need; at 3 bits where the
#: activation functions are piecewise linear, whose chains are unbiased at any width. Query and key, which are
#: exponentiated, and the probabilities of a loss have 6. Noise and bytes of it are in docs/noise.md.
DEFAULT = Policy(
    {
        F.cross_entropy: StochBackward6bit,
        is_rectified: StochBackward3bit,
        "": StochBackward4bit.let(score_bit_width=6),
    }
)

#: For convolutional networks: layers with weights, and norms, at 3 bits; derivatives and the rest at 2.
CONV_NET = Policy({(*_CONVOLUTIONS, nn.Linear): StochBackward3bit, is_norm: StochBackward3bit, "*": StochBackward2bit})

#: For transformers: norms, which read the residual stream with its outliers, and the loss at 4 bits, the rest at 2.
TRANSFORMER = Policy({is_norm: StochBackward4bit, F.cross_entropy: StochBackward4bit, "*": StochBackward2bit})
