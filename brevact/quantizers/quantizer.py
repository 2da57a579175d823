"""Base of quantizers of all formats: checks, seed, memory, and the two ways of decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from brevact.geometry import Geometry, Grid
from brevact.quantizers import kernel_ops
from brevact.quantizers.checks import check_input
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import ActivationQuantizer, PackedActivation, PackedSpec, Part
from brevact.quantizers.reference import by_groups, seed_value
from brevact.quantizers.rounding import Rounding
from brevact.quantizers.traits import Traits


class Quantizer(Traits, ABC):
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
            grid = self.grid(geometry, metadata, flat.device)
            kernel_ops.quantize_grid(_to_levels(flat, geometry, grid), geometry, grid, seed, codes)

    def decode(self, buffer: Tensor, spec: PackedSpec[Any], target: Tensor, other: Tensor | None = None) -> None:
        if not spec.layout.numel:
            return
        with torch.no_grad():
            codes, *metadata = spec.split(buffer)
            geometry = self.geometry(spec.layout)
            grid = self.grid(geometry, tuple(metadata), buffer.device)
            if grid.offset is None and grid.scale is None:
                kernel_ops.dequantize_grid(codes, geometry, grid, other, target)
                return
            values = torch.empty(geometry.numel, dtype=torch.float32, device=target.device)
            kernel_ops.dequantize_grid(codes, geometry, grid, None, values)
            _from_levels(values, geometry, grid)
            limit = min(torch.finfo(target.dtype).max, torch.finfo(torch.float32).max)
            values, flat = values.clamp_(-limit, limit).to(target.dtype), kernel_ops.flat_memory(target, geometry.numel)
            flat.copy_(values if other is None else values.mul_(kernel_ops.flat_memory(other, geometry.numel)))


def _to_levels(flat: Tensor, geometry: Geometry, grid: Grid) -> Tensor:
    """z = (x - offset) / |scale|, finite, below the last level in flagged groups; NaN for elements that are marked."""
    if grid.offset is None and grid.scale is None:
        return flat
    z, most = flat.to(torch.float32, copy=True), torch.finfo(torch.float32).max
    for _, part, offset, inverse in by_groups(z, geometry, grid.offset, grid.inverse):
        if offset is not None:
            part.sub_(offset)
        if inverse is not None:
            ceiling = torch.where(torch.signbit(inverse), grid.levels[0, -2], most)
            torch.minimum(part.mul_(inverse.abs()), ceiling, out=part)
    z.clamp_(-most, most)
    return z.masked_fill_(~flat.isfinite(), torch.nan) if grid.marks else z


def _from_levels(values: Tensor, geometry: Geometry, grid: Grid) -> None:
    """x = offset + |scale| * level in place; NaN for the last level of flagged groups."""
    for _, part, offset, scale in by_groups(values, geometry, grid.offset, grid.scale):
        if scale is not None:
            part.masked_fill_((part == grid.levels[0, -1]) & torch.signbit(scale), torch.nan).mul_(scale.abs())
        if offset is not None:
            part.add_(offset)
