"""Dual precision: block means of a map in float16, the residual in a few bits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.geometry import DEFAULT_BLOCK, packed_bytes
from brevact.quantizers.backends import refuse_wrapped
from brevact.quantizers.bits import pack_codes, unpack_codes
from brevact.quantizers.checks import check_bit_width, check_int
from brevact.quantizers.formats.uniform import BIT_WIDTHS, Granularity, UniformQuantizer
from brevact.quantizers.kernel_ops import flat_memory
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedSpec, Part
from brevact.quantizers.quantizer import Quantizer
from brevact.quantizers.rounding import Rounding

LARGEST_MEAN = 65504.0
"""Largest finite float16."""
SCALE_BITS = 15
"""Bits of a bfloat16 scale without its sign."""
SPATIAL = 3
"""Axes of a map; shapes with fewer have sides of 1 in front."""


class MapBlocks(NamedTuple):
    """How the distinct elements of a tensor divide into `maps` maps of `sides` D, H and W, and a map into blocks."""

    maps: int
    sides: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def elements(self) -> int:
        return math.prod(self.sides)

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks along each axis of a map: d, h and w."""
        return tuple(-(-side // max(block, 1)) for side, block in zip(self.sides, self.block, strict=True))


@dataclass(frozen=True, kw_only=True)
class DualPrecisionQuantizer(Quantizer):
    """Quantizer that stores means of blocks in float16, and the residual with a minimum and a scale for each map.

    A map is one channel of one sample. With blocks of `block` elements along each axis of a map, in float32:

        low = float16(mean of the block),  r = x - upsample(low)
        q = round((r - m) / s),  decoded as upsample(low) + (m + s * q)

    m, s and q are those of `UniformQuantizer` with the map as its group. A block with an element that is exactly 0 has
    a mean of 0: its zeros are zeros of the residual, and decode to 0.

    Source: DIVISION, arXiv:2208.04187, section 4 (eq. 9, 10). Differs: the residual is taken from the rounded means;
    blocks at the border that are not full are averaged over the elements they have; minimum and scale are bfloat16,
    because float16 overflows, and rounded outwards before codes are computed; the scale's sign is not stored. NaN and
    infinities decode to NaN: a block that holds them counts as one with mean 0 and stores NaN, and the map has one
    level fewer for all other elements, as in `UniformQuantizer`.

    **Maps.** A tensor of shape (N, C, *spatial) with one to three spatial axes has N * C maps; one of shape (N, F) has
    N maps along its features; a vector is one map. Expanded axes count as axes of size 1, and such axes at the end are
    left out: (N, C, 1, 1) is (N, C). An axis shorter than the block has one block.

    **Bytes.** `codes`: those of the residual, map by map whatever the memory order of the tensor, in the block format
    of `PackedActivation`; `minimum`: one bfloat16 a map; `low`: one float16 a block; `scale_bits`: the low 15 bits of
    one bfloat16 scale a map, as `pack_codes` packs them. Where a mean of a map is NaN, its scale is flagged.

    >>> q = DualPrecisionQuantizer(bit_width=2, block=8)
    >>> q.quantize(torch.rand(4, 16, 56, 56), seed=0).nbytes  # 802816 bytes in float32
    56696

    Args:
        bit_width: Bits a code of the residual: 1 to 8, 12, 16 or 24.
        block: Side of a block, in elements.
        rounding: Nearest or stochastic.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If an argument has the wrong type.
    """

    bit_width: int = 2
    block: int = 8
    rounding: Rounding = Rounding.STOCHASTIC

    def __post_init__(self) -> None:
        check_bit_width("bit_width", self.bit_width, BIT_WIDTHS[:-1])
        check_int("block", self.block, 1)
        object.__setattr__(self, "rounding", self._residual.rounding)

    @functools.cached_property
    def _residual(self) -> UniformQuantizer:
        sizes: Any = {"granularity": Granularity.SAMPLE, "minimum_dtype": torch.bfloat16}
        return UniformQuantizer(bit_width=self.bit_width, rounding=self.rounding, **sizes)

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        blocks = map_blocks(layout, self.block)
        codes, minimum, _ = self.residual_spec(blocks).parts
        low = Part("low", torch.float16, blocks.maps * math.prod(blocks.counts))
        scale_bits = Part("scale_bits", torch.uint8, packed_bytes(blocks.maps, SCALE_BITS, DEFAULT_BLOCK))
        return codes, minimum, low, scale_bits

    def residual_spec(self, blocks: MapBlocks) -> PackedSpec[UniformQuantizer]:
        """The spec of the residual: a row for each map."""
        shape, stride = (blocks.maps, blocks.elements), (blocks.elements, 1)
        return PackedSpec(self._residual, Layout(shape, stride, torch.float32))

    @torch.no_grad()
    def encode(self, dense: Tensor, spec: PackedSpec[Any], seed: int | Tensor | None, buffer: Tensor) -> None:
        """Write block means, and codes of the residual; memory for that is taken for a moment, 16 bytes an element."""
        refuse_wrapped(dense)
        layout, blocks = spec.layout, map_blocks(spec.layout, self.block)
        ordered = _map_order(layout, flat_memory(dense.detach(), layout.numel))
        low, residual = split_maps(ordered.reshape(blocks.maps, *blocks.sides), blocks)
        codes, minimum, scale = self._residual.quantize(residual.view(blocks.maps, blocks.elements), seed).tensors
        scale_bits = pack_codes(scale.view(torch.int16), SCALE_BITS)
        for part, values in zip(spec.split(buffer), (codes, minimum, low, scale_bits), strict=True):
            part.copy_(values)

    @torch.no_grad()
    def decode(self, buffer: Tensor, spec: PackedSpec[Any], target: Tensor, other: Tensor | None = None) -> None:
        layout, blocks = spec.layout, map_blocks(spec.layout, self.block)
        if layout.numel == 0:
            return
        codes, minimum, low, scale_bits = spec.split(buffer)
        scale = unpack_codes(scale_bits, SCALE_BITS, blocks.maps).to(torch.int16).view(torch.bfloat16)
        scale = torch.where(low.isnan().view(blocks.maps, -1).any(1), -scale, scale)
        inner = self.residual_spec(blocks)
        stored = inner.empty(buffer)
        for part, values in zip(inner.split(stored), (codes, minimum, scale), strict=True):
            part.copy_(values)
        x = target.new_empty(blocks.maps, *blocks.sides, dtype=torch.float32)
        self._residual.decode(stored, inner, x)
        limit = min(torch.finfo(target.dtype).max, torch.finfo(torch.float32).max)
        ordered = _map_order(layout, flat_memory(target, layout.numel))
        x = x.add_(_upsampled(low, blocks)).clamp_(-limit, limit).view(ordered.shape).to(target.dtype)
        ordered.copy_(x if other is None else x * _map_order(layout, flat_memory(other, layout.numel)))


def map_blocks(layout: Layout, block: int) -> MapBlocks:
    """Maps of a tensor: one for each index of the first two axes (of the first, if there are no more than two).

    Axes of size 1 at the end are left out first: (N, C, 1, 1) is divided as (N, C). An expanded axis counts as one of
    size 1: its repeats are not stored. Of more than five axes, the last three are a map's. A tensor without elements
    has no maps.

    >>> map_blocks(Layout.of(torch.empty(4, 16, 14, 14)), 8)
    MapBlocks(maps=64, sides=(1, 14, 14), block=(1, 8, 8))
    >>> map_blocks(Layout.of(torch.empty(4, 100)), 8)
    MapBlocks(maps=4, sides=(1, 1, 100), block=(1, 1, 8))
    """
    shape = layout.shape[: max(layout.dims, default=-1) + 1]
    shape = tuple(size if d in layout.dims else 1 for d, size in enumerate(shape))
    leading = max(min(2, len(shape) - 1), len(shape) - SPATIAL, 0)
    spatial = shape[leading:]
    depth, height, width = (*(1,) * (SPATIAL - len(spatial)), *spatial)
    maps = math.prod(shape[:leading]) if layout.numel else 0
    return MapBlocks(maps, (depth, height, width), (min(depth, block), min(height, block), min(width, block)))


def _map_order(layout: Layout, flat: Tensor) -> Tensor:
    """Elements in memory order as a view whose axes are in the tensor's own order, so that maps follow each other."""
    return flat.view(layout.sizes).permute([layout.dims.index(d) for d in sorted(layout.dims)])


def split_maps(x_MDHW: Tensor, blocks: MapBlocks) -> tuple[Tensor, Tensor]:
    """Mean of every block, and the residual of upsampled means: low = float16(mean), residual = x - upsample(low).

    They are (M * d * h * w,) float16 and (M, D, H, W) float32. Means are computed in float64; those beyond the range of
    float16 become its largest finite value. A block with an element that is exactly 0 has a mean of 0, so that the
    residual of its zeros is 0 as well. A block that holds NaN or an infinity stores NaN and subtracts 0, so that its
    NaN or infinity stays in the residual.
    """
    x_MDHW = x_MDHW.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    mean = F.avg_pool3d(x_MDHW.double(), blocks.block, ceil_mode=True, count_include_pad=False)
    has_zero = F.max_pool3d((x_MDHW == 0).float(), blocks.block, ceil_mode=True) > 0
    low = mean.clamp(-LARGEST_MEAN, LARGEST_MEAN).masked_fill(has_zero, 0.0)
    low = low.masked_fill(~mean.isfinite(), torch.nan).half().flatten()
    return low, x_MDHW.sub_(_upsampled(low, blocks))


def _upsampled(low: Tensor, blocks: MapBlocks) -> Tensor:
    """(M, D, H, W) float32 mean of each element's block, 0 for NaN."""
    x = low.view(-1, *blocks.counts).float().nan_to_num(nan=0.0)
    for axis, (side, block) in enumerate(zip(blocks.sides, blocks.block, strict=True), 1):
        x = x.repeat_interleave(block, axis).narrow(axis, 0, side)
    return x
