"""How a Brevitas quantizer's codes are stored and decoded: pure data, without the quantizer itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.geometry import DEFAULT_BLOCK, packed_bytes
from brevact.injectors.number_codes import IntegerCodes, MinifloatCodes
from brevact.injectors.stored_scales import Floats
from brevact.quantizers import Layout, PackedActivation, PackedSpec, Part, pack_codes, unpack_codes


@dataclass(frozen=True, kw_only=True)
class ScaledCodes:
    """Decoder of (code - zero_point) * scale, computed as in Brevitas: in the same types and order.

    Bytes: codes in the block format of `PackedActivation`, in memory order, without the padding of the last group; then
    scales and zero points, in the order of their shape. Non-finite elements have NaN's code. If every code is a number,
    the elements that share the scale give one up, flagged by their scale: negated, or one of the unused powers of two.

    Args:
        codes: values of the codes.
        dtype: Brevitas' type of code values.
        scale: how scales are stored.
        zero_point: how zero points are stored; None if they are zero.
        group: dimension, and size of the groups along it that share a scale; None without groups.
    """

    codes: IntegerCodes | MinifloatCodes
    dtype: torch.dtype
    scale: Floats
    zero_point: Floats | None = None
    group: tuple[int, int] | None = None

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """Parts stored for a tensor of this layout, codes first."""
        found = [Part("codes", torch.uint8, packed_bytes(layout.numel, self.codes.bit_width, DEFAULT_BLOCK))]
        for name, kind in (("scale", self.scale), ("zero_point", self.zero_point)):
            if kind is not None:
                found.append(Part(name, kind.stored_dtype, math.prod(kind.shape)))
        return tuple(found)

    def pack(
        self,
        values: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        layout: Layout,
        missing: Tensor,
        flagged: Tensor | None,
    ) -> PackedActivation:
        """Pack code values and their scales.

        Values, and the mask ``missing`` of non-finite elements, have Brevitas' layout, grouped if there are groups.
        Scales of flagged groups, which give up a code, are those of ``self.scale.of_flagged``; ``flagged`` is None if a
        code is spare.
        """
        codes = self.codes.encode(values)
        if flagged is not None:
            codes = torch.where(flagged, self.codes.without_nan_code(codes), codes)
        codes = codes.masked_fill_(missing, self.codes.nan_code)
        codes = in_memory_order(ungrouped(codes, self.group, layout.shape), layout)
        spec: PackedSpec[ScaledCodes] = PackedSpec.of(self, layout)
        buffer = spec.empty(codes)
        stored = [pack_codes(codes, self.codes.bit_width), self.scale.write(scale, flagged)]
        if self.zero_point is not None and zero_point is not None:
            stored.append(self.zero_point.write(zero_point))
        for part, content in zip(spec.split(buffer), stored, strict=True):
            part.copy_(content.reshape(-1))
        return PackedActivation(spec, buffer)

    def decode(self, buffer: Tensor, spec: PackedSpec[ScaledCodes], target: Tensor) -> None:
        """Decode stored bytes into memory that is dense in the layout's memory order, in its dtype."""
        layout = spec.layout
        if not layout.numel:
            return
        packed, stored_scale, *stored_zero_point = spec.split(buffer)
        codes = layout.restore(unpack_codes(packed, self.codes.bit_width, layout.numel))
        codes = grouped(codes, self.group)
        values, scale = self.codes.decode(codes, self.dtype), stored_scale.view(self.scale.shape)
        if self.codes.has_spare:
            scale = self.scale.read(scale)
        else:
            scale, flagged = self.scale.read_flagged(scale)
            values = torch.where(flagged, self.codes.decode_flagged(codes, values), values)
        if self.zero_point is not None:
            values = values - self.zero_point.read(stored_zero_point[0]).view(self.zero_point.shape)
        values = ungrouped(values * scale, self.group, layout.shape)
        target.as_strided((layout.numel,), (1,)).copy_(in_memory_order(values, layout))

    def decode_multiply(self, buffer: Tensor, spec: PackedSpec[ScaledCodes], other: Tensor, target: Tensor) -> None:
        """Decode, multiply by another tensor and write to memory, possibly the same; both dense in memory order."""
        decoded = torch.empty_like(target)
        self.decode(buffer, spec, decoded)
        flat = (spec.layout.numel,), (1,)
        torch.mul(decoded.as_strided(*flat), other.as_strided(*flat), out=target.as_strided(*flat))


def grouped(x: Tensor, group: tuple[int, int] | None) -> Tensor:
    """Split a dimension into groups, the last one zero-padded, as Brevitas does; unchanged without groups.

    The dimension becomes two, groups and their elements; a scalar counts as a vector of one element.
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
    """Inverse of `grouped`, for a tensor of this shape: drop the padding."""
    if group is None or not shape:
        return x.reshape(-1)[0] if not shape else x
    dim = group[0] % len(shape)
    return x.flatten(dim, dim + 1).narrow(dim, 0, shape[dim])


def in_memory_order(x: Tensor, layout: Layout) -> Tensor:
    """A tensor's elements in the layout's memory order, whatever its strides; of expanded dimensions the first one."""
    if not layout.numel:
        return x.reshape(-1)[:0]
    kept = sorted(layout.dims)
    x = x[tuple(slice(None) if dim in kept else 0 for dim in range(x.dim()))]
    return x.permute([kept.index(dim) for dim in layout.dims]).reshape(-1)
