"""Sign and magnitude with mixed numbers of levels: the quantizer of the thesis, under its names.

========================================  =====================================================
thesis                                    here
========================================  =====================================================
``OptimizedStochQuantIdentity()``         ``SignMagnitudeBackward``
``use_max=False``                         ``SignMagnitudeL2Backward``
``GlobalStochActQuant``                   ``SignMagnitudeGlobalBackward``
``'2bit_4bit_mix'`` (4 and 6 bits)        ``.let(mix_levels_prob=0.5)``
``'2bit_6bit_mix'`` (4 and 8 bits)        ``.let(mix_levels=64)``
``'3bit_6bit_mix'`` (5 and 8 bits)        ``.let(base_levels=8, mix_levels=64, mix_levels_prob=0.4)``
``'4bit_8bit_mix'`` (6 and 10 bits)       ``.let(base_levels=16, mix_levels=256, mix_levels_prob=0.2)``
========================================  =====================================================

The bits in brackets are those that are stored: n levels, their negatives and 0 take ceil(log2(2 n + 1)). For as much
memory ``StochBackward4bit`` has 16 codes between the minimum and the maximum of a bucket where this has 9, and a
smaller error.

Source: J. Li, master's thesis, Heidelberg University, 2025, listings 5.1, 5.2, 5.5 and 5.6.
"""

from brevact.injectors.class_protocol import Fragment
from brevact.injectors.fragments import BackwardQuantSolver, SaveQuantized, StochasticRounding
from brevact.quantizers.formats.sign_magnitude.quantizer import SignMagnitudeQuantizer

__all__ = [
    "SignMagnitudeBackward",
    "SignMagnitudeGlobalBackward",
    "SignMagnitudeL2Backward",
]


class SignMagnitudeBuckets(Fragment):
    """Levels between minus and plus the scale of each bucket, more of them in some buckets: the thesis' defaults."""

    base_levels = 4
    bucket = 512
    use_max = True
    mix_levels = 16
    mix_levels_prob = 0.3

    quantizer = SignMagnitudeQuantizer


class SignMagnitudeBackward(StochasticRounding, SignMagnitudeBuckets, SaveQuantized, BackwardQuantSolver):
    """4 levels a sign, 16 in 30 % of buckets, stochastic rounding: 4.66 bits an element, 6.9x smaller than float32."""


class SignMagnitudeL2Backward(SignMagnitudeBackward):
    """`SignMagnitudeBackward` in units of each bucket's L2 norm: unbiased as well, and some six times as noisy."""

    use_max = False


class SignMagnitudeGlobalBackward(SignMagnitudeBackward):
    """`SignMagnitudeBackward` with one scale and one draw of the levels a tensor: 4 or 6 bits for all of it."""

    bucket = None
