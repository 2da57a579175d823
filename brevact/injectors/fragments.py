"""Fragments that backward quantizers are composed from, and the solver that turns them into settings.

A backward quantizer is a class of data in Brevitas' dialect, the solver last::

    class StochBackward2bit(StochasticRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
        bit_width = 2

``UniformBuckets`` is the format's fragment, in ``brevact/injectors/formats.py``. To add a format, write such a fragment
with a ``quantizer`` of its own; the argument names of this ``@value`` function are its settings.
"""

from __future__ import annotations

from dependencies import value
from torch import nn

from brevact.autograd import BackwardSettings, SaveMode
from brevact.autograd.region.settings import (
    DEFAULT_DERIVE_MIN_BITS,
    DEFAULT_MIN_NUMEL,
    DEFAULT_RECOMPUTE,
    DEFAULT_RESIDUAL_BIT_WIDTH,
    DEFAULT_SCORE_BIT_WIDTH,
)
from brevact.injectors.class_protocol import Fragment
from brevact.injectors.injector_type import BackwardInjectorType
from brevact.quantizers.rounding import Rounding


class NearestRounding(Fragment):
    """Round to the nearest code, half to even: the smallest error, but a biased one."""

    rounding = Rounding.NEAREST


class StochasticRounding(Fragment):
    """Round up with the probability of the remainder: unbiased, so that the noise averages out over steps."""

    rounding = Rounding.STOCHASTIC


class DitheredRounding(Fragment):
    """Round to the nearest code of a randomly shifted grid: unbiased, with half of stochastic rounding's variance."""

    rounding = Rounding.DITHERED


class SaveQuantized(Fragment):
    """Save packed codes from the forward pass on; tensors below ``min_numel`` elements stay unpacked.

    The rounding residual of a forward quantizer with a learned scale is saved in ``residual_bit_width`` bits. Smooth
    functions of a tensor that is packed in at least ``derive_min_bits`` bits are derived from it; 0 derives nothing.
    Query and key of attention take at least ``score_bit_width`` bits. With ``double_backward`` gradients may be
    differentiated again (``create_graph=True``). Layers that cost at most ``recompute`` multiplications and additions
    per element are recomputed instead of saving their output.
    """

    save_mode = SaveMode.SAVE_QUANTIZED
    min_numel = DEFAULT_MIN_NUMEL
    residual_bit_width = DEFAULT_RESIDUAL_BIT_WIDTH
    derive_min_bits = DEFAULT_DERIVE_MIN_BITS
    score_bit_width = DEFAULT_SCORE_BIT_WIDTH
    double_backward = False
    recompute = DEFAULT_RECOMPUTE


def build_slot_proxy(layer: nn.Module, injector: BackwardInjectorType) -> nn.Module:
    """Fill an activation slot of a Brevitas layer; Brevitas calls it as the injector's ``proxy_class``."""
    from brevact.injectors.slot import filled_slot  # imports Brevitas' layers

    return filled_slot(layer, injector)


class BackwardQuantSolver(Fragment, metaclass=BackwardInjectorType):
    """Resolves a backward quantizer into ``backward_settings``; the last of its bases.

    Brevitas calls ``proxy_class`` to fill a layer's activation slot. ``forward_quant`` puts a forward activation
    quantizer into the same slot; its own settings take the prefix ``forward_``.
    """

    proxy_class = build_slot_proxy
    forward_quant = None

    @value
    def backward_settings(
        quantizer,
        save_mode,
        min_numel,
        residual_bit_width,
        derive_min_bits,
        score_bit_width,
        recompute,
        double_backward,
    ):
        numbers = residual_bit_width, derive_min_bits, score_bit_width, recompute
        return BackwardSettings(quantizer, save_mode, min_numel, *numbers, double_backward=double_backward)
