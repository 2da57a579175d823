"""Dual precision: block means of a map in float16, the residual in a few bits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

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
LARGEST_HALF = 0x7C00
"""Bits of infinity in float16; those of a stored NaN are larger, without a sign."""

SPATIAL = 3
"""Axes of a map; shapes with fewer have sides of 1 in front."""


@dataclass(frozen=True)
class MapBlocks:
    """How the distinct elements of a tensor divide into `maps` maps of `sides` D, H and W, and a map into blocks."""

    maps: int
    sides: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def elements(self) -> int:
        return math.prod(self.sides)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Blocks along each axis of a map: d, h and w."""
        depth, height, width = (-(-side // max(block, 1)) for side, block in zip(self.sides, self.block, strict=True))
        return depth, height, width

    @property
    def blocks(self) -> int:
        return self.maps * math.prod(self.counts)


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
    _residual: UniformQuantizer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_bit_width("bit_width", self.bit_width, BIT_WIDTHS[:-1])
        check_int("block", self.block, 1)
        residual = UniformQuantizer(
            bit_width=self.bit_width,
            rounding=self.rounding,
            granularity=Granularity.SAMPLE,
            minimum_dtype=torch.bfloat16,
        )
        object.__setattr__(self, "rounding", residual.rounding)
        object.__setattr__(self, "_residual", residual)

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        blocks = self.blocks(layout)
        return (
            Part("codes", torch.uint8, packed_bytes(layout.numel, self.bit_width, DEFAULT_BLOCK)),
            Part("minimum", torch.bfloat16, blocks.maps),
            Part("low", torch.float16, blocks.blocks),
            Part("scale_bits", torch.uint8, packed_bytes(blocks.maps, SCALE_BITS, DEFAULT_BLOCK)),
        )

    def blocks(self, layout: Layout) -> MapBlocks:
        """Maps and blocks of a tensor."""
        try:
            return map_blocks(layout, self.block)
        except TypeError:  # symbols have no hash
            return map_blocks.__wrapped__(layout, self.block)

    @torch.no_grad()
    def encode(self, dense: Tensor, spec: PackedSpec[Any], seed: int | Tensor | None, buffer: Tensor) -> None:
        """Write block means, and codes of the residual; memory for that is taken for a moment, 8 bytes an element."""
        refuse_wrapped(dense)
        layout, blocks = spec.layout, self.blocks(spec.layout)
        ordered = _map_order(layout, flat_memory(dense.detach(), layout.numel))
        low, residual = split_maps(ordered.reshape(blocks.maps, *blocks.sides), blocks)
        found = self._residual.quantize(residual.view(blocks.maps, blocks.elements), seed)
        codes, minimum, scale = found.tensors
        scale_bits = pack_codes(scale.view(torch.int16), SCALE_BITS)
        for part, values in zip(spec.split(buffer), (codes, minimum, low, scale_bits), strict=True):
            part.copy_(values)

    @torch.no_grad()
    def decode(self, buffer: Tensor, spec: PackedSpec[Any], target: Tensor, other: Tensor | None = None) -> None:
        layout, blocks = spec.layout, self.blocks(spec.layout)
        if layout.numel == 0:
            return
        ordered = _map_order(layout, flat_memory(target, layout.numel))
        in_place = other is None and target.dtype == torch.float32 and ordered.is_contiguous()
        x = ordered if in_place else target.new_empty(ordered.shape, dtype=torch.float32)
        self._decode_residual(buffer, spec, blocks, x)
        x.view(blocks.maps, *blocks.sides).add_(_upsampled(spec.split(buffer)[2], blocks))
        limit = min(torch.finfo(target.dtype).max, torch.finfo(torch.float32).max)
        x.clamp_(-limit, limit)
        if other is not None:
            torch.mul(x.to(target.dtype), _map_order(layout, flat_memory(other, layout.numel)), out=ordered)
        elif not in_place:
            ordered.copy_(x)

    def _decode_residual(self, buffer: Tensor, spec: PackedSpec[Any], blocks: MapBlocks, target: Tensor) -> None:
        """Write the residual, map by map, to a contiguous float32 tensor."""
        codes, minimum, low, scale_bits = spec.split(buffer)
        scale = unpack_codes(scale_bits, SCALE_BITS, blocks.maps).to(torch.int16).view(torch.bfloat16)
        most = low.view(torch.int16).view(blocks.maps, -1).amax(1)  # means that are NaN are larger than any other
        scale = torch.where(most > LARGEST_HALF, -scale, scale)
        shape, stride = (blocks.maps, blocks.elements), (blocks.elements, 1)
        inner = PackedSpec.of(self._residual, Layout.of_sizes(shape, stride, torch.float32))
        stored = inner.empty(buffer)
        for part, values in zip(inner.split(stored), (codes, minimum, scale), strict=True):
            part.copy_(values)
        self._residual.decode(stored, inner, target.view(shape))


@functools.lru_cache(maxsize=4096)
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
    sides = depth, height, width
    maps = math.prod(shape[:leading]) if layout.numel else 0
    return MapBlocks(maps, sides, (min(depth, block), min(height, block), min(width, block)))


def _map_order(layout: Layout, flat: Tensor) -> Tensor:
    """Elements in memory order as a view whose axes are in the tensor's own order, so that maps follow each other."""
    return flat.view(layout.sizes).permute([layout.dims.index(d) for d in sorted(layout.dims)])


def split_maps(x_MDHW: Tensor, blocks: MapBlocks) -> tuple[Tensor, Tensor]:
    """Mean of every block, and the residual of upsampled means: low = float16(mean), residual = x - upsample(low).

    They are (M * d * h * w,) float16 and (M, D, H, W) float32. Elements are added in float64. Means beyond the range of
    float16 become its largest finite value. A block with an element that is exactly 0 has a mean of 0, so that the
    residual of its zeros is 0 as well. A block that holds NaN or an infinity stores NaN and subtracts 0, so that its
    NaN or infinity stays in the residual.
    """
    x_MDHW = x_MDHW.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    sums, counts = (
        _in_blocks(x, blocks).sum(_OF_BLOCK, dtype=torch.float64) for x in (x_MDHW, torch.ones_like(x_MDHW[:1]))
    )
    zero, missing = (_in_blocks(flags, blocks).any(_OF_BLOCK) for flags in (x_MDHW == 0, ~x_MDHW.isfinite()))
    mean = (sums / counts).nan_to_num(nan=0.0).clamp(-LARGEST_MEAN, LARGEST_MEAN)
    low = mean.masked_fill(zero, 0.0).masked_fill(missing, torch.nan).to(torch.float16).flatten()
    return low, x_MDHW.sub_(_upsampled(low, blocks))


_OF_BLOCK = (2, 4, 6)


def _in_blocks(x_MDHW: Tensor, blocks: MapBlocks) -> Tensor:
    """Maps, padded by zeros, as blocks whose elements are along the dimensions `_OF_BLOCK`."""
    axes = list(zip(blocks.sides, blocks.counts, blocks.block, strict=True))
    padding = [end for side, count, block in reversed(axes) for end in (0, count * block - side)]
    return F.pad(x_MDHW, padding).view(-1, *(size for _, *sizes in axes for size in sizes))


def _upsampled(low: Tensor, blocks: MapBlocks) -> Tensor:
    """(M, D, H, W) float32 mean of each element's block, 0 for NaN."""
    x = low.view(-1, *blocks.counts).float().nan_to_num(nan=0.0)
    for axis, (side, block) in enumerate(zip(blocks.sides, blocks.block, strict=True), 1):
        x = x.repeat_interleave(block, axis).narrow(axis, 0, side)
    return x
