"""Ops on the elements of tensors, defined in plain torch: references, whose bytes kernels of all devices reproduce.

Each writes into arrays that it is given, and runs by a kernel of its name where there is one (`backends`). Float
arithmetic is float32, with one rounding an operation, elementwise or in a fixed order. Arguments of one name mean the
same in all ops:

- `x`: a floating-point tensor, dense in memory order; float64 has no kernels.
- `plan`: its `UniformPlan`; `geometry`: its blocks and groups; `grid`: its levels.
- `seed`: a signed 64-bit int or a 0-d int64 tensor for stochastic and dithered rounding, None for nearest.
- `buffer`: the bytes of the plan, uint8, zero where they have padding; `codes` and `packed`: packed bytes alone.
- `mean`, `factor`, `place`: (M,) float32 statistics in the memory order of the tensor, None for none, and which is
  whose.
- `other`: a factor, dense in the memory order of the tensor, or None; `target`: memory that holds the elements densely
  in this order, written, which may be `other`. Both are of the tensor's type, in `look_up` of any that kernels take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brevact.geometry import DEFAULT_BLOCK, Geometry, Grid, Place, Segments, UniformPlan
from brevact.quantizers import reference, uneven
from brevact.quantizers.backends import refuse_wrapped, run_by_kernels
from brevact.quantizers.reference import (
    by_groups,
    calibrate,
    chunks,
    element_bits,
    group_ranges,
    pack_chunk,
    parts_of_steps,
    positions_of_zeros,
    round_codes,
    shifts,
    spreads,
    unpack_chunk,
)

LARGEST_UNIT = 65536
"""Largest integer that a magnitude counts as in `moments`."""


@run_by_kernels
def pack_codes(codes: Tensor, bit_width: int, block_size: int, packed: Tensor) -> None:
    """Pack (n,) contiguous integer codes into eight-plane blocks (see `PackedActivation`); higher bits are dropped.

    `bit_width` is 1 to 32, `block_size` a multiple of 8; `packed` has `packed_bytes(n, bit_width, block_size)` bytes.
    """
    packed.copy_(reference.pack(codes, bit_width, block_size))


@run_by_kernels
def unpack_codes(packed: Tensor, bit_width: int, block_size: int, codes: Tensor) -> None:
    """The inverse of `pack_codes`, to (n,) int32 or int64 codes."""
    codes.copy_(reference.unpack(packed, bit_width, codes.numel(), block_size))


@run_by_kernels
def pack_mask(x: Tensor, packed: Tensor) -> None:
    """Pack a bool mask, or the mask `~(x <= 0)` of a floating-point tensor, in memory order."""
    refuse_wrapped(x)
    flat = flat_memory(x.detach(), x.numel())
    mask = flat if flat.dtype == torch.bool else ~(flat <= 0)
    packed.copy_(reference.pack(mask.to(torch.uint8), 1, DEFAULT_BLOCK))


@run_by_kernels
def unpack_mask(packed: Tensor, mask: Tensor) -> None:
    """The inverse of `pack_mask`, to an (n,) bool tensor."""
    mask.copy_(reference.unpack(packed, 1, mask.numel(), DEFAULT_BLOCK))


@run_by_kernels
def mask_multiply(packed: Tensor, numel: int, grad: Tensor, negative_slope: float, target: Tensor) -> None:
    """where(mask, grad, negative_slope * grad), dense in the mask's order, +0 for slope 0; `target` may be `grad`."""
    flat = flat_memory(grad, numel)
    other = flat * negative_slope if negative_slope else torch.zeros_like(flat)
    mask = packed.new_empty(numel, dtype=torch.bool)
    unpack_mask(packed, mask)
    torch.where(mask, flat, other, out=flat_memory(target, numel))


