"""Backward quantizers with fixed levels of normalized values: N(x) = (x - mean) / deviation of each channel.

``<format>Backward`` rounds by the format's own formula, ``Stoch<format>Backward`` picks one of the two neighbouring
levels so that the expectation is exact inside the grid. A batch, layer, group or instance norm stores codes alone: its
mean and deviation are kept anyway. Elsewhere each channel stores its mean and deviation, in float32.

``<format>ForwardBackward`` **changes the forward pass** of norm layers: their affine step reads the quantized N(x), in
training and in eval mode, so that the stored values are those of the forward pass. All other layers, and all layers
under the other quantizers here, compute their outputs as ever. ``quantize_forward=True`` says the same.

A function that is checkpointed inside ``with brevact.backward_quant(...)`` is recomputed outside the block, where its
norms are not quantized: give such models these quantizers by a policy or by ``act_quant=``, which recomputation keeps.
With stochastic rounding the outputs of norms are random, in eval mode too.

Source: B. Graham, Low-precision batch-normalized activations, arXiv:1702.08231, table 1. Differs: sign(0) is +1.
"""

from collections.abc import Iterator

from brevact.injectors.class_protocol import Fragment, InjectorClass
from brevact.injectors.fragments import BackwardQuantSolver, NearestRounding, SaveQuantized, StochasticRounding, leaf
from brevact.quantizers.formats.normalized.quantizer import NormalizedFormat, NormalizedQuantizer


class NormalizedLevels(Fragment):
    """Levels of ``format`` around each channel's mean, in units of its deviation."""

    channel_dim = 1
    quantize_forward = False

    quantizer = NormalizedQuantizer


#: The levels of each format, in words.
_LEVELS = {
    NormalizedFormat.L2: "+-0.707 and +-1.414",
    NormalizedFormat.L3: "+-1/2, 1, 2 and 4",
    NormalizedFormat.L4: "+-1/8, 1/4, ..., 16",
    NormalizedFormat.L5: "+-1/8, 0.177, ..., 22.6",
    NormalizedFormat.U4: "+-1/4, 3/4, ..., 15/4",
    NormalizedFormat.U5: "+-1/6, 3/6, ..., 31/6",
    NormalizedFormat.U8: "+-1/16, 3/16, ..., 255/16",
    NormalizedFormat.O4: "+-0.14, 0.47, ..., 5.75",
}


def _leaves(format: NormalizedFormat, levels: str) -> Iterator[InjectorClass]:
    """The format by its own rounding, the same unbiased, and the same in the forward pass of norms as well."""
    name, bits = format.name, format.bit_width
    parts = (NormalizedLevels, SaveQuantized, BackwardQuantSolver)
    size = f"{bits:.2f} bits an element, {32 / bits:.1f}x smaller than float32"
    text = f"Levels N(x) = {levels}, nearest rounding: {size}."
    nearest = leaf(__name__, f"{name}Backward", (NearestRounding, *parts), text, format=format)
    text = f"The levels of `{name}Backward`, rounded stochastically: unbiased inside the grid."
    yield nearest
    yield leaf(__name__, f"Stoch{name}Backward", (StochasticRounding, *parts), text, format=format)
    text = f"`{name}Backward` that also quantizes the **forward** pass of norm layers."
    yield leaf(__name__, f"{name}ForwardBackward", (nearest,), text, quantize_forward=True)


_LEAVES = {each.__name__: each for format, levels in _LEVELS.items() for each in _leaves(format, levels)}
globals().update(_LEAVES)
__all__ = list(_LEAVES)
