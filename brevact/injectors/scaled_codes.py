"""How codes and scales of a Brevitas quantizer are stored and decoded: pure data, without the quantizer itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.injectors.codes import IntegerCodes, MinifloatCodes
from brevact.quantizers import Layout, PackedActivation, PackedSpec, Part, pack_codes, unpack_codes
from brevact.quantizers.geometry import DEFAULT_BLOCK, packed_bytes

_POWER_BIAS = 127
_NAN_BYTE = 255


@dataclass(frozen=True, kw_only=True)
class Floats:
    """Scales or zero points in the type that they were computed in.

    Args:
        shape: their shape, which broadcasts against the (grouped) tensor.
        dtype: their type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of what is stored."""
        return self.dtype

    def write(self, values: Tensor) -> Tensor:
        """Return what is stored."""
        return values

    def read(self, stored: Tensor) -> Tensor:
        """Return the values."""
        return stored


@dataclass(frozen=True, kw_only=True)
class PowersOfTwo(Floats):
    """Powers of two from 2^-126 to 2^127 in one byte each.

    Byte e stands for 2^(e - 127), byte 255 for NaN, and byte 0 for ``smallest``, the bound that Brevitas puts on
    scales, which is none.

    Args:
        smallest: what is no power of two.
    """

    smallest: float

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of what is stored."""
        return torch.uint8

    def write(self, values: Tensor) -> Tensor:
        """Return the bytes."""
        exponents = values.to(torch.float64).log2().round_().clamp_(1 - _POWER_BIAS, _POWER_BIAS).add_(_POWER_BIAS)
        exponents = exponents.masked_fill_(values <= self.smallest, 0)
        return exponents.masked_fill_(values.isnan(), _NAN_BYTE).to(torch.uint8)

    def read(self, stored: Tensor) -> Tensor:
        """Return the values."""
        values = (stored.to(torch.int32) << 23).view(torch.float32).to(self.dtype)  # a byte is float32's exponent field
        return values.masked_fill_(stored == 0, self.smallest).masked_fill_(stored == _NAN_BYTE, math.nan)


