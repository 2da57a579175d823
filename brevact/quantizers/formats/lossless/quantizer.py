"""No quantization: what a policy stands for that packs only what is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from brevact.quantizers.formats.uniform.quantizer import UniformQuantizer
from brevact.quantizers.packed import PackedActivation

_EXACT = UniformQuantizer(bit_width=32)


@dataclass(frozen=True)
class LosslessQuantizer:
    """Stores a tensor as it is: a region keeps the tensor itself, by itself it makes a copy.

    >>> import torch
    >>> x = torch.rand(8)
    >>> torch.equal(LosslessQuantizer().quantize(x).dequantize(), x)
    True
    """

    is_exact: ClassVar[bool] = True

    @property
    def is_stochastic(self) -> bool:
        """Never: there is no rounding."""
        return False

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Copy a tensor.

        Args:
            x: Floating-point tensor of any shape and strides.
            seed: Unused.

        Returns:
            Its bytes.
        """
        return _EXACT.quantize(x)