@run_by_kernels
def quantize_uniform(
    x: Tensor,
    plan: UniformPlan,
    seed: int | Tensor | None,
    mean: Tensor | None,
    factor: Tensor | None,
    place: Place | None,
    buffer: Tensor,
) -> None:
    """Quantize a tensor: q = round(clip((x - m) / s, 0, 2^b - 1)) with the m and s of `reference.calibrate`.

    With a factor, (x - mean) * factor is quantized, without a copy by kernels. If the plan is stretched, elements are
    first stretched, and values of codes shrunk again wherever they are decoded.

    In a flagged group code 2^b - 1 stands for elements that are not finite, and finite elements take the codes below
    it. Elements that are exactly 0 take the level there, if there is one: see `reference.calibrate`.

    If the plan is dithered, a group that is not flagged, holds no 0 and that `reference.spreads` takes q = round(clip(t
    + u, 0, 2^b - 1)), to nearest, for positions t and its shift u, and stores m - u s, the lowest float32 at least.
    Others, in which many elements lie on levels or are equal, round stochastically: with less variance, or without
    errors that elements share.
    """
    refuse_wrapped(x)
    geometry, flat = plan.geometry, flat_memory(x.detach(), plan.geometry.numel)
    if factor is not None and place is not None:
        flat = flat.to(torch.float32, copy=True)
        z = _by_groups(flat, place)
        if mean is not None:
            z.sub_(mean.view(-1, 1, place.row, 1))
        z.mul_(factor.view(-1, 1, place.row, 1))
    flat = reference.stretched(flat.float()) if plan.stretched else flat
    key = None if seed is None else torch.as_tensor(seed, device=x.device)
    minimum, scale, has_zero = calibrate(flat, geometry, plan.scale_dtype, plan.minimum_dtype)
    top = (1 << geometry.bit_width) - 1
    steps = torch.empty_like(flat, dtype=torch.float32)
    for (groups, part), (_, own) in zip(by_groups(flat, geometry), by_groups(steps, geometry), strict=True):
        own.copy_(_positions(part.float(), (groups, None), minimum, scale, top))
    shift = None
    if plan.dithered and key is not None:
        shift = _shifts(steps, geometry, scale, key).masked_fill(has_zero, float("nan"))
    uneven_steps = _uneven_positions(flat, plan, minimum, scale, shift) if plan.uneven else None
    for start, values in ((plan.minimum_at, _shifted(minimum, scale, shift)), (plan.scale_at, scale)):
        raw = values.contiguous().view(torch.uint8)
        buffer[start : start + raw.numel()] = raw
    for _, own, u in by_groups(steps, geometry, shift) if shift is not None else ():
        own.copy_(torch.where(u.isnan(), own, (own + u).clamp(0.0, float(top)).round()))
    if uneven_steps is not None:
        steps = torch.where(uneven_steps < 0, steps, uneven_steps)
    for start, stop, columns in chunks(geometry.numel, geometry.block_size):
        bits = None if key is None else element_bits(start, stop, columns, key)
        chunk = round_codes(steps[start:stop], bits).clamp(max=top)
        pack_chunk(chunk, start, geometry.bit_width, geometry.block_size, buffer)


def _positions(z: Tensor, group: Any, minimum: Tensor, scale: Tensor, top: int) -> Tensor:
    """Positions of elements on the grids of their groups, in [0, top]; 0 in constant and empty groups."""
    base, step, flagged = minimum.float()[group], scale.float().abs()[group], torch.signbit(scale)[group]
    inverse = torch.where(step > 0, torch.ones_like(step) / step, 0.0)
    steps = ((z - base) * inverse).clamp(min=0.0).minimum(torch.where(flagged, top - 1, top).float())
    if top > 31:
        steps = torch.where(z == 0, positions_of_zeros(steps), steps)
    return steps.masked_fill(inverse == 0, 0.0).masked_fill(flagged & ~z.isfinite(), float(top))


def _shifts(steps: Tensor, geometry: Geometry, scale: Tensor, key: Tensor) -> Tensor:
    """(G,) float32 shifts of groups, NaN of those that round stochastically."""
    sums = torch.zeros(4, geometry.groups, dtype=torch.int64, device=steps.device)
    for groups, own in by_groups(steps, geometry):
        part = parts_of_steps(own)
        counts = part * (256 - part), part >> 7 & 1, part + 64 >> 7 & 1, torch.ones_like(part)
        sums[:, groups] += torch.stack([each.sum((0, 2)) for each in counts])
    is_shifted = spreads(*sums) & ~torch.signbit(scale)
    return shifts(key, geometry.groups).masked_fill(~is_shifted, float("nan"))


