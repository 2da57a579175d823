"""The backward quantizers of all formats.

A format has a fragment with its default settings; ``_leaf`` composes the rest. Each class here is exported by
``brevact.quant``. The quantizers in ``brevact.quantizers.formats`` document formulas, bytes and sources.
"""

from __future__ import annotations

from typing import Any

import torch
from dependencies import value

from brevact.autograd.region.settings import DEFAULT_RECOMPUTE
from brevact.injectors.class_protocol import Fragment, InjectorClass
from brevact.injectors.fragments import (
    BackwardQuantSolver,
    DitheredRounding,
    NearestRounding,
    SaveQuantized,
    StochasticRounding,
)
from brevact.injectors.injector_type import BackwardInjectorType
from brevact.quantizers import (
    DualPrecisionQuantizer,
    ElementsQuantizer,
    Granularity,
    LosslessQuantizer,
    MixedQuantizer,
    NormalizedFormat,
    NormalizedQuantizer,
    SampleQuantizer,
    SignMagnitudeQuantizer,
    UniformQuantizer,
    WeibullQuantizer,
)

_ROUNDINGS = {"Dither": DitheredRounding, "Nearest": NearestRounding, "Stoch": StochasticRounding}


def _leaf(name: str, bases: tuple[InjectorClass, ...], doc: str, bits: float | None = None, **settings: Any) -> Any:
    """Make the backward quantizer that a class statement here would make; the docstring ends with its size."""
    size = "" if bits is None else f": {bits:.2f} bits an element, {32 / bits:.1f}x smaller than float32."
    solved = bases if issubclass(bases[0], BackwardQuantSolver) else (*bases, SaveQuantized, BackwardQuantSolver)
    body = {"__module__": __name__, "__qualname__": name, "__doc__": doc + size, **settings}
    globals()[name] = found = BackwardInjectorType(name, solved, body)
    return found


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


for _word, _rounding in _ROUNDINGS.items():
    for _bits in range(1, 9):
        _doc = f"{_bits}-bit backward quantizer, {_rounding.rounding.value} rounding"
        _leaf(f"{_word}Backward{_bits}bit", (_rounding, UniformBuckets), _doc, _bits + 48 / 512, bit_width=_bits)


class MixedBuckets(Buckets):
    """Evenly spaced codes in each bucket, of ``mix_bit_width`` with probability ``mix_prob``."""

    quantizer = MixedQuantizer


for _word in ("Nearest", "Stoch"):
    for _low, _high, _share in ((2, 4, 0.5), (2, 6, 0.3), (3, 6, 0.4), (4, 8, 0.2)):
        _rounding = _ROUNDINGS[_word]
        _leaf(
            f"{_word}Backward{_low}bit{_high}bitMix",
            (_rounding, MixedBuckets),
            f"{_low} bits, {_high} in {_share * 100:.0f} % of the buckets, {_rounding.rounding.value} rounding",
            _low + _share * (_high - _low) + 0.096,
            bit_width=_low,
            mix_bit_width=_high,
            mix_prob=_share,
        )


class SampleBuckets(Fragment):
    """Evenly spaced codes between the minimum and the maximum of each bucket, of the width of its sample.

    ``bit_width=`` may be any number from 1 to 8, 1.5 say.
    """

    bucket_size = 512

    @value
    def quantizer(bit_width, rounding, bucket_size):
        return SampleQuantizer(bit_width=bit_width, rounding=rounding, bucket_size=bucket_size)


for _bits in (2, 4):
    _doc = f"1 to 8 bits a sample, {_bits} in the mean, stochastic rounding"
    _name = f"StochBackward{_bits}bitPerSample"
    _leaf(_name, (StochasticRounding, SampleBuckets), _doc, _bits + 0.0942, bit_width=_bits)


class WeibullLevels(Fragment):
    """Levels of least variance in buckets of 4096 elements, which store them with their minimum and maximum."""

    bucket_size = 4096

    quantizer = WeibullQuantizer


for _bits, _size in ((2, 2.03), (3, 3.05), (4, 4.08)):
    _doc = f"{_bits}-bit levels of least variance, stochastic rounding"
    _leaf(f"WeibullBackward{_bits}bit", (StochasticRounding, WeibullLevels), _doc, _size, bit_width=_bits)


