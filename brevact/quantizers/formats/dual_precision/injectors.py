"""Dual precision: block means of each map in float16, what they leave in 2 or 4 bits.

``DualPrecisionBackward<N>bit`` stores N bits a code, 31 bits a map and 16 bits a block of 8 by 8 elements. Smooth maps
have small residuals, so that the step is finer than that of codes between the map's own minimum and maximum. ``block=``
sets another side, ``bit_width=`` another width.

Source: DIVISION, arXiv:2208.04187, section 4.
"""

from brevitas.inject import value

from brevact.injectors.class_protocol import Fragment
from brevact.injectors.fragments import BackwardQuantSolver, SaveQuantized, StochasticRounding
from brevact.quantizers.formats.dual_precision.quantizer import DualPrecisionQuantizer

__all__ = [
    "DualPrecisionBackward2bit",
    "DualPrecisionBackward4bit",
]


class DualPrecisionMaps(Fragment):
    """Means of blocks of 8 elements along each axis of a map, and evenly spaced codes for the residual of each map."""

    block = 8

    @value
    def quantizer(bit_width, block, rounding):
        return DualPrecisionQuantizer(bit_width=bit_width, block=block, rounding=rounding)


class DualPrecisionBackward2bit(StochasticRounding, DualPrecisionMaps, SaveQuantized, BackwardQuantSolver):
    """2-bit backward quantizer beside block means in float16, with stochastic rounding.

    2.26 bits an element for maps of 56 by 56, 2.96 for maps of 7 by 7; decoding is unbiased and off by less than a
    step of the residual. Source: DIVISION, arXiv:2208.04187.

    >>> import torch
    >>> DualPrecisionBackward2bit.quantizer.quantize(torch.rand(4, 16, 56, 56)).nbytes  # 802816 bytes in float32
    56696
    """

    bit_width = 2


class DualPrecisionBackward4bit(StochasticRounding, DualPrecisionMaps, SaveQuantized, BackwardQuantSolver):
    """4-bit backward quantizer beside block means in float16, with stochastic rounding.

    4.26 bits an element for maps of 56 by 56, 4.96 for maps of 7 by 7; decoding is unbiased and off by less than a
    step of the residual. Source: DIVISION, arXiv:2208.04187.

    >>> import torch
    >>> DualPrecisionBackward4bit.quantizer.quantize(torch.rand(4, 16, 56, 56)).nbytes  # 802816 bytes in float32
    106872
    """

    bit_width = 4
