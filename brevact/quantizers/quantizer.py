"""Base of quantizers of all formats: checks, seed, memory, and the two ways of decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from brevact.quantizers.checks import check_input
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import ActivationQuantizer, PackedActivation, PackedSpec, Part
from brevact.quantizers.philox import seed_value
from brevact.quantizers.rounding import Rounding


class Quantizer(ABC):
    """Quantizer that writes the bytes of a tensor, whose number follows from the tensor's layout.

    A format is a frozen dataclass with a field `rounding`, or an `is_stochastic` of its own. It says which arrays it
    stores (`parts`), writes them (`encode`) and reads them (`decode`).
    """

    __slots__ = ()

    rounding: Rounding

    @property
    def is_stochastic(self) -> bool:
        """Whether the codes depend on the seed."""
        return self.rounding is not Rounding.NEAREST

    @abstractmethod
    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """Stored parts of a tensor of this layout, known before quantizing: codes first."""

    @abstractmethod
    def encode(self, dense: Tensor, spec: PackedSpec[Any], seed: int | Tensor | None, buffer: Tensor) -> None:
        """Write the bytes of a tensor that is not empty.

        `dense` has any shape; its memory holds the layout's elements densely, in memory order. The seed is a signed
        64-bit int or a 0-d int64 tensor, None for nearest. The buffer is uninitialised but for padding between parts.
        """

    @abstractmethod
    def decode(self, buffer: Tensor, spec: PackedSpec[Any], target: Tensor, other: Tensor | None = None) -> None:
        """Decode, and multiply by `other` unless that is None.

        `target` and `other`, which may be `target`, are of the layout's dtype and hold its elements in memory order.
        The caller may overwrite the target afterwards.
        """

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Quantize and pack a float32, bfloat16, float16 or float64 tensor of any shape and strides; float64 is rounded
        first.

        The seed is the key of the random bits of stochastic rounding: an int, a 0-d int64 tensor, or None to draw one
        from torch's generator. It is unused, and not drawn, for nearest.

        Raises: TypeError: If `x` is not a dense floating-point tensor of these types, or `seed` is of another type.
        """
        check_input(x)
        layout = Layout.of(x)
        spec = PackedSpec.of(self, layout)
        buffer = spec.empty(x)
        key = seed_value(seed, x.device) if self.is_stochastic else None
        if layout.numel:
            dense = x if layout.is_dense and not x.is_neg() else layout.flatten(x.detach())
            self.encode(dense, spec, key, buffer)
        return PackedActivation(spec, buffer)

    def decode_multiply(self, buffer: Tensor, spec: PackedSpec[Any], other: Tensor, target: Tensor) -> None:
        self.decode(buffer, spec, target, other)


def quantize(quantizer: ActivationQuantizer, x: Tensor, seed: int | Tensor | None) -> PackedActivation:
    """Quantize a tensor by any activation quantizer.

    Raises:
        TypeError: If the quantizer returns something else than a `PackedActivation`.
    """
    packed = quantizer.quantize(x, seed)
    if not isinstance(packed, PackedActivation):
        raise TypeError(
            f"quantizer: {type(quantizer).__name__}.quantize returned a {type(packed).__name__}; accepted is a "
            "brevact.quantizers.PackedActivation; return PackedActivation(PackedSpec.of(self, Layout.of(x)), buffer)"
        )
    return packed
