"""An activation's saved form: tensors for autograd to save, and the decoder that reads them in backward.

The decoder is a small object without tensors, so that every tensor goes through ``ctx.save_for_backward``: a node then
frees its tensors as soon as it has run, and hooks around the region (``save_on_cpu``, checkpoint) see them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from brevact.autograd import storage_report
from brevact.autograd.settings import BackwardSettings, bits_of, nominal_quantizer
from brevact.quantizers import PointFunction

if TYPE_CHECKING:
    from brevact.autograd.regions import Region as Keeper  # which imports the handlers that it calls
else:
    Keeper = Any


class Quality(NamedTuple):
    """Accuracy of a derived tensor: that of its worst source.

    ``quantizer`` is the packed source's, or None if all sources are lossless. ``is_curved``: a nonlinear function of a
    packed source lies on the way. ``cost`` is in multiplications and additions per output element of the most
    expensive layer that is recomputed on the way; 0 if there is none.
    """

    quantizer: Any = None
    is_curved: bool = False
    cost: int = 0

    @property
    def is_exact(self) -> bool:
        return self.quantizer is None

    def serves(self, settings: BackwardSettings, *, bends: bool = False) -> bool:
        """Return whether a reader, which may be nonlinear (``bends``), can use the tensor in place of a packed one."""
        if self.cost > settings.recompute:
            return False
        if self.quantizer is None:
            return True
        reader, is_curved = settings.quantizer, bends or self.is_curved
        if self.quantizer is reader:  # of most chains
            return settings.derives and (not is_curved or settings.derives_curved)
        if not settings.derives or (is_curved and bits_of(self.quantizer) < settings.derive_min_bits):
            return False
        if nominal_quantizer(self.quantizer) == nominal_quantizer(reader):
            return True
        is_fine = bits_of(self.quantizer) >= bits_of(reader) > 0
        return is_fine and (bool(self.quantizer.is_stochastic) or not reader.is_stochastic)

    def with_other(self, other: Quality) -> Quality:
        is_curved, cost = self.is_curved or other.is_curved, max(self.cost, other.cost)
        if self.quantizer is None or other.quantizer is None:
            return Quality(self.quantizer or other.quantizer, is_curved, cost)
        coarser = min(self.quantizer, other.quantizer, key=lambda q: (bits_of(q), not q.is_stochastic))
        return Quality(coarser, is_curved, cost)


#: Quality of a tensor that is saved losslessly.
EXACT = Quality()


P = ParamSpec("P")
R = TypeVar("R")

NO_DOUBLE_BACKWARD = (
    "double backward (create_graph=True) through an op with backward-quantized activations needs a setting, "
    "double_backward=True: brevact.quantize_backward(model, double_backward=True), "
    "brevact.backward_quant(double_backward=True), StochBackward4bit.let(double_backward=True), "
    "brevact.fit(model, batches, loss, ..., double_backward=True). Or run the part of the model that needs second "
    "derivatives at full precision (a policy rule with None, brevact.restore_backward(model), or outside "
    "brevact.backward_quant)"
)


class Decoder:
    """Decodes saved tensors to an activation. Base class, whose defaults describe a lossless decoder."""

    __slots__ = ()

    #: The decoded tensor's quality, for ops that derive other tensors from it.
    quality: Quality = EXACT
    #: Whether the next training step finds this same object, so that tables may be keyed by it.
    lasts: bool = False
    #: Whether the decoded tensor has a graph, or needs none, so that a second derivative is torch's.
    allows_double_backward: bool = False
    #: Number of layers that are recomputed, one after the other, to decode the tensor.
    depth: int = 0
    #: Number of those behind the last sum with a tensor that fewer layers, or none, compute.
    layers_without_sum: int = 0
    #: Whether the decoded tensor is held though its next reader comes much later.
    lingers: bool = False
    #: Number of a norm's statistics at the end of the saved tensors.
    statistics: int = 0
    #: Whether :meth:`decode_through` applies the function while it decodes.
    decodes_through: bool = False
    #: How the activation is saved, for a report.
    how = storage_report.EXACT

    @property
    def nbytes(self) -> int:
        found: int = math.prod(self.shape) * self.dtype.itemsize  # type: ignore[attr-defined]
        return found

    def input_of(self, tensors: tuple[Tensor, ...]) -> Saved | None:
        """Return the saved form of a recomputed layer's or norm's input; None for other decoders."""
        return None

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        raise NotImplementedError

    def decode_as(self, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return the activation in the type that its reader computes in, such as autocast's."""
        return self.decode(tensors).to(dtype)

    def multiply(self, tensors: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        return grad * self.decode(tensors)

    def decode_through(
        self, tensors: tuple[Tensor, ...], function: PointFunction, grad: Tensor | None = None
    ) -> Tensor:
        values = function(self.decode(tensors))
        return values if grad is None else grad * values

    def is_read_again(self, tensors: tuple[Tensor, ...]) -> bool:
        """Return whether :meth:`decode` may return memory that others read."""
        return True

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return self.how, self.nbytes


def _passed_on(name: str) -> Any:
    return property(operator.attrgetter(f"decoder.{name}"))


@dataclass(frozen=True, slots=True)
class PassesOn(Decoder):
    """Base of decoders that return another decoder's tensor in another shape, without computing anything."""

    decoder: Decoder
    quality, lasts, depth = map(_passed_on, ("quality", "lasts", "depth"))
    layers_without_sum, allows_double_backward = map(_passed_on, ("layers_without_sum", "allows_double_backward"))

    def is_read_again(self, tensors: tuple[Tensor, ...]) -> bool:
        return self.decoder.is_read_again(tensors)

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return self.decoder.described(tensors)


#: The saved form of a tensor: tensors for autograd to save, and the decoder that reads them.
Saved = tuple[tuple[Tensor, ...], Decoder]


def one_object_each(make: Callable[P, R]) -> Callable[P, R]:
    """Make a function return the same object for equal arguments, so that a training step reuses the last one's.

    Equal arguments have the same types: two kinds of NamedTuple with the same items differ.
    """
    cached: Any = functools.lru_cache(maxsize=4096, typed=True)(make)
    return cast("Callable[P, R]", cached)
