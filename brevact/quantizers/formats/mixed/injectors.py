"""Mixing of two widths: a bucket of 512 elements is stored at the higher one with a probability.

``<rounding>Backward<N>bit<M>bitMix`` stores N bits a code, and M in a fraction of the buckets, drawn for each tensor:
stored bytes follow, b + 0.096 bits an element for the average width b. ``mix_prob=``, ``mix_bit_width=`` and
``bit_width=`` make any other mixture; ``granularity="tensor"`` draws one width a tensor.

Source: J. Li, master's thesis, Heidelberg University, 2025, section 5.7.
"""

from brevitas.inject import value

from brevact.injectors.fragments import BackwardQuantSolver, NearestRounding, SaveQuantized, StochasticRounding
from brevact.quantizers.formats.mixed.quantizer import MixedQuantizer
from brevact.quantizers.formats.uniform.injectors import Buckets

__all__ = [
    "NearestBackward2bit4bitMix",
    "NearestBackward2bit6bitMix",
    "NearestBackward3bit6bitMix",
    "NearestBackward4bit8bitMix",
    "StochBackward2bit4bitMix",
    "StochBackward2bit6bitMix",
    "StochBackward3bit6bitMix",
    "StochBackward4bit8bitMix",
]


class MixedBuckets(Buckets):
    """Evenly spaced codes in each bucket, of ``mix_bit_width`` with probability ``mix_prob``."""

    @value
    def quantizer(bit_width, mix_bit_width, mix_prob, rounding, bucket_size, granularity, scale_dtype, minimum_dtype):
        return MixedQuantizer(
            bit_width=bit_width,
            mix_bit_width=mix_bit_width,
            mix_prob=mix_prob,
            rounding=rounding,
            bucket_size=bucket_size,
            granularity=granularity,
            scale_dtype=scale_dtype,
            minimum_dtype=minimum_dtype,
        )


class NearestBackward2bit4bitMix(NearestRounding, MixedBuckets, SaveQuantized, BackwardQuantSolver):
    """2 bits, 4 in 50 % of the buckets, nearest rounding: 3.10 bits an element, 10.3x smaller than float32."""

    bit_width = 2
    mix_bit_width = 4
    mix_prob = 0.5


class NearestBackward2bit6bitMix(NearestRounding, MixedBuckets, SaveQuantized, BackwardQuantSolver):
    """2 bits, 6 in 30 % of the buckets, nearest rounding: 3.30 bits an element, 9.7x smaller than float32."""

    bit_width = 2
    mix_bit_width = 6
    mix_prob = 0.3


class NearestBackward3bit6bitMix(NearestRounding, MixedBuckets, SaveQuantized, BackwardQuantSolver):
    """3 bits, 6 in 40 % of the buckets, nearest rounding: 4.30 bits an element, 7.4x smaller than float32."""

    bit_width = 3
    mix_bit_width = 6
    mix_prob = 0.4


class NearestBackward4bit8bitMix(NearestRounding, MixedBuckets, SaveQuantized, BackwardQuantSolver):
    """4 bits, 8 in 20 % of the buckets, nearest rounding: 4.90 bits an element, 6.5x smaller than float32."""

    bit_width = 4
    mix_bit_width = 8
    mix_prob = 0.2


class StochBackward2bit4bitMix(StochasticRounding, MixedBuckets, SaveQuantized, BackwardQuantSolver):
    """2 bits, 4 in 50 % of the buckets, stochastic rounding: 3.10 bits an element, 10.3x smaller than float32."""

    bit_width = 2
    mix_bit_width = 4
    mix_prob = 0.5


class StochBackward2bit6bitMix(StochasticRounding, MixedBuckets, SaveQuantized, BackwardQuantSolver):
    """2 bits, 6 in 30 % of the buckets, stochastic rounding: 3.30 bits an element, 9.7x smaller than float32."""

    bit_width = 2
    mix_bit_width = 6
    mix_prob = 0.3


class StochBackward3bit6bitMix(StochasticRounding, MixedBuckets, SaveQuantized, BackwardQuantSolver):
    """3 bits, 6 in 40 % of the buckets, stochastic rounding: 4.30 bits an element, 7.4x smaller than float32."""

    bit_width = 3
    mix_bit_width = 6
    mix_prob = 0.4


class StochBackward4bit8bitMix(StochasticRounding, MixedBuckets, SaveQuantized, BackwardQuantSolver):
    """4 bits, 8 in 20 % of the buckets, stochastic rounding: 4.90 bits an element, 6.5x smaller than float32."""

    bit_width = 4
    mix_bit_width = 8
    mix_prob = 0.2
