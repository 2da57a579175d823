"""Backward quantizers with fixed levels of normalized values: N(x) = (x - mean) / deviation of each channel.

``<format>Backward`` rounds by the format's own formula, ``Stoch<format>Backward`` picks one of the two neighbouring
levels so that the expectation is exact inside the grid. A batch, layer, group or instance norm stores codes alone: its
mean and deviation are kept anyway. Elsewhere each channel stores its mean and deviation, in float32.

``<format>ForwardBackward`` **changes the forward pass** of norm layers: their affine step reads the quantized N(x), in
training and in eval mode, so that what is stored is what the forward pass used. All other layers, and all layers under
the other quantizers here, compute their outputs as ever. ``quantize_forward=True`` says the same.

A function that is checkpointed inside ``with brevact.backward_quant(...)`` is recomputed outside the block, where its
norms are not quantized: give such models these quantizers by a policy or by ``act_quant=``, which recomputation keeps.
With stochastic rounding the outputs of norms are random, in eval mode too.

Source: B. Graham, Low-precision batch-normalized activations, arXiv:1702.08231, table 1. Differs: sign(0) is +1.
"""

from brevitas.inject import value

from brevact.injectors.class_protocol import Fragment
from brevact.injectors.fragments import BackwardQuantSolver, NearestRounding, SaveQuantized, StochasticRounding
from brevact.quantizers.formats.normalized.quantizer import NormalizedFormat, NormalizedQuantizer

__all__ = [
    "L2Backward",
    "L2ForwardBackward",
    "L3Backward",
    "L3ForwardBackward",
    "L4Backward",
    "L4ForwardBackward",
    "L5Backward",
    "L5ForwardBackward",
    "O4Backward",
    "O4ForwardBackward",
    "StochL2Backward",
    "StochL3Backward",
    "StochL4Backward",
    "StochL5Backward",
    "StochO4Backward",
    "StochU4Backward",
    "StochU5Backward",
    "StochU8Backward",
    "U4Backward",
    "U4ForwardBackward",
    "U5Backward",
    "U5ForwardBackward",
    "U8Backward",
    "U8ForwardBackward",
]


class NormalizedLevels(Fragment):
    """Levels of ``format`` around each channel's mean, in units of its deviation."""

    channel_dim = 1
    quantize_forward = False

    @value
    def quantizer(format, rounding, channel_dim, quantize_forward):
        return NormalizedQuantizer(
            format=format, rounding=rounding, channel_dim=channel_dim, quantize_forward=quantize_forward
        )


class L2Backward(NearestRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """Levels N(x) = +-0.707 and +-1.414, nearest rounding: 2.00 bits an element, 16.0x smaller than float32."""

    format = NormalizedFormat.L2


class StochL2Backward(StochasticRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """The levels of `L2Backward`, rounded stochastically: unbiased inside the grid."""

    format = NormalizedFormat.L2


class L2ForwardBackward(L2Backward):
    """`L2Backward` that also quantizes the **forward** pass of norm layers."""

    quantize_forward = True


class L3Backward(NearestRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """Levels N(x) = +-1/2, 1, 2 and 4, nearest rounding: 3.00 bits an element, 10.7x smaller than float32."""

    format = NormalizedFormat.L3


class StochL3Backward(StochasticRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """The levels of `L3Backward`, rounded stochastically: unbiased inside the grid."""

    format = NormalizedFormat.L3


class L3ForwardBackward(L3Backward):
    """`L3Backward` that also quantizes the **forward** pass of norm layers."""

    quantize_forward = True


class L4Backward(NearestRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """Levels N(x) = +-1/8, 1/4, ..., 16, nearest rounding: 4.00 bits an element, 8.0x smaller than float32."""

    format = NormalizedFormat.L4


class StochL4Backward(StochasticRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """The levels of `L4Backward`, rounded stochastically: unbiased inside the grid."""

    format = NormalizedFormat.L4


class L4ForwardBackward(L4Backward):
    """`L4Backward` that also quantizes the **forward** pass of norm layers."""

    quantize_forward = True


class L5Backward(NearestRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """Levels N(x) = +-1/8, 0.177, ..., 22.6, nearest rounding: 5.00 bits an element, 6.4x smaller than float32."""

    format = NormalizedFormat.L5


class StochL5Backward(StochasticRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """The levels of `L5Backward`, rounded stochastically: unbiased inside the grid."""

    format = NormalizedFormat.L5


class L5ForwardBackward(L5Backward):
    """`L5Backward` that also quantizes the **forward** pass of norm layers."""

    quantize_forward = True


class U4Backward(NearestRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """Levels N(x) = +-1/4, 3/4, ..., 15/4, nearest rounding: 4.00 bits an element, 8.0x smaller than float32."""

    format = NormalizedFormat.U4


class StochU4Backward(StochasticRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """The levels of `U4Backward`, rounded stochastically: unbiased inside the grid."""

    format = NormalizedFormat.U4


class U4ForwardBackward(U4Backward):
    """`U4Backward` that also quantizes the **forward** pass of norm layers."""

    quantize_forward = True


class U5Backward(NearestRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """Levels N(x) = +-1/6, 3/6, ..., 31/6, nearest rounding: 5.00 bits an element, 6.4x smaller than float32."""

    format = NormalizedFormat.U5


class StochU5Backward(StochasticRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """The levels of `U5Backward`, rounded stochastically: unbiased inside the grid."""

    format = NormalizedFormat.U5


class U5ForwardBackward(U5Backward):
    """`U5Backward` that also quantizes the **forward** pass of norm layers."""

    quantize_forward = True


class U8Backward(NearestRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """Levels N(x) = +-1/16, 3/16, ..., 255/16, nearest rounding: 8.00 bits an element, 4.0x smaller than float32."""

    format = NormalizedFormat.U8


class StochU8Backward(StochasticRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """The levels of `U8Backward`, rounded stochastically: unbiased inside the grid."""

    format = NormalizedFormat.U8


class U8ForwardBackward(U8Backward):
    """`U8Backward` that also quantizes the **forward** pass of norm layers."""

    quantize_forward = True


class O4Backward(NearestRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """Levels N(x) = +-0.14, 0.47, ..., 5.75, nearest rounding: 4.00 bits an element, 8.0x smaller than float32."""

    format = NormalizedFormat.O4


class StochO4Backward(StochasticRounding, NormalizedLevels, SaveQuantized, BackwardQuantSolver):
    """The levels of `O4Backward`, rounded stochastically: unbiased inside the grid."""

    format = NormalizedFormat.O4


class O4ForwardBackward(O4Backward):
    """`O4Backward` that also quantizes the **forward** pass of norm layers."""

    quantize_forward = True
