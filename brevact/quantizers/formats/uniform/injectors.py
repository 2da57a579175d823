"""Uniform backward quantizers: evenly spaced codes in buckets of 512 elements, 1 to 8 bits wide.

``NearestBackward<N>bit`` rounds to the nearest code, half to even. ``StochBackward<N>bit`` rounds up with the
probability of the remainder, which makes the decoded activation, and every gradient that is linear in it, unbiased.
``DitherBackward<N>bit`` rounds to the nearest code of a grid that each bucket shifts by a random part of a step: as
unbiased, at half the variance. A bucket stores a bfloat16 scale and a float32 minimum beside its codes: N + 0.094 bits
an element. Decoding is off by at most half a step for nearest and dithered rounding, by less than one for stochastic.

>>> StochBackward2bit.quantizer.quantize(torch.rand(4096)).nbytes  # 16384 bytes in float32
1072

Source: ActNN, arXiv:2104.14129. Differs: the scale and the minimum are rounded to their stored dtype before codes are
computed from them, so that encoder and decoder agree.
"""

import torch
from brevitas.inject import value

from brevact.injectors.class_protocol import Fragment
from brevact.injectors.fragments import (
    BackwardQuantSolver,
    DitheredRounding,
    NearestRounding,
    SaveQuantized,
    StochasticRounding,
)
from brevact.quantizers.formats.uniform.quantizer import Granularity, UniformQuantizer

__all__ = [
    "DitherBackward1bit",
    "DitherBackward2bit",
    "DitherBackward3bit",
    "DitherBackward4bit",
    "DitherBackward5bit",
    "DitherBackward6bit",
    "DitherBackward7bit",
    "DitherBackward8bit",
    "NearestBackward1bit",
    "NearestBackward2bit",
    "NearestBackward3bit",
    "NearestBackward4bit",
    "NearestBackward5bit",
    "NearestBackward6bit",
    "NearestBackward7bit",
    "NearestBackward8bit",
    "StochBackward1bit",
    "StochBackward2bit",
    "StochBackward3bit",
    "StochBackward4bit",
    "StochBackward5bit",
    "StochBackward6bit",
    "StochBackward7bit",
    "StochBackward8bit",
]


class Buckets(Fragment):
    """Groups of 512 elements that share a bfloat16 scale and a float32 minimum."""

    bucket_size = 512
    granularity = Granularity.BUCKET
    scale_dtype = torch.bfloat16
    minimum_dtype = torch.float32


class UniformBuckets(Buckets):
    """Evenly spaced codes between the minimum and the maximum of each bucket."""

    channel_dim = 1

    @value
    def quantizer(bit_width, rounding, bucket_size, granularity, channel_dim, scale_dtype, minimum_dtype):
        return UniformQuantizer(
            bit_width=bit_width,
            rounding=rounding,
            bucket_size=bucket_size,
            granularity=granularity,
            channel_dim=channel_dim,
            scale_dtype=scale_dtype,
            minimum_dtype=minimum_dtype,
        )


class NearestBackward1bit(NearestRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """1-bit backward quantizer, nearest rounding: 1.09 bits an element, 29.3x smaller than float32."""

    bit_width = 1


class NearestBackward2bit(NearestRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """2-bit backward quantizer, nearest rounding: 2.09 bits an element, 15.3x smaller than float32."""

    bit_width = 2


class NearestBackward3bit(NearestRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """3-bit backward quantizer, nearest rounding: 3.09 bits an element, 10.3x smaller than float32."""

    bit_width = 3


class NearestBackward4bit(NearestRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """4-bit backward quantizer, nearest rounding: 4.09 bits an element, 7.8x smaller than float32."""

    bit_width = 4


class NearestBackward5bit(NearestRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """5-bit backward quantizer, nearest rounding: 5.09 bits an element, 6.3x smaller than float32."""

    bit_width = 5


class NearestBackward6bit(NearestRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """6-bit backward quantizer, nearest rounding: 6.09 bits an element, 5.3x smaller than float32."""

    bit_width = 6


class NearestBackward7bit(NearestRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """7-bit backward quantizer, nearest rounding: 7.09 bits an element, 4.5x smaller than float32."""

    bit_width = 7


class NearestBackward8bit(NearestRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """8-bit backward quantizer, nearest rounding: 8.09 bits an element, 4.0x smaller than float32."""

    bit_width = 8


class StochBackward1bit(StochasticRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """1-bit backward quantizer, stochastic rounding: 1.09 bits an element, 29.3x smaller than float32."""

    bit_width = 1


class StochBackward2bit(StochasticRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """2-bit backward quantizer, stochastic rounding: 2.09 bits an element, 15.3x smaller than float32."""

    bit_width = 2


class StochBackward3bit(StochasticRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """3-bit backward quantizer, stochastic rounding: 3.09 bits an element, 10.3x smaller than float32."""

    bit_width = 3


class StochBackward4bit(StochasticRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """4-bit backward quantizer, stochastic rounding: 4.09 bits an element, 7.8x smaller than float32."""

    bit_width = 4


class StochBackward5bit(StochasticRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """5-bit backward quantizer, stochastic rounding: 5.09 bits an element, 6.3x smaller than float32."""

    bit_width = 5


class StochBackward6bit(StochasticRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """6-bit backward quantizer, stochastic rounding: 6.09 bits an element, 5.3x smaller than float32."""

    bit_width = 6


class StochBackward7bit(StochasticRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """7-bit backward quantizer, stochastic rounding: 7.09 bits an element, 4.5x smaller than float32."""

    bit_width = 7


class StochBackward8bit(StochasticRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """8-bit backward quantizer, stochastic rounding: 8.09 bits an element, 4.0x smaller than float32."""

    bit_width = 8


class DitherBackward1bit(DitheredRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """1-bit backward quantizer, dithered rounding: 1.09 bits an element, 29.3x smaller than float32."""

    bit_width = 1


class DitherBackward2bit(DitheredRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """2-bit backward quantizer, dithered rounding: 2.09 bits an element, 15.3x smaller than float32."""

    bit_width = 2


class DitherBackward3bit(DitheredRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """3-bit backward quantizer, dithered rounding: 3.09 bits an element, 10.3x smaller than float32."""

    bit_width = 3


class DitherBackward4bit(DitheredRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """4-bit backward quantizer, dithered rounding: 4.09 bits an element, 7.8x smaller than float32."""

    bit_width = 4


class DitherBackward5bit(DitheredRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """5-bit backward quantizer, dithered rounding: 5.09 bits an element, 6.3x smaller than float32."""

    bit_width = 5


class DitherBackward6bit(DitheredRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """6-bit backward quantizer, dithered rounding: 6.09 bits an element, 5.3x smaller than float32."""

    bit_width = 6


class DitherBackward7bit(DitheredRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """7-bit backward quantizer, dithered rounding: 7.09 bits an element, 4.5x smaller than float32."""

    bit_width = 7


class DitherBackward8bit(DitheredRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """8-bit backward quantizer, dithered rounding: 8.09 bits an element, 4.0x smaller than float32."""

    bit_width = 8
