"""What quantizers on grids have in common: fit metadata to groups, store them with the codes, decode through levels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from brevact.geometry import Geometry, Grid
from brevact.quantizers import passes
from brevact.quantizers.checks import check_input
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation, PackedSpec, Part
from brevact.quantizers.philox import seed_value


class GridQuantizer(ABC):
    """Quantizer whose codes name levels; a format says which metadata groups store, and the levels they give.

    Metadata are rounded to the types they are stored in before codes are computed from them, in plain torch on the
    tensor's device: one number a group. The passes over the elements are those of `passes`.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def is_stochastic(self) -> bool:
        """Whether the codes depend on the seed."""

    @abstractmethod
    def geometry(self, layout: Layout) -> Geometry:
        """Blocks and groups of a tensor."""

    @abstractmethod
    def metadata_parts(self, geometry: Geometry) -> tuple[Part, ...]:
        """What is stored beside the codes."""

    @abstractmethod
    def fit(self, flat: Tensor, geometry: Geometry) -> tuple[Tensor, ...]:
        """Metadata of an (n,) tensor, in the types and sizes of `metadata_parts`."""

    @abstractmethod
    def grid(self, geometry: Geometry, metadata: tuple[Tensor, ...], device: torch.device) -> Grid:
        """The levels that stored metadata stand for."""

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """What is stored for a tensor, known before quantizing.

        Args:
            layout: Layout of the tensor to quantize.

        Returns:
            Codes, then the format's metadata.
        """
        geometry = self.geometry(layout)
        return Part("codes", torch.uint8, geometry.code_bytes), *self.metadata_parts(geometry)

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Quantize and pack a tensor.

        Args:
            x: float32, bfloat16, float16 or float64 tensor of any shape and strides. float64 is rounded to float32
                first.
            seed: Key of the random bits of stochastic rounding: an int, a 0-d int64 tensor, or None to draw one from
                torch's generator. Unused, and not drawn, for nearest.

        Returns:
            The packed activation, on the device of `x`.

        Raises:
            TypeError: If `x` is not a dense floating-point tensor of these types, or `seed` is of another type.
        """
        check_input(x)
        layout = Layout.of(x)
        spec: PackedSpec[GridQuantizer] = PackedSpec.of(self, layout)
        key = seed_value(seed, x.device) if self.is_stochastic else None
        buffer = spec.empty(x)
        if not layout.numel:
            return PackedActivation(spec, buffer)
        codes, *stored = spec.split(buffer)
        with torch.no_grad():
            flat, geometry = layout.flatten(x.detach()), self.geometry(layout)
            metadata = self.fit(flat, geometry)
            for part, values in zip(stored, metadata, strict=True):
                part.copy_(values.reshape(-1))
            passes.quantize_grid(flat, geometry, self.grid(geometry, metadata, x.device), key, codes)
        return PackedActivation(spec, buffer)

    def decode(self, buffer: Tensor, spec: PackedSpec[Any], target: Tensor) -> None:
        """Decode into memory that is dense in the layout's memory order.

        Args:
            buffer: Stored bytes.
            spec: Their spec.
            target: Tensor of the layout's dtype whose memory holds the layout's elements in that order.
        """
        self._decode(buffer, spec, None, target)

    def decode_multiply(self, buffer: Tensor, spec: PackedSpec[Any], other: Tensor, target: Tensor) -> None:
        """Decode, multiply and write to memory that is dense in the layout's memory order.

        Args:
            buffer: Stored bytes.
            spec: Their spec.
            other: Factor of the layout's dtype, dense in the layout's memory order.
            target: Tensor of the layout's dtype, dense in that order; may be `other`.
        """
        self._decode(buffer, spec, other, target)

    def _decode(self, buffer: Tensor, spec: PackedSpec[Any], other: Tensor | None, target: Tensor) -> None:
        if not spec.layout.numel:
            return
        with torch.no_grad():
            codes, *metadata = spec.split(buffer)
            geometry = self.geometry(spec.layout)
            grid = self.grid(geometry, tuple(metadata), buffer.device)
            passes.dequantize_grid(codes, geometry, grid, other, target)
