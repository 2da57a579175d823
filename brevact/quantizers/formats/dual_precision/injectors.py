"""Dual precision: block means of each map in float16, the residual in 2 or 4 bits.

``DualPrecisionBackward<N>bit`` stores N bits a code, 31 bits a map and 16 bits a block of 8 by 8 elements. Smooth maps
have small residuals, so that the step is finer than that of codes between the map's own minimum and maximum: N + 0.26
bits an element for maps of 56 by 56, N + 0.96 for maps of 7 by 7. ``block=`` sets another side, ``bit_width=`` another
width.

Source: DIVISION, arXiv:2208.04187, section 4.
"""

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

    quantizer = DualPrecisionQuantizer


class DualPrecisionBackward2bit(StochasticRounding, DualPrecisionMaps, SaveQuantized, BackwardQuantSolver):
    """2-bit residuals, stochastic rounding: 2.26 bits an element (maps of 56 by 56), 14.2x smaller than float32."""

    bit_width = 2


class DualPrecisionBackward4bit(StochasticRounding, DualPrecisionMaps, SaveQuantized, BackwardQuantSolver):
    """4-bit residuals, stochastic rounding: 4.26 bits an element (maps of 56 by 56), 7.5x smaller than float32."""

    bit_width = 4
