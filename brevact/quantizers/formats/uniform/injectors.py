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

from brevact.injectors.class_protocol import Fragment, InjectorClass
from brevact.injectors.fragments import (
    BackwardQuantSolver,
    DitheredRounding,
    NearestRounding,
    SaveQuantized,
    StochasticRounding,
    leaf,
)
from brevact.quantizers.formats.uniform.quantizer import Granularity, UniformQuantizer


class Buckets(Fragment):
    """Groups of 512 elements that share a bfloat16 scale and a float32 minimum."""

    bucket_size = 512
    granularity = Granularity.BUCKET
    scale_dtype = torch.bfloat16
    minimum_dtype = torch.float32


class UniformBuckets(Buckets):
    """Evenly spaced codes between the minimum and the maximum of each bucket."""

    channel_dim = 1

    quantizer = UniformQuantizer


#: The first word of a leaf's name, and how it rounds.
_ROUNDINGS = {"Dither": DitheredRounding, "Nearest": NearestRounding, "Stoch": StochasticRounding}


def _leaf(word: str, bit_width: int) -> InjectorClass:
    rounding = _ROUNDINGS[word]
    bits = bit_width + (16 + 32) / 512
    return leaf(
        __name__,
        f"{word}Backward{bit_width}bit",
        (rounding, UniformBuckets, SaveQuantized, BackwardQuantSolver),
        f"{bit_width}-bit backward quantizer, {rounding.rounding.value} rounding: {bits:.2f} bits an element, "
        f"{32 / bits:.1f}x smaller than float32.",
        bit_width=bit_width,
    )


_LEAVES = {each.__name__: each for each in (_leaf(word, n) for word in _ROUNDINGS for n in range(1, 9))}
globals().update(_LEAVES)
__all__ = list(_LEAVES)
