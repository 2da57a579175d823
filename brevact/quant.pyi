"""The backward quantizers of all formats, like `brevitas.quant` for Brevitas.

    from brevact.quant import StochBackward2bit, WeibullBackward3bit

`brevact` exports each of them, too, and lists those that lead the documentation.
"""

# Written by `python -m scripts.leaf_stub`.

from brevact.injectors.fragments import BackwardQuantSolver as _BackwardQuantizer

class DitherBackward1bit(_BackwardQuantizer):
    """1-bit backward quantizer, dithered rounding: 1.09 bits an element, 29.3x smaller than float32."""

class DitherBackward2bit(_BackwardQuantizer):
    """2-bit backward quantizer, dithered rounding: 2.09 bits an element, 15.3x smaller than float32."""

class DitherBackward3bit(_BackwardQuantizer):
    """3-bit backward quantizer, dithered rounding: 3.09 bits an element, 10.3x smaller than float32."""

class DitherBackward4bit(_BackwardQuantizer):
    """4-bit backward quantizer, dithered rounding: 4.09 bits an element, 7.8x smaller than float32."""

class DitherBackward5bit(_BackwardQuantizer):
    """5-bit backward quantizer, dithered rounding: 5.09 bits an element, 6.3x smaller than float32."""

class DitherBackward6bit(_BackwardQuantizer):
    """6-bit backward quantizer, dithered rounding: 6.09 bits an element, 5.3x smaller than float32."""

class DitherBackward7bit(_BackwardQuantizer):
    """7-bit backward quantizer, dithered rounding: 7.09 bits an element, 4.5x smaller than float32."""

class DitherBackward8bit(_BackwardQuantizer):
    """8-bit backward quantizer, dithered rounding: 8.09 bits an element, 4.0x smaller than float32."""

class NearestBackward1bit(_BackwardQuantizer):
    """1-bit backward quantizer, nearest rounding: 1.09 bits an element, 29.3x smaller than float32."""

class NearestBackward2bit(_BackwardQuantizer):
    """2-bit backward quantizer, nearest rounding: 2.09 bits an element, 15.3x smaller than float32."""

class NearestBackward3bit(_BackwardQuantizer):
    """3-bit backward quantizer, nearest rounding: 3.09 bits an element, 10.3x smaller than float32."""

class NearestBackward4bit(_BackwardQuantizer):
    """4-bit backward quantizer, nearest rounding: 4.09 bits an element, 7.8x smaller than float32."""

class NearestBackward5bit(_BackwardQuantizer):
    """5-bit backward quantizer, nearest rounding: 5.09 bits an element, 6.3x smaller than float32."""

class NearestBackward6bit(_BackwardQuantizer):
    """6-bit backward quantizer, nearest rounding: 6.09 bits an element, 5.3x smaller than float32."""

class NearestBackward7bit(_BackwardQuantizer):
    """7-bit backward quantizer, nearest rounding: 7.09 bits an element, 4.5x smaller than float32."""

class NearestBackward8bit(_BackwardQuantizer):
    """8-bit backward quantizer, nearest rounding: 8.09 bits an element, 4.0x smaller than float32."""

class StochBackward1bit(_BackwardQuantizer):
    """1-bit backward quantizer, stochastic rounding: 1.09 bits an element, 29.3x smaller than float32."""

class StochBackward2bit(_BackwardQuantizer):
    """2-bit backward quantizer, stochastic rounding: 2.09 bits an element, 15.3x smaller than float32."""

class StochBackward3bit(_BackwardQuantizer):
    """3-bit backward quantizer, stochastic rounding: 3.09 bits an element, 10.3x smaller than float32."""

class StochBackward4bit(_BackwardQuantizer):
    """4-bit backward quantizer, stochastic rounding: 4.09 bits an element, 7.8x smaller than float32."""

class StochBackward5bit(_BackwardQuantizer):
    """5-bit backward quantizer, stochastic rounding: 5.09 bits an element, 6.3x smaller than float32."""

