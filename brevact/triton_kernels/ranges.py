"""Kernels that calibrate groups which do not lie inside tiles: the first of two passes over x.

A flat tensor of n elements is [O, G, I]: O repetitions of G groups of I = inner consecutive elements; where every group
is one run, O = 1 and the last group is short. Ranges are int32 keys (`floats.key_of`), so parts of a group may be
joined in any order.
"""

import triton
import triton.language as tl

from brevact.triton_kernels.floats import key_of, widen
from brevact.triton_kernels.groups import HIGHEST_KEY, LOWEST_KEY, calibrate, is_finite, store_metadata, zero_part

RANGES_TILE = 2048


@triton.jit
def tiles_of_part(part, parts, inner, repeats, REPEATS_TILE: tl.constexpr, INNER_TILE: tl.constexpr):
    """First tile of one of `parts` equal shares of a group's tiles, and one past the last."""
    tiles = tl.cdiv(repeats, REPEATS_TILE).to(tl.int64) * tl.cdiv(inner, INNER_TILE)
    share = tl.cdiv(tiles, parts)
    return part * share, tl.minimum((part + 1) * share, tiles)


@triton.jit
def elements_of_tile(
    tile, first_group, numel, inner, groups, repeats,
    REPEATS_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr, INNER_TILE: tl.constexpr,
):  # fmt: skip
    """First element of a tile (int64), distances from it, and which elements exist; whole runs share a tile if
    GROUPS_TILE is above 1, all groups if REPEATS_TILE is."""
    o = tl.arange(0, REPEATS_TILE)[:, None, None]
    g = tl.arange(0, GROUPS_TILE)[None, :, None]
    e = tl.arange(0, INNER_TILE)[None, None, :]
    along = tl.cdiv(inner, INNER_TILE)  # tiles
    o0, e0 = tile // along * REPEATS_TILE, tile % along * INNER_TILE
    start = (o0 * groups + first_group) * inner + e0
    offset = (o * groups + g) * inner + e
    valid = (o < repeats - o0) & (g < groups - first_group) & (e < inner - e0) & (offset < numel - start)
    return start, offset, valid


@triton.jit(do_not_specialize=["repeats"])
def ranges_kernel(
    x_ptr, keys_ptr, numel, inner, groups, repeats,
    REPEATS_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr, INNER_TILE: tl.constexpr,
):  # fmt: skip
    """Keys [parts, 4, groups]: of the lowest and highest finite element, number of others, and 1 where one is 0."""
    first_group, part = tl.program_id(0).to(tl.int64) * GROUPS_TILE, tl.program_id(1)
    low = tl.full((REPEATS_TILE, GROUPS_TILE, INNER_TILE), float("inf"), tl.float32)
    high = -low
    missing = tl.zeros((REPEATS_TILE, GROUPS_TILE, INNER_TILE), tl.int32)
    least = missing + 1
    begin, end = tiles_of_part(part, tl.num_programs(1), inner, repeats, REPEATS_TILE, INNER_TILE)
    for tile in range(begin, end):
        start, offset, valid = elements_of_tile(
            tile, first_group, numel, inner, groups, repeats, REPEATS_TILE, GROUPS_TILE, INNER_TILE
        )
        x = widen(tl.load(x_ptr + start + offset, mask=valid))
        inside = valid & is_finite(x)
        low, high = tl.minimum(low, tl.where(inside, x, low)), tl.maximum(high, tl.where(inside, x, high))
        missing += (valid & ~is_finite(x)).to(tl.int32)
        least = tl.minimum(least, zero_part(x, valid))
    low_GE, high_GE, missing_GE = tl.min(key_of(low), axis=0), tl.max(key_of(high), axis=0), tl.sum(missing, axis=0)
    zero_G = (tl.min(tl.min(least, axis=0), axis=1) == 0).to(tl.int32)
    group = first_group + tl.arange(0, GROUPS_TILE)
    row_ptr = keys_ptr + part.to(tl.int64) * 4 * groups
    tl.store(row_ptr + group, tl.min(low_GE, axis=1), mask=group < groups)
    tl.store(row_ptr + groups + group, tl.max(high_GE, axis=1), mask=group < groups)
    tl.store(row_ptr + 2 * groups + group, tl.sum(missing_GE, axis=1), mask=group < groups)
    tl.store(row_ptr + 3 * groups + group, zero_G, mask=group < groups)


@triton.jit(do_not_specialize=["parts", "groups"], do_not_specialize_on_alignment=["scale_ptr", "minimum_ptr"])
def join_ranges_kernel(
    keys_ptr, scale_ptr, minimum_ptr, inverse_ptr, parts, groups,
    BIT_WIDTH: tl.constexpr, PARTS_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * GROUPS_TILE + tl.arange(0, GROUPS_TILE)
    part = tl.arange(0, PARTS_TILE)[:, None]
    low = tl.full((PARTS_TILE, GROUPS_TILE), HIGHEST_KEY, tl.int32)
    high = tl.full((PARTS_TILE, GROUPS_TILE), LOWEST_KEY, tl.int32)
    missing = tl.zeros((PARTS_TILE, GROUPS_TILE), tl.int32)
    zero = missing
    for start in range(0, parts, PARTS_TILE):
        valid = (start + part < parts) & (group < groups)[None, :]
        offset = (start + part).to(tl.int64) * 4 * groups + group[None, :]
        low = tl.minimum(low, tl.load(keys_ptr + offset, mask=valid, other=HIGHEST_KEY))
        high = tl.maximum(high, tl.load(keys_ptr + offset + groups, mask=valid, other=LOWEST_KEY))
        missing += tl.load(keys_ptr + offset + 2 * groups, mask=valid, other=0)
        zero += tl.load(keys_ptr + offset + 3 * groups, mask=valid, other=0)
    low_G, high_G, missing_G = tl.min(low, axis=0), tl.max(high, axis=0), tl.sum(missing, axis=0)
    base_G, scale_G, inverse_G = calibrate(
        low_G, high_G, missing_G > 0, tl.sum(zero, axis=0) > 0, BIT_WIDTH,
        scale_ptr.dtype.element_ty, minimum_ptr.dtype.element_ty,
    )  # fmt: skip
    store_metadata(scale_ptr + group, scale_G, group < groups)
    store_metadata(minimum_ptr + group, base_G, group < groups)
    tl.store(inverse_ptr + group, inverse_G, mask=group < groups)
