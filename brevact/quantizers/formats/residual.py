"""Residuals of a rounding to integers, and where the integer was clipped: a few bits per element."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from brevact.geometry import Geometry, Grid
from brevact.quantizers.checks import check_int
from brevact.quantizers.layout import Layout
from brevact.quantizers.quantizer import GridQuantizer


@dataclass(frozen=True, kw_only=True)
class ResidualQuantizer(GridQuantizer):
    """Stochastic rounding on fixed levels: one that marks clipped elements, the others evenly from -1/2 to 1/2.

    2^bit_width - 1 levels, rounded up with the probability of the remainder, which keeps the mean of the decoded
    residual; code 0 stands for `clipped`, a value below them. No metadata are stored, and no code is left for NaN,
    which is stored as 1/2: the integers, kept elsewhere, know of it.

    >>> q = ResidualQuantizer(bit_width=2)
    >>> x = torch.tensor([-0.5, q.clipped, 0.5, 0.0])
    >>> packed = q.quantize(x, seed=0)
    >>> packed.nbytes, packed.dequantize()
    (2, tensor([-0.5000, -1.5000,  0.5000,  0.0000]))

    Args:
        bit_width: Bits an element, 2 to 8.

    Raises:
        ValueError: If bit_width is not accepted.
    """

    bit_width: int = 2

    clipped: ClassVar[float] = -1.5
    """The value that marks an element whose integer was clipped."""

    def __post_init__(self) -> None:
        check_int("bit_width", self.bit_width, 2, 8)

    @property
    def is_stochastic(self) -> bool:
        return True

    def geometry(self, layout: Layout) -> Geometry:
        return Geometry.of_buckets(layout.numel, self.bit_width, None)

    def grid(self, geometry: Geometry, metadata: tuple[Tensor, ...], device: torch.device) -> Grid:
        return Grid(self.rows(device)[0], marks=True)

    def rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Levels, (1, 2^b), and inverse gaps between them, (1, 2^b - 1)."""
        return _rows(self.bit_width, device)


@functools.lru_cache(maxsize=64)
def _rows(bit_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    most = 2**bit_width - 2
    values = [ResidualQuantizer.clipped, *(-0.5 + i / most for i in range(most + 1))]
    with torch.inference_mode(False):
        levels = torch.tensor([values], dtype=torch.float32, device="cpu").to(device)
        return levels, Grid(levels).steps(stochastic=True).contiguous()