@dataclass(frozen=True, kw_only=True)
class Bytes(Floats):
    """Integers of at most 8 bits in one byte each.

    Args:
        minimum: the smallest of them.
    """

    minimum: int

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of what is stored."""
        return torch.uint8

    def write(self, values: Tensor) -> Tensor:
        """Return the bytes."""
        return IntegerCodes(bit_width=8, minimum=self.minimum).encode(values)

    def read(self, stored: Tensor) -> Tensor:
        """Return the values."""
        return IntegerCodes(bit_width=8, minimum=self.minimum).decode(stored, self.dtype)


@dataclass(frozen=True, kw_only=True)
class ScaledCodes:
    """Decoder of (code - zero_point) * scale, computed as Brevitas computes it: in the same types and order.

    Bytes: codes in the block format of `PackedActivation`, in memory order, without the padding of the last group;
    then scales and zero points, in the order of their shape. A scale of NaN marks what held NaN or an infinity; all
    that it scales decodes to NaN.

    Args:
        codes: what the codes stand for.
        dtype: type in which Brevitas holds code values.
        scale: how scales are stored.
        zero_point: how zero points are stored; None where they are zero.
        group: dimension and size of the groups along it that share a scale; None without groups.
    """

    codes: IntegerCodes | MinifloatCodes
    dtype: torch.dtype
    scale: Floats
    zero_point: Floats | None = None
    group: tuple[int, int] | None = None

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """What is stored for a tensor of this layout, codes first."""
        found = [Part("codes", torch.uint8, packed_bytes(layout.numel, self.codes.bit_width, DEFAULT_BLOCK))]
        for name, kind in (("scale", self.scale), ("zero_point", self.zero_point)):
            if kind is not None:
                found.append(Part(name, kind.stored_dtype, math.prod(kind.shape)))
        return tuple(found)

    def pack(self, values: Tensor, scale: Tensor, zero_point: Tensor | None, layout: Layout) -> PackedActivation:
        """Pack code values and what scales them.

        Args:
            values: what codes stand for, as Brevitas lays it out: grouped, if there are groups.
            scale: of shape ``self.scale.shape``.
            zero_point: of shape ``self.zero_point.shape``, or None.
            layout: of the activation.

        Returns:
            The packed activation.
        """
        codes = in_memory_order(ungrouped(self.codes.encode(values), self.group, layout.shape), layout)
        spec: PackedSpec[ScaledCodes] = PackedSpec.of(self, layout)
        buffer = spec.empty(codes)
        stored = [pack_codes(codes, self.codes.bit_width), self.scale.write(scale)]
        if self.zero_point is not None and zero_point is not None:
            stored.append(self.zero_point.write(zero_point))
        for part, content in zip(spec.split(buffer), stored, strict=True):
            part.copy_(content.reshape(-1))
        return PackedActivation(spec, buffer)

    def decode(self, buffer: Tensor, spec: PackedSpec[ScaledCodes], target: Tensor) -> None:
        """Decode into memory that is dense in the layout's memory order.

        Args:
            buffer: stored bytes.
            spec: their spec.
            target: tensor of the layout's dtype whose memory holds the layout's elements in that order.
        """
        layout = spec.layout
        if not layout.numel:
            return
        packed, stored_scale, *stored_zero_point = spec.split(buffer)
        codes = layout.restore(unpack_codes(packed, self.codes.bit_width, layout.numel))
        values = self.codes.decode(grouped(codes, self.group), self.dtype)
        if self.zero_point is not None:
            values = values - self.zero_point.read(stored_zero_point[0]).view(self.zero_point.shape)
        values = values * self.scale.read(stored_scale).view(self.scale.shape)
        values = ungrouped(values, self.group, layout.shape)
        target.as_strided((layout.numel,), (1,)).copy_(in_memory_order(values, layout))

    def decode_multiply(self, buffer: Tensor, spec: PackedSpec[ScaledCodes], other: Tensor, target: Tensor) -> None:
        """Decode, multiply and write to memory that is dense in the layout's memory order.

        Args:
            buffer: stored bytes.
            spec: their spec.
            other: factor of the layout's dtype, dense in the layout's memory order.
            target: tensor of the layout's dtype, dense in that order; may be ``other``.
        """
        decoded = torch.empty_like(target)
        self.decode(buffer, spec, decoded)
        flat = (spec.layout.numel,), (1,)
        torch.mul(decoded.as_strided(*flat), other.as_strided(*flat), out=target.as_strided(*flat))


def grouped(x: Tensor, group: tuple[int, int] | None) -> Tensor:
    """Split a dimension into groups, the last one filled up with zeros, as Brevitas does.

    Args:
        x: tensor of any shape; a scalar stands for a vector of one element.
        group: dimension and group size; None for no groups.

    Returns:
        Tensor with a dimension of groups and one of their elements in place of the one.
    """
    x = x if x.dim() else x.reshape(1)
    if group is None:
        return x
    dim, size = group[0] % x.dim(), group[1]
    missing = -x.shape[dim] % size
    if missing:
        shape = list(x.shape)
        shape[dim] = missing
        x = torch.cat((x, x.new_zeros(shape)), dim)
    return x.unflatten(dim, (-1, size))


def ungrouped(x: Tensor, group: tuple[int, int] | None, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `grouped`: drop the filling.

    Args:
        x: grouped tensor.
        group: dimension and group size; None for no groups.
        shape: of the tensor that was grouped.

    Returns:
        Tensor of that shape.
    """
    if group is None or not shape:
        return x.reshape(-1)[0] if not shape else x
    dim = group[0] % len(shape)
    return x.flatten(dim, dim + 1).narrow(dim, 0, shape[dim])


def in_memory_order(x: Tensor, layout: Layout) -> Tensor:
    """The elements of a tensor of a layout's shape, in the layout's memory order, whatever its own strides.

    Args:
        x: tensor of the layout's shape; along expanded dimensions of the layout its first element counts.
        layout: the order.

    Returns:
        (layout.numel,) tensor.
    """
    if not layout.numel:
        return x.reshape(-1)[:0]
    kept = sorted(layout.dims)
    x = x[tuple(slice(None) if dim in kept else 0 for dim in range(x.dim()))]
    return x.permute([kept.index(dim) for dim in layout.dims]).reshape(-1)