class StochBackward6bit(_BackwardQuantizer):
    """6-bit backward quantizer, stochastic rounding: 6.09 bits an element, 5.3x smaller than float32."""

class StochBackward7bit(_BackwardQuantizer):
    """7-bit backward quantizer, stochastic rounding: 7.09 bits an element, 4.5x smaller than float32."""

class StochBackward8bit(_BackwardQuantizer):
    """8-bit backward quantizer, stochastic rounding: 8.09 bits an element, 4.0x smaller than float32."""

class NearestBackward2bit4bitMix(_BackwardQuantizer):
    """2 bits, 4 in 50 % of the buckets, nearest rounding: 3.10 bits an element, 10.3x smaller than float32."""

class NearestBackward2bit6bitMix(_BackwardQuantizer):
    """2 bits, 6 in 30 % of the buckets, nearest rounding: 3.30 bits an element, 9.7x smaller than float32."""

class NearestBackward3bit6bitMix(_BackwardQuantizer):
    """3 bits, 6 in 40 % of the buckets, nearest rounding: 4.30 bits an element, 7.4x smaller than float32."""

class NearestBackward4bit8bitMix(_BackwardQuantizer):
    """4 bits, 8 in 20 % of the buckets, nearest rounding: 4.90 bits an element, 6.5x smaller than float32."""

class StochBackward2bit4bitMix(_BackwardQuantizer):
    """2 bits, 4 in 50 % of the buckets, stochastic rounding: 3.10 bits an element, 10.3x smaller than float32."""

class StochBackward2bit6bitMix(_BackwardQuantizer):
    """2 bits, 6 in 30 % of the buckets, stochastic rounding: 3.30 bits an element, 9.7x smaller than float32."""

class StochBackward3bit6bitMix(_BackwardQuantizer):
    """3 bits, 6 in 40 % of the buckets, stochastic rounding: 4.30 bits an element, 7.4x smaller than float32."""

class StochBackward4bit8bitMix(_BackwardQuantizer):
    """4 bits, 8 in 20 % of the buckets, stochastic rounding: 4.90 bits an element, 6.5x smaller than float32."""

class StochBackward2bitPerSample(_BackwardQuantizer):
    """1 to 8 bits a sample, 2 in the mean, stochastic rounding: 2.09 bits an element, 15.3x smaller than float32."""

class StochBackward4bitPerSample(_BackwardQuantizer):
    """1 to 8 bits a sample, 4 in the mean, stochastic rounding: 4.09 bits an element, 7.8x smaller than float32."""

class WeibullBackward2bit(_BackwardQuantizer):
    """2-bit levels of least variance, stochastic rounding: 2.03 bits an element, 15.8x smaller than float32."""

class WeibullBackward3bit(_BackwardQuantizer):
    """3-bit levels of least variance, stochastic rounding: 3.05 bits an element, 10.5x smaller than float32."""

class WeibullBackward4bit(_BackwardQuantizer):
    """4-bit levels of least variance, stochastic rounding: 4.08 bits an element, 7.8x smaller than float32."""

class DualPrecisionBackward2bit(_BackwardQuantizer):
    """2-bit residuals (maps of 56 by 56), stochastic rounding: 2.26 bits an element, 14.2x smaller than float32."""

class DualPrecisionBackward4bit(_BackwardQuantizer):
    """4-bit residuals (maps of 56 by 56), stochastic rounding: 4.26 bits an element, 7.5x smaller than float32."""

class L2Backward(_BackwardQuantizer):
    """Levels N(x) = +-0.707 and +-1.414, nearest rounding: 2.00 bits an element, 16.0x smaller than float32."""

class StochL2Backward(_BackwardQuantizer):
    """The levels of `L2Backward`, rounded stochastically: unbiased inside the grid."""

class L2ForwardBackward(L2Backward):
    """`L2Backward` that also quantizes the **forward** pass of norm layers."""

