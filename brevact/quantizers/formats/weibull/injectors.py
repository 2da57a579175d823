"""Backward quantizers for long-tailed values: levels of least variance under fitted Weibull distributions.

``WeibullBackward<N>bit`` rounds stochastically, which makes the decoded activation unbiased, between levels that lie
close together where a bucket of 4096 elements has most of its values; its minimum and maximum are levels. Of the same
width, its noise has less variance than that of ``StochBackward<N>bit`` on all but evenly spread values, the less the
longer the tails. Where an element is 0, zero is a level as well.

Source: TinyScript (Fu et al., ICML 2020). Differs: see `WeibullQuantizer`.
"""

from brevact.injectors.class_protocol import Fragment
from brevact.injectors.fragments import BackwardQuantSolver, SaveQuantized, StochasticRounding
from brevact.quantizers.formats.weibull.quantizer import WeibullQuantizer

__all__ = [
    "WeibullBackward2bit",
    "WeibullBackward3bit",
    "WeibullBackward4bit",
]


class WeibullLevels(Fragment):
    """Levels of least variance in buckets of 4096 elements, which store them with their minimum and maximum."""

    bucket_size = 4096

    quantizer = WeibullQuantizer


class WeibullBackward2bit(StochasticRounding, WeibullLevels, SaveQuantized, BackwardQuantSolver):
    """2-bit levels of least variance, stochastic rounding: 2.03 bits an element, 15.8x smaller than float32."""

    bit_width = 2


class WeibullBackward3bit(StochasticRounding, WeibullLevels, SaveQuantized, BackwardQuantSolver):
    """3-bit levels of least variance, stochastic rounding: 3.05 bits an element, 10.5x smaller than float32."""

    bit_width = 3


class WeibullBackward4bit(StochasticRounding, WeibullLevels, SaveQuantized, BackwardQuantSolver):
    """4-bit levels of least variance, stochastic rounding: 4.08 bits an element, 7.8x smaller than float32."""

    bit_width = 4
