"""Rules that many models share, and the policies that are shipped."""

from __future__ import annotations

from torch import nn

from brevact.injectors import StochBackward2bit, StochBackward3bit, StochBackward4bit
from brevact.rules import Policy

#: Modules of `torch.nn.modules.activation` that are layers with weights of their own.
_LAYERS = (nn.MultiheadAttention, nn.PReLU)
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


#: For any model, where no quantizer is named: 4 bits.
DEFAULT = Policy({"*": StochBackward4bit})

#: For convolutional networks: layers with weights, and norms, at 3 bits; derivatives and the rest at 2. On a nano
#: EfficientNetV2 that has learnt digits for 80 steps, the gradient's error is 0.71 of its norm, at 2 bits throughout it
#: is 1.31, for 1.3 times the bytes; at 3 bits throughout, 0.53 for 1.5 times. Measured by `benchmarks.policies`.
CONV_NET = Policy({(*_CONVOLUTIONS, nn.Linear): StochBackward3bit, is_norm: StochBackward3bit, "*": StochBackward2bit})

#: For transformers: norms, which read the residual stream with its outliers, and the loss at 4 bits, the rest at 2. On
#: a nano ViT that has learnt digits for 80 steps, the gradient's error is 0.25 of its norm, at 2 bits throughout it is
#: 4.5, for 1.09 times the bytes; on a nano GPT 0.21 against 0.25, for 1.10 times. Measured by `benchmarks.policies`.
TRANSFORMER = Policy({is_norm: StochBackward4bit, nn.CrossEntropyLoss: StochBackward4bit, "*": StochBackward2bit})
