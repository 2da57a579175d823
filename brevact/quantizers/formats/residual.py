"""Residuals of a rounding to integers, and where the integer was clipped: a few bits per element."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.geometry import Geometry, Grid
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_int
from brevact.quantizers.layout import Layout
from brevact.quantizers.quantizer import GridQuantizer


@dataclass(frozen=True, kw_only=True)
class ResidualQuantizer(GridQuantizer):
    """Stochastic rounding on fixed levels: one that marks clipped elements, the others evenly from `low` to `high`.

    2^bit_width - 1 levels between `low` and `high`, rounded up with the probability of the remainder, which keeps the
    mean of the decoded residual; code 0 stands for `clipped`, a value below them. No metadata are stored,
    and no code is left for NaN, which is stored as `high`: the integers, kept elsewhere, know of it.

    >>> q = ResidualQuantizer(bit_width=2)
    >>> x = torch.tensor([-0.5, q.clipped, 0.5, 0.0])
    >>> packed = q.quantize(x, seed=0)
    >>> packed.nbytes, packed.dequantize()
    (2, tensor([-0.5000, -1.5000,  0.5000,  0.0000]))

    Args:
        bit_width: Bits an element, 2 to 8.
        low: Smallest residual.
        high: Largest residual.

    Raises:
        ValueError: If bit_width or the bounds are not accepted.
    """

    bit_width: int = 2
    low: float = -0.5
    high: float = 0.5

    def __post_init__(self) -> None:
        check_int("bit_width", self.bit_width, 2, 8)
        if not self.low < self.high:
            raise ValueError(f"low: got {brief(self.low)} with high={brief(self.high)}; it must be less than high")

    @property
    def is_stochastic(self) -> bool:
        return True

    @property
    def clipped(self) -> float:
        """The value that marks an element whose integer was clipped."""
        return self.low - 1.0

    def geometry(self, layout: Layout) -> Geometry:
        return Geometry.of_buckets(layout.numel, self.bit_width, None)

    def grid(self, geometry: Geometry, metadata: tuple[Tensor, ...], device: torch.device) -> Grid:
        return Grid(_levels(self.bit_width, self.low, self.high, device), marks=True)

    def rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Levels, (1, 2^b), and inverse gaps between them, (1, 2^b - 1)."""
        return _rows(self.bit_width, self.low, self.high, device)


@functools.lru_cache(maxsize=64)
def _levels(bit_width: int, low: float, high: float, device: torch.device) -> Tensor:
    count = 2**bit_width - 1
    values = [low - 1.0, *(low + (high - low) * i / (count - 1) for i in range(count))]
    with torch.inference_mode(False):
        return torch.tensor([values], dtype=torch.float32, device="cpu").to(device)


@functools.lru_cache(maxsize=64)
def _rows(bit_width: int, low: float, high: float, device: torch.device) -> tuple[Tensor, Tensor]:
    levels = _levels(bit_width, low, high, device)
    with torch.inference_mode(False):
        return levels, Grid(levels).steps(stochastic=True).contiguous()
