"""Mixing of two widths: a bucket of 512 elements is stored at the higher one with a probability.

``<rounding>Backward<N>bit<M>bitMix`` stores N bits a code, and M in a fraction of the buckets, drawn for each tensor:
stored bytes follow, b + 0.096 bits an element for the average width b. ``mix_prob=``, ``mix_bit_width=`` and
``bit_width=`` make any other mixture; ``granularity="tensor"`` draws one width a tensor.

Source: J. Li, master's thesis, Heidelberg University, 2025, section 5.7.
"""

from brevact.injectors.class_protocol import InjectorClass
from brevact.injectors.fragments import BackwardQuantSolver, NearestRounding, SaveQuantized, StochasticRounding, leaf
from brevact.quantizers.formats.mixed.quantizer import MixedQuantizer
from brevact.quantizers.formats.uniform.injectors import Buckets


class MixedBuckets(Buckets):
    """Evenly spaced codes in each bucket, of ``mix_bit_width`` with probability ``mix_prob``."""

    quantizer = MixedQuantizer


#: The first word of a leaf's name, and how it rounds.
_ROUNDINGS = {"Nearest": NearestRounding, "Stoch": StochasticRounding}
#: The lower width, the higher one, and its probability.
_MIXTURES = ((2, 4, 0.5), (2, 6, 0.3), (3, 6, 0.4), (4, 8, 0.2))


def _leaf(word: str, low: int, high: int, mix_prob: float) -> InjectorClass:
    rounding = _ROUNDINGS[word]
    bits = low + mix_prob * (high - low) + 0.096
    return leaf(
        __name__,
        f"{word}Backward{low}bit{high}bitMix",
        (rounding, MixedBuckets, SaveQuantized, BackwardQuantSolver),
        f"{low} bits, {high} in {mix_prob:.0%} of the buckets, {rounding.rounding.value} rounding: "
        f"{bits:.2f} bits an element, {32 / bits:.1f}x smaller than float32.".replace("%", " %"),
        bit_width=low,
        mix_bit_width=high,
        mix_prob=mix_prob,
    )


_LEAVES = {each.__name__: each for each in (_leaf(word, *mixture) for word in _ROUNDINGS for mixture in _MIXTURES)}
globals().update(_LEAVES)
__all__ = list(_LEAVES)
