"""The policy that packs only what is exact."""

from __future__ import annotations

from brevitas.inject import value

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
    """Pack what is exact alone: masks, and the integers of forward quantizers; all else stays at full precision.

    Gradients are those of the model without backward quantization. With forward quantizers of a learned scale,
    ``residual_bit_width=2`` stores what they round away in 2 bits, unbiased, in place of their input: gradients of
    scales get noise, all others stay as they are.

    With ``recompute=1024`` layers of up to 1,024 multiplications an element, and the norms and functions behind them,
    are computed again in backward from the activations that are stored. Gradients are then exact but for roundings of
    their type, no longer equal to the last bit, at a few times fewer bytes.

    >>> import torch
    >>> LosslessBackward.backward_settings.is_exact
    True
    """
