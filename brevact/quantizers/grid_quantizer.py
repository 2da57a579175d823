"""Base of quantizers on grids: fit metadata to groups, store them with the codes, decode through levels."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from brevact.geometry import Geometry, Grid
from brevact.quantizers import kernel_ops
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedSpec, Part
from brevact.quantizers.quantizer import Quantizer


class GridQuantizer(Quantizer):
    """Quantizer whose codes name levels; a format says which metadata groups store, and the levels they give.

    Metadata are rounded to the types they are stored in before codes are computed from them, in plain torch on the
    tensor's device: one number a group. The ops on the elements are those of `kernel_ops`.
    """

    __slots__ = ()

    @abstractmethod
    def geometry(self, layout: Layout) -> Geometry:
        """Blocks and groups of a tensor."""

    def metadata_parts(self, geometry: Geometry) -> tuple[Part, ...]:
        """Metadata beside the codes; none where levels are fixed."""
        return ()

    def fit(self, flat: Tensor, geometry: Geometry) -> tuple[Tensor, ...]:
        """Metadata of an (n,) tensor, in the types and sizes of `metadata_parts`."""
        return ()

    @abstractmethod
    def grid(self, geometry: Geometry, metadata: tuple[Tensor, ...], device: torch.device) -> Grid:
        """The levels that stored metadata encode."""

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        geometry = self.geometry(layout)
        return Part("codes", torch.uint8, geometry.code_bytes), *self.metadata_parts(geometry)

    def encode(self, dense: Tensor, spec: PackedSpec[Any], seed: int | Tensor | None, buffer: Tensor) -> None:
        codes, *stored = spec.split(buffer)
        with torch.no_grad():
            flat, geometry = kernel_ops.flat_memory(dense.detach(), spec.layout.numel), self.geometry(spec.layout)
            metadata = self.fit(flat, geometry)
            for part, values in zip(stored, metadata, strict=True):
                part.copy_(values.reshape(-1))
            kernel_ops.quantize_grid(flat, geometry, self.grid(geometry, metadata, flat.device), seed, codes)

    def decode(self, buffer: Tensor, spec: PackedSpec[Any], target: Tensor, other: Tensor | None = None) -> None:
        if not spec.layout.numel:
            return
        with torch.no_grad():
            codes, *metadata = spec.split(buffer)
            geometry = self.geometry(spec.layout)
            grid = self.grid(geometry, tuple(metadata), buffer.device)
            kernel_ops.dequantize_grid(codes, geometry, grid, other, target)
