"""Fragments that backward quantizers are composed from, and the solver that turns them into settings.

A backward quantizer is a class of data in Brevitas' dialect, the solver last::

    class StochBackward2bit(StochasticRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
        bit_width = 2

``UniformBuckets`` is a fragment of the format, which its folder in ``brevact/quantizers/formats`` has. A new format is
such a fragment with a ``quantizer`` of its own; the names that this ``@value`` function takes are its settings.
Where names follow a pattern, ``leaf`` makes the classes in a loop, and ``brevact/quant.pyi`` declares them.
"""

from __future__ import annotations

from typing import Any

from brevitas.inject import value

from brevact.autograd import BackwardSettings, SaveMode
from brevact.autograd.settings import (
    DEFAULT_DERIVE_MIN_BITS,
    DEFAULT_MIN_NUMEL,
    DEFAULT_RECOMPUTE,
    DEFAULT_RESIDUAL_BIT_WIDTH,
    DEFAULT_SCORE_BIT_WIDTH,
)
from brevact.injectors.class_protocol import Fragment, InjectorClass
from brevact.injectors.injector_type import BackwardInjectorType
from brevact.injectors.slot import build_slot_proxy
from brevact.quantizers.rounding import Rounding


class NearestRounding(Fragment):
    """Round to the nearest code, half to even: the smallest error, but a biased one."""

    rounding = Rounding.NEAREST


class StochasticRounding(Fragment):
    """Round up with the probability of the remainder: unbiased, so that the noise averages out over steps."""

    rounding = Rounding.STOCHASTIC


class DitheredRounding(Fragment):
    """Round to the nearest code of a grid that is shifted at random: unbiased, with half of stochastic's variance."""

    rounding = Rounding.DITHERED


class SaveQuantized(Fragment):
    """Store packed codes from the forward pass on; tensors below ``min_numel`` elements stay as they are.

    Where a forward quantizer has a learned scale, what it rounds away is stored in ``residual_bit_width`` bits. Tensors
    that are smooth functions of one that is packed in at least ``derive_min_bits`` bits are derived from it; 0 derives
    nothing. Query and key of attention take at least ``score_bit_width`` bits. With ``double_backward`` gradients may
    be differentiated again (``create_graph=True``). Layers of which an element costs at most ``recompute``
    multiplications and additions are recomputed in place of storing their output.
    """

    save_mode = SaveMode.SAVE_QUANTIZED
    min_numel = DEFAULT_MIN_NUMEL
    residual_bit_width = DEFAULT_RESIDUAL_BIT_WIDTH
    derive_min_bits = DEFAULT_DERIVE_MIN_BITS
    score_bit_width = DEFAULT_SCORE_BIT_WIDTH
    double_backward = False
    recompute = DEFAULT_RECOMPUTE


class BackwardQuantSolver(Fragment, metaclass=BackwardInjectorType):
    """Resolves a backward quantizer into ``backward_settings``; the last of the classes it inherits from.

    ``proxy_class`` is what Brevitas calls to fill a layer's activation slot. ``forward_quant`` puts a forward
    activation quantizer into the same slot; its own settings take the prefix ``forward_``.
    """

    proxy_class = build_slot_proxy
    forward_quant = None

    @value
    def backward_settings(
        quantizer,
        save_mode,
        min_numel,
        residual_bit_width,
        derive_min_bits,
        score_bit_width,
        recompute,
        double_backward,
    ):
        numbers = residual_bit_width, derive_min_bits, score_bit_width, recompute
        return BackwardSettings(quantizer, save_mode, min_numel, *numbers, double_backward=double_backward)


def leaf(module: str, name: str, bases: tuple[InjectorClass, ...], doc: str, **settings: Any) -> InjectorClass:
    """Return the backward quantizer that a class statement makes in a module.

    Args:
        module: ``__name__`` of the module, which binds the class to its name: pickle looks it up there.
        name: name of the class.
        bases: fragments, the solver last; or a leaf.
        doc: docstring.
        **settings: the body of the class.
    """
    return BackwardInjectorType(name, bases, {"__module__": module, "__qualname__": name, "__doc__": doc, **settings})