class L3Backward(_BackwardQuantizer):
    """Levels N(x) = +-1/2, 1, 2 and 4, nearest rounding: 3.00 bits an element, 10.7x smaller than float32."""

class StochL3Backward(_BackwardQuantizer):
    """The levels of `L3Backward`, rounded stochastically: unbiased inside the grid."""

class L3ForwardBackward(L3Backward):
    """`L3Backward` that also quantizes the **forward** pass of norm layers."""

class L4Backward(_BackwardQuantizer):
    """Levels N(x) = +-1/8, 1/4, ..., 16, nearest rounding: 4.00 bits an element, 8.0x smaller than float32."""

class StochL4Backward(_BackwardQuantizer):
    """The levels of `L4Backward`, rounded stochastically: unbiased inside the grid."""

class L4ForwardBackward(L4Backward):
    """`L4Backward` that also quantizes the **forward** pass of norm layers."""

class L5Backward(_BackwardQuantizer):
    """Levels N(x) = +-1/8, 0.177, ..., 22.6, nearest rounding: 5.00 bits an element, 6.4x smaller than float32."""

class StochL5Backward(_BackwardQuantizer):
    """The levels of `L5Backward`, rounded stochastically: unbiased inside the grid."""

class L5ForwardBackward(L5Backward):
    """`L5Backward` that also quantizes the **forward** pass of norm layers."""

class U4Backward(_BackwardQuantizer):
    """Levels N(x) = +-1/4, 3/4, ..., 15/4, nearest rounding: 4.00 bits an element, 8.0x smaller than float32."""

class StochU4Backward(_BackwardQuantizer):
    """The levels of `U4Backward`, rounded stochastically: unbiased inside the grid."""

class U4ForwardBackward(U4Backward):
    """`U4Backward` that also quantizes the **forward** pass of norm layers."""

class U5Backward(_BackwardQuantizer):
    """Levels N(x) = +-1/6, 3/6, ..., 31/6, nearest rounding: 5.00 bits an element, 6.4x smaller than float32."""

class StochU5Backward(_BackwardQuantizer):
    """The levels of `U5Backward`, rounded stochastically: unbiased inside the grid."""

class U5ForwardBackward(U5Backward):
    """`U5Backward` that also quantizes the **forward** pass of norm layers."""

class U8Backward(_BackwardQuantizer):
    """Levels N(x) = +-1/16, 3/16, ..., 255/16, nearest rounding: 8.00 bits an element, 4.0x smaller than float32."""

class StochU8Backward(_BackwardQuantizer):
    """The levels of `U8Backward`, rounded stochastically: unbiased inside the grid."""

class U8ForwardBackward(U8Backward):
    """`U8Backward` that also quantizes the **forward** pass of norm layers."""

class O4Backward(_BackwardQuantizer):
    """Levels N(x) = +-0.14, 0.47, ..., 5.75, nearest rounding: 4.00 bits an element, 8.0x smaller than float32."""

class StochO4Backward(_BackwardQuantizer):
    """The levels of `O4Backward`, rounded stochastically: unbiased inside the grid."""

class O4ForwardBackward(O4Backward):
    """`O4Backward` that also quantizes the **forward** pass of norm layers."""

class SignMagnitudeBackward(_BackwardQuantizer):
    """4 levels a sign, 16 in 30 % of buckets, stochastic rounding: 4.66 bits an element, 6.9x smaller than float32."""

class SignMagnitudeL2Backward(SignMagnitudeBackward):
    """`SignMagnitudeBackward` in units of each bucket's L2 norm: unbiased as well, and some six times as noisy."""

class SignMagnitudeGlobalBackward(SignMagnitudeBackward):
    """`SignMagnitudeBackward` with one scale and one draw of the levels a tensor: 4 or 6 bits for all of it."""

class LosslessBackward(_BackwardQuantizer):
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
