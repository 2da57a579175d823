"""A bit width a sample: those to whose noise the gradient is most sensitive have more bits, of one budget.

``StochBackward<N>bitPerSample`` stores N bits a code in the mean over the samples of a batch, and 1 to 8 bits for each
of them. ``bit_width=`` may be any number from 1 to 8, 1.5 say.

Source: ActNN, arXiv:2104.14129, sections 4.2 and 4.3. Differs: see `SampleQuantizer`.
"""

from dependencies import value

from brevact.injectors.class_protocol import Fragment
from brevact.injectors.fragments import BackwardQuantSolver, SaveQuantized, StochasticRounding
from brevact.quantizers.formats.per_sample.quantizer import SampleQuantizer

__all__ = [
    "StochBackward2bitPerSample",
    "StochBackward4bitPerSample",
]


class SampleBuckets(Fragment):
    """Evenly spaced codes between the minimum and the maximum of each bucket, of the width of its sample."""

    bucket_size = 512

    @value
    def quantizer(bit_width, rounding, bucket_size):
        return SampleQuantizer(bit_width=bit_width, rounding=rounding, bucket_size=bucket_size)


class StochBackward2bitPerSample(StochasticRounding, SampleBuckets, SaveQuantized, BackwardQuantSolver):
    """1 to 8 bits a sample, 2 in the mean, stochastic rounding: 2.09 bits an element, 15.3x smaller than float32."""

    bit_width = 2


class StochBackward4bitPerSample(StochasticRounding, SampleBuckets, SaveQuantized, BackwardQuantSolver):
    """1 to 8 bits a sample, 4 in the mean, stochastic rounding: 4.09 bits an element, 7.8x smaller than float32."""

    bit_width = 4