class DualPrecisionMaps(Fragment):
    """Means of blocks of 8 elements along each axis of a map, and evenly spaced codes for the residual of each map."""

    block = 8

    quantizer = DualPrecisionQuantizer


for _bits in (2, 4):
    _doc = f"{_bits}-bit residuals (maps of 56 by 56), stochastic rounding"
    _name = f"DualPrecisionBackward{_bits}bit"
    _leaf(_name, (StochasticRounding, DualPrecisionMaps), _doc, _bits + 0.26, bit_width=_bits)


class NormalizedLevels(Fragment):
    """Levels of ``format`` around each channel's mean, in units of its deviation.

    A function that is checkpointed inside ``with brevact.backward_quant(...)`` is recomputed outside the block, where
    its norms are not quantized: give such models ``quantize_forward`` by a policy or by ``act_quant=``, which
    recomputation keeps.
    """

    channel_dim = 1
    quantize_forward = False

    quantizer = NormalizedQuantizer


for _format, _levels in {
    NormalizedFormat.L2: "+-0.707 and +-1.414",
    NormalizedFormat.L3: "+-1/2, 1, 2 and 4",
    NormalizedFormat.L4: "+-1/8, 1/4, ..., 16",
    NormalizedFormat.L5: "+-1/8, 0.177, ..., 22.6",
    NormalizedFormat.U4: "+-1/4, 3/4, ..., 15/4",
    NormalizedFormat.U5: "+-1/6, 3/6, ..., 31/6",
    NormalizedFormat.U8: "+-1/16, 3/16, ..., 255/16",
    NormalizedFormat.O4: "+-0.14, 0.47, ..., 5.75",
}.items():
    _name, _doc = f"{_format.name}Backward", f"Levels N(x) = {_levels}, nearest rounding"
    _nearest = _leaf(_name, (NearestRounding, NormalizedLevels), _doc, _format.bit_width, format=_format)
    _doc = f"The levels of `{_name}`, rounded stochastically: unbiased inside the grid."
    _leaf(f"Stoch{_name}", (StochasticRounding, NormalizedLevels), _doc, format=_format)
    _doc = f"`{_name}` that also quantizes the **forward** pass of norm layers."
    _leaf(f"{_format.name}ForwardBackward", (_nearest,), _doc, quantize_forward=True)


class SignMagnitudeBuckets(Fragment):
    """Levels between minus and plus the scale of each bucket, more of them in some buckets: the thesis' defaults.

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
    """

    base_levels = 4
    bucket = 512
    use_max = True
    mix_levels = 16
    mix_levels_prob = 0.3

    quantizer = SignMagnitudeQuantizer


_doc = "4 levels a sign, 16 in 30 % of buckets, stochastic rounding"
_signs = _leaf("SignMagnitudeBackward", (StochasticRounding, SignMagnitudeBuckets), _doc, 4.66)
_doc = "`SignMagnitudeBackward` in units of each bucket's L2 norm: unbiased as well, and some six times as noisy."
_leaf("SignMagnitudeL2Backward", (_signs,), _doc, use_max=False)
_doc = "`SignMagnitudeBackward` with one scale and one draw of the levels a tensor: 4 or 6 bits for all of it."
_leaf("SignMagnitudeGlobalBackward", (_signs,), _doc, bucket=None)


class ExactValues(Fragment):
    """Store activations as they are."""

    residual_bit_width = 32
    recompute = DEFAULT_RECOMPUTE

    @value
    def quantizer(recompute):
        return ElementsQuantizer() if recompute else LosslessQuantizer()


class LosslessBackward(ExactValues, SaveQuantized, BackwardQuantSolver):
    """Pack only exact values, masks and the integers of forward quantizers; all else stays at full precision.

    Gradients equal those without backward quantization, to the last bit. A forward quantizer with a learned scale saves
    its input; with ``residual_bit_width=2`` it saves the rounding residual in 2 bits instead, unbiased: gradients of
    scales get noise, all others stay equal.

    With ``recompute=1024``, backward recomputes layers of up to 1,024 multiplications an element, and the norms and
    functions after them, from the activations that are stored. This takes a few times fewer bytes; gradients then
    differ in the order of sums, no longer equal to the last bit.

    >>> import torch
    >>> LosslessBackward.backward_settings.is_exact
    True
    """


__all__ = [
    name
    for name, each in globals().items()
    if isinstance(each, BackwardInjectorType) and each.__module__ == __name__ and not name.startswith("_")
]
