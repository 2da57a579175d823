"""Quantizers on grids in plain torch: the definition that the kernels reproduce; see `reference` for the shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from brevact.quantizers.geometry import Geometry, packed_bytes
from brevact.quantizers.grid import Grid
from brevact.quantizers.reference import (
    chunks,
    element_bits,
    group_index,
    group_ranges,
    pack,
    round_codes,
    unpack_chunk,
)

LARGEST_UNIT = 65536
"""Largest integer that a magnitude counts as in `moments`."""


def ranges(flat: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Smallest and largest finite value of each group.

    Args:
        flat: (n,) floating-point tensor.
        geometry: Its groups.

    Returns:
        `(low, high, missing)`: (G,) float32 ends without negative zeros, NaN for a group without a finite element, and
        int64 numbers of elements that are not finite.
    """
    low, high, missing = group_ranges(flat, geometry)
    empty = low > high
    return (low + 0.0).masked_fill(empty, float("nan")), (high + 0.0).masked_fill(empty, float("nan")), missing


def moments(flat: Tensor, geometry: Geometry, offset: Tensor, inverse: Tensor) -> Tensor:
    """Counts, sums and sums of squares of the values on either side of each group's offset, in integers.

    With z = (x - offset) * inverse and r = min(rint(|z|), 65536): integer sums do not depend on their order, so that
    every device gives the same ones.

    Args:
        flat: (n,) floating-point tensor.
        geometry: Its groups.
        offset: (G,) float32 offsets.
        inverse: (G,) float32 factors.

    Returns:
        (G, 6) int64: number of z < 0, their sum of r, their sum of r^2; the same for z > 0. Infinities and NaNs are in
        neither.
    """
    sums = torch.zeros(geometry.groups, 6, dtype=torch.int64, device=flat.device)
    for start, stop, _ in chunks(geometry.numel, geometry.block_size):
        group = group_index(start, stop, geometry, flat.device)
        z = (flat[start:stop].float() - offset[group]) * inverse[group]
        r = z.abs().round().clamp(max=LARGEST_UNIT).nan_to_num(nan=0.0).to(torch.int64)
        negative, positive = (z < 0) & z.isfinite(), (z > 0) & z.isfinite()
        columns = [part for side in (negative, positive) for part in (side.to(torch.int64), r * side, r * r * side)]
        sums.index_add_(0, group, torch.stack(columns, 1))
    return sums


def positions(z: Tensor, levels: Tensor, steps: Tensor, *, stochastic: bool) -> Tensor:
    """Positions on the grid: code 2 and a quarter of the way to code 3 is 2.25.

    Stochastic: with i the last level but one that z reaches (0 where it reaches none), t = i + clip((z - level_i) *
    steps_i, 0, 1). Nearest: t is the number of bounds that z reaches. NaN gives 0.

    Args:
        z: (n,) float32 values.
        levels: (n, N) float32 levels, or (1, N).
        steps: (n, N - 1) or (1, N - 1), see `Grid.steps`.
        stochastic: Rounding.

    Returns:
        (n,) float32 positions in [0, N - 1].
    """
    if not stochastic:
        return (z[:, None] >= steps).sum(1).float()
    index = (z[:, None] >= levels[:, 1:-1]).sum(1)
    rows = torch.arange(z.numel(), device=z.device) if levels.shape[0] > 1 else torch.zeros_like(index)
    fraction = ((z - levels[rows, index]) * steps[rows, index]).nan_to_num(nan=0.0).clamp(0.0, 1.0)
    return index.float() + fraction


def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: Tensor | None) -> Tensor:
    """Quantize a flat tensor to codes of levels; see `Grid` for what is not finite.

    Args:
        flat: (n,) floating-point tensor.
        geometry: Its blocks and groups.
        grid: Its levels; bounds may be missing.
        seed: 0-d int64 tensor for stochastic rounding, None for nearest.

    Returns:
        Packed uint8 codes.
    """
    stochastic = seed is not None
    steps, inverse = grid.steps(stochastic=stochastic), grid.inverse
    codes = flat.new_empty(geometry.code_bytes, dtype=torch.uint8)
    for start, stop, columns in chunks(geometry.numel, geometry.block_size):
        group = group_index(start, stop, geometry, flat.device)
        z = x = flat[start:stop].float()
        z = z if grid.offset is None else z - grid.offset[group]
        z = z if inverse is None else z * inverse[group].abs()
        rows = group if grid.levels.shape[0] > 1 else group.new_zeros(1)
        t = positions(z, grid.levels[rows], steps[rows], stochastic=stochastic)
        if inverse is not None:
            t = torch.where(torch.signbit(inverse[group]), t.clamp(max=grid.levels.shape[1] - 2), t)
        if grid.marks:
            t = t.masked_fill(~x.isfinite(), float((1 << geometry.bit_width) - 1))
        bits = element_bits(start, stop, columns, seed) if seed is not None else None
        first = packed_bytes(start, geometry.bit_width, geometry.block_size)
        packed = pack(round_codes(t, bits), geometry.bit_width, geometry.block_size)
        codes[first : first + packed.numel()] = packed
    return codes


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, out: Tensor) -> Tensor:
    """Decode x = offset + |scale| * level, clamped to the finite range of the output's type; see `Grid` for NaN.

    Args:
        codes: Packed uint8 codes.
        geometry: Blocks and groups.
        grid: Levels.
        out: (n,) contiguous floating-point tensor, overwritten.

    Returns:
        `out`.
    """
    limit = min(torch.finfo(out.dtype).max, torch.finfo(torch.float32).max)
    last, top = grid.levels.shape[1] - 1, (1 << geometry.bit_width) - 1
    for start, stop, columns in chunks(geometry.numel, geometry.block_size):
        group = group_index(start, stop, geometry, codes.device)
        q = unpack_chunk(codes, geometry.bit_width, start, stop, columns, geometry.block_size)
        y = grid.levels[group if grid.levels.shape[0] > 1 else 0, q.clamp(max=last)]
        y = y if grid.scale is None else grid.scale[group].abs() * y
        y = y if grid.offset is None else grid.offset[group] + y
        y = y.clamp(-limit, limit)
        if grid.scale is not None:
            y = y.masked_fill(torch.signbit(grid.scale[group]) & (q == top), float("nan"))
        out[start:stop] = y
    return out
