"""Properties of quantizers that a region asks for, with defaults: a quantizer of a user's own has few of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from brevact.quantizers.rounding import Rounding


class _Default:
    """Default of instances alone: `dataclass` would take an attribute of the class as the default of a field."""

    def __init__(self, of: Callable[[Any], Any]) -> None:
        self._of = of

    def __get__(self, quantizer: Any, kind: type) -> Any:
        if quantizer is None:
            raise AttributeError
        return self._of(quantizer)


class Traits:
    """Base of brevact's quantizers; `traits_of` returns it for all others."""

    __slots__ = ()

    #: Whether activations stay unpacked, and only masks and codes of forward quantizers are packed.
    is_exact: bool = False
    #: Whether decoding returns the packed tensor bit for bit.
    is_lossless: bool = False
    #: Whether elements are stored in their own dtype, as sources that others are computed from.
    keeps_elements: bool = False
    #: Whether `with_drawn_size(numel, host_seed)` first draws the bytes of a tensor.
    draws_size: bool = False
    #: Whether norms continue with the stored values of `for_normalized`.
    quantize_forward: bool = False
    #: Quantizer of values that a norm has normalized already, or None.
    for_normalized: Any = None
    #: Quantizer of inputs of smooth functions, or None.
    for_smooth: Any = None
    #: Whether it packs a nonlinear function of elements, see `reference.stretched`.
    is_stretched: bool = False
    #: The quantizer that this one substitutes at more bits, or None.
    nominal: Any = None
    #: Bits per code, on average; 0 if unknown.
    bit_width: Any = _Default(lambda quantizer: 0)
    #: Rounding of a uniform quantizer in place of this one.
    rounding: Any = _Default(lambda quantizer: Rounding.STOCHASTIC if quantizer.is_stochastic else Rounding.NEAREST)
    #: Whether the codes depend on the seed.
    is_stochastic: Any = False


class _TraitsOfOther(Traits):
    def __init__(self, quantizer: Any) -> None:
        names = [name for name in Traits.__annotations__ if hasattr(quantizer, name)]
        vars(self).update({name: getattr(quantizer, name) for name in names})
        self.draws_size = hasattr(quantizer, "with_drawn_size")


def traits_of(quantizer: Any) -> Traits:
    """Return a quantizer of brevact's, or the properties that another one states, and defaults."""
    return quantizer if isinstance(quantizer, Traits) else _TraitsOfOther(quantizer)


def is_quantizer(source: Any) -> bool:
    """Whether an object, which may be of any class, is an `ActivationQuantizer`."""
    quantizes = not isinstance(source, type) and callable(getattr(source, "quantize", None))
    return quantizes and hasattr(source, "is_stochastic")