def _uneven_positions(flat: Tensor, plan: UniformPlan, minimum: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """Write the metadata of uneven groups, and return (n,) positions of their elements, -1 for others."""
    inner, bit_width = plan.geometry.inner, plan.geometry.bit_width
    steps, whole = torch.empty_like(flat, dtype=torch.float32), flat.numel() // inner * inner
    for start, stop in ((0, whole), (whole, flat.numel())):
        if start == stop:
            continue
        groups = slice(start // inner, -(-stop // inner))
        x = flat[start:stop].view(-1, min(inner, stop - start)).float()
        takes, (own_minimum, own_scale, is_far) = uneven.is_uneven(x), uneven.fit(x, bit_width)
        own_steps = uneven.positions(x, own_minimum, own_scale, is_far, bit_width)
        steps[start:stop] = torch.where(takes[:, None], own_steps, -1.0).flatten()
        for stored, own in ((minimum.view(torch.int32), own_minimum), (scale.view(torch.int16), own_scale)):
            stored[groups] = torch.where(takes, own, stored[groups])
        if shift is not None:
            shift[groups] = shift[groups].masked_fill(takes, float("nan"))
    return steps


def _shifted(minimum: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    if shift is None:
        return minimum
    moved = (minimum - shift * scale.float()).clamp(min=torch.finfo(torch.float32).min)
    return torch.where(shift.isnan(), minimum, moved)


@run_by_kernels
def dequantize_uniform(
    buffer: Tensor,
    plan: UniformPlan,
    mean: Tensor | None,
    factor: Tensor | None,
    place: Place | None,
    other: Tensor | None,
    mask: Tensor | None,
    target: Tensor,
) -> None:
    """Decode x = m + |s| * q, clamped to the finite range of the target's type, and multiply.

    In flagged groups, those whose s has its sign bit set, code 2^b - 1 decodes to NaN; at 1 bit, where one code is left
    for all other elements, m is moved to the middle, m + |s| / 2.

    With a factor, the result is x * factor + mean, clamped to the finite range of float16 where that is the target's
    type; `other`, a float32 tensor for a target of that type, is added, and elements outside of a mask of `pack_mask`
    are set to +0.
    """
    if factor is not None and place is not None:
        z = torch.empty(plan.geometry.numel, dtype=torch.float32, device=buffer.device)
        dequantize_uniform(buffer, plan, None, None, None, None, None, z)
        groups = _by_groups(z, place).mul_(factor.view(-1, 1, place.row, 1))
        if mean is not None:
            groups.add_(mean.view(-1, 1, place.row, 1))
        if target.dtype is torch.float16:
            limit = torch.finfo(target.dtype).max
            z.clamp_(-limit, limit)
        if other is not None:
            z.add_(flat_memory(other, len(z)))
        flat = flat_memory(target, len(z)).copy_(z)
        if mask is not None:
            mask_multiply(mask, len(z), flat, 0.0, flat)
        return
    geometry, bit_width = plan.geometry, plan.geometry.bit_width
    flat = flat_memory(target, geometry.numel)
    times = flat if other is None else flat_memory(other, geometry.numel)
    codes = reference.unpack(plan.split(buffer)[0], bit_width, geometry.numel, geometry.block_size)
    pieces = zip(*(by_groups(each, geometry) for each in (codes, times, flat)), strict=True)
    for (groups, q), (_, by), (_, out) in pieces:
        y = _decoded(q, (groups, None), buffer, plan, flat.dtype)
        out.copy_(y if other is None else y * by)


def _decoded(q: Tensor, group: Any, buffer: Tensor, plan: UniformPlan, dtype: torch.dtype) -> Tensor:
    """Values of codes in groups, of shapes that broadcast; see `dequantize_uniform`."""
    _, minimum, scale = plan.split(buffer)
    base, step, flagged = minimum[group].float(), scale[group].float().abs(), torch.signbit(scale[group])
    top = (1 << plan.geometry.bit_width) - 1
    if top == 1:
        base = torch.where(flagged, base + step * 0.5, base)
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    y = (base + step * q.float()).clamp(-limit, limit)
    if plan.uneven:
        parts = minimum.view(torch.int32)[group], scale.view(torch.int16)[group]
        y = torch.where(flagged, uneven.values(q, *parts, plan.geometry.bit_width, limit), y)
    else:
        y = y.masked_fill(flagged & (q == top), float("nan"))
    return (reference.shrunk(y) if plan.stretched else y).to(dtype)


@run_by_kernels
def map_levels(
    buffer: Tensor,
    plan: UniformPlan,
    dtype: torch.dtype,
    mean: Tensor | None,
    factor: Tensor | None,
    place: Place | None,
    segments: Segments,
    table: Tensor,
) -> None:
    """Map the value of each code of each segment: z * factor + mean, in float32, into a (segments.rows, 2^b) table.

    z is decoded as `dequantize_uniform` decodes it to `dtype`, and the result clamped to the finite range of float16
    where that is the table's type. Slots beyond the last run of statistics have the map of that run. Codes have at most
    4 bits; no factor means no map.
    """
    geometry, device = plan.geometry, buffer.device
    codes = 1 << geometry.bit_width
    q = torch.arange(codes, device=device)
    for start, stop, _ in chunks(table.numel(), codes):
        index = torch.arange(start // codes, stop // codes, device=device)
        bucket, slot = index // segments.slots, index % segments.slots
        y = _decoded(q, (bucket % geometry.groups)[:, None], buffer, plan, dtype).float()
        if factor is not None and place is not None:
            run = (bucket * segments.inner // segments.run + slot).clamp(max=(geometry.numel - 1) // segments.run)
            first = run * segments.run
            at = first // place.outer * place.row + first % place.inner // place.run
            y = y * factor[at, None] if mean is None else y * factor[at, None] + mean[at, None]
        if table.dtype is torch.float16:
            limit = torch.finfo(table.dtype).max
            y = y.clamp(-limit, limit)
        table[start // codes : stop // codes] = y


@run_by_kernels
def look_up(
    buffer: Tensor, plan: UniformPlan, segments: Segments, table: Tensor, other: Tensor | None, target: Tensor
) -> None:
    """Decode by a contiguous (segments.rows, 2^b) float32 table of segments' codes, and multiply in float32."""
    geometry = plan.geometry
    flat = flat_memory(target, geometry.numel)
    factor = None if other is None else flat_memory(other, geometry.numel)
    for start, stop, columns in chunks(geometry.numel, geometry.block_size):
        q = unpack_chunk(buffer, geometry.bit_width, start, stop, columns, geometry.block_size)
        element = torch.arange(start, stop, device=buffer.device)
        bucket = element // segments.inner
        slot = element // segments.run - bucket * segments.inner // segments.run
        y = table[bucket * segments.slots + slot, q]
        flat[start:stop] = y if factor is None else y * factor[start:stop].float()


def _by_groups(flat: Tensor, place: Place) -> Tensor:
    """Elements as rows of repeats of groups of runs, whose statistics are (rows, 1, groups, 1)."""
    return flat.view(-1, place.outer // place.inner, place.row, place.run)


def ranges(flat: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Smallest and largest finite value of each group, and which groups hold a 0: `(low, high, missing, zeros)`.

    They are (G,) float32 ends without negative zeros, NaN for a group without a finite element, int64 numbers of
    elements that are not finite, and whether an element is 0.
    """
    refuse_wrapped(flat)
    low, high, missing, zeros = group_ranges(flat, geometry)
    empty = low > high
    low, high = ((end + 0.0).masked_fill(empty, float("nan")) for end in (low, high))
    return low, high, missing, zeros


def moments(flat: Tensor, geometry: Geometry, offset: Tensor, inverse: Tensor) -> Tensor:
    """Counts, sums and sums of squares of the values on either side of each group's offset, in integers.

    With z = (x - offset) * inverse and r = min(rint(|z|), 65536): (G, 6) int64 number of z < 0, their sum of r, their
    sum of r^2; the same for z > 0. Infinities and NaNs are in neither. Integer sums do not depend on their order, so
    that every device gives the same ones.
    """
    refuse_wrapped(flat)
    sums = torch.zeros(geometry.groups, 6, dtype=torch.int64, device=flat.device)
    for groups, part, low, factor in by_groups(flat, geometry, offset, inverse):
        z = ((part.float() - low) * factor).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        r = z.round().clamp_(-LARGEST_UNIT, LARGEST_UNIT).double()  # in which sums of a piece are exact
        for first, side, units in ((0, z < 0, r.clamp(max=0.0).neg_()), (3, z > 0, r.clamp_(min=0.0))):
            columns = [side.sum((0, 2)), *(each.sum((0, 2)).long() for each in (units, units * units))]
            sums[groups, first : first + 3] += torch.stack(columns, 1)
    return sums


def positions(z: Tensor, levels: Tensor, steps: Tensor, *, stochastic: bool) -> Tensor:
    """(n,) float32 positions of z in [0, N - 1] on a grid: code 2 and a quarter of the way to code 3 is 2.25.

    Stochastic: with i the last level but one that z reaches (0 where it reaches none), t = i + clip((z - level_i) *
    steps_i, 0, 1). Nearest: t is the number of bounds that z reaches. NaN gives 0. There are (n, N) or (1, N) levels,
    and as many rows of `Grid.steps`.
    """
    if not stochastic:
        return (z[:, None] >= steps).sum(1).float()
    index = (z[:, None] >= levels[:, 1:-1]).sum(1)
    rows = torch.arange(z.numel(), device=z.device) if levels.shape[0] > 1 else torch.zeros_like(index)
    fraction = ((z - levels[rows, index]) * steps[rows, index]).nan_to_num(nan=0.0).clamp(0.0, 1.0)
    return index.float() + fraction


@run_by_kernels
def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: int | Tensor | None, codes: Tensor) -> None:
    """Quantize a contiguous (n,) tensor to codes of the grid's levels, whose offsets and scales are not read.

    If the grid marks, elements that are not finite take the last of the 2^b codes.
    """
    refuse_wrapped(flat)
    key = None if seed is None else torch.as_tensor(seed, device=flat.device)
    steps = grid.steps(stochastic=seed is not None)
    for start, stop, columns in chunks(geometry.numel, geometry.block_size):
        z, rows = flat[start:stop].float(), _level_rows(start, stop, geometry, grid)
        t = positions(z, grid.levels[rows], steps[rows], stochastic=seed is not None)
        if grid.marks:
            t = t.masked_fill(~z.isfinite(), float((1 << geometry.bit_width) - 1))
        bits = None if key is None else element_bits(start, stop, columns, key)
        pack_chunk(round_codes(t, bits), start, geometry.bit_width, geometry.block_size, codes)


@run_by_kernels
def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    """Decode codes to levels, clamped to the finite range of the target's type; offsets and scales are not read."""
    flat = flat_memory(target, geometry.numel)
    factor = None if other is None else flat_memory(other, geometry.numel)
    limit = min(torch.finfo(flat.dtype).max, torch.finfo(torch.float32).max)
    for start, stop, columns in chunks(geometry.numel, geometry.block_size):
        q = unpack_chunk(codes, geometry.bit_width, start, stop, columns, geometry.block_size)
        rows = _level_rows(start, stop, geometry, grid)
        y = grid.levels[rows, q.clamp(max=grid.levels.shape[1] - 1)].clamp(-limit, limit).to(flat.dtype)
        flat[start:stop] = y if factor is None else y * factor[start:stop]


def _level_rows(start: int, stop: int, geometry: Geometry, grid: Grid) -> Tensor:
    """Rows of the levels of elements; a single one for all where groups share them."""
    if grid.levels.shape[0] == 1:
        return torch.zeros(1, dtype=torch.int64, device=grid.levels.device)
    return torch.arange(start, stop, device=grid.levels.device) // geometry.inner % geometry.groups


def flat_memory(x: Tensor, numel: int) -> Tensor:
    return x.as_strided((numel,), (1,)) if numel else x.reshape(-1)
