"""The policy that packs only exactly."""

from __future__ import annotations

from dependencies import value

from brevact.autograd.settings import DEFAULT_RECOMPUTE
from brevact.injectors.class_protocol import Fragment
from brevact.injectors.fragments import BackwardQuantSolver, SaveQuantized
from brevact.quantizers.formats.lossless.quantizer import ElementsQuantizer, LosslessQuantizer

__all__ = [
    "LosslessBackward",
]


_EXACTLY = 32


class ExactValues(Fragment):
    """Store activations as they are."""

    residual_bit_width = _EXACTLY
    recompute = DEFAULT_RECOMPUTE

    @value
    def quantizer(recompute):
        return ElementsQuantizer() if recompute else LosslessQuantizer()


class LosslessBackward(ExactValues, SaveQuantized, BackwardQuantSolver):
    """Pack only exact values, masks and the integers of forward quantizers; all else stays at full precision.

    Gradients equal those without backward quantization, to the last bit. A forward quantizer with a learned scale saves
    its input; with ``residual_bit_width=2`` it saves the rounding residual in 2 bits instead, unbiased: gradients of
    scales get noise, all others stay equal.

    With ``recompute=1024``, backward recomputes layers of up to 1,024 multiplications an element, and the norms and
    functions after them, from the activations that are stored. This takes a few times fewer bytes; gradients then
    differ in the order of sums, no longer equal to the last bit.

    >>> import torch
    >>> LosslessBackward.backward_settings.is_exact
    True
    """
