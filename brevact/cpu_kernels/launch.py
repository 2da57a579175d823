"""Launchers: from Python integers to kernels, on several threads where that pays."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from brevact.cpu_kernels import codes as code_kernels
from brevact.cpu_kernels import grids, groups, masks, random_words
from brevact.cpu_kernels.dequantize import dequantize_blocks
from brevact.cpu_kernels.moments import COLUMNS, add_moments
from brevact.cpu_kernels.quantize import quantize_blocks
from brevact.cpu_kernels.teams import share


@dataclass(frozen=True, kw_only=True)
class UniformPlan:
    """What the uniform quantizer's kernels need to know of a tensor, besides addresses.

    Args:
        numel: Number of elements.
        bit_width: Bits a code, 1 to 8, 12, 16 or 24.
        block_size: Elements in a packing block, a multiple of 8 of at most `memory.LARGEST_BLOCK`.
        inner: Consecutive elements of one group.
        groups: Number of groups: the group of element e is `e // inner % groups`.
        one_run: Whether each group is a single run of elements.
        stochastic: Rounding.
        scale_kind: Code of the scale's type, see `floats`.
        minimum_kind: Code of the minimum's type.
        kind: Code of the tensor's type.
        rows: Address of int64 indices, where the tensor is made of some groups of another one, at whose address its
            elements are read and written: group g is row rows[g], of `inner` elements. 0 otherwise.
    """

    numel: int
    bit_width: int
    block_size: int
    inner: int
    groups: int
    one_run: bool
    stochastic: bool
    scale_kind: int
    minimum_kind: int
    kind: int
    rows: int = 0
    blocks: int = field(init=False)
    fused: bool = field(init=False)
    table: np.ndarray = field(init=False, repr=False, compare=False)
    address: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Fill the table that the kernels read."""
        fused = self.one_run and self.block_size % self.inner == 0
        table = np.empty(11, dtype=np.int64)
        table[groups.NUMEL] = self.numel
        table[groups.BIT_WIDTH] = self.bit_width
        table[groups.BLOCK] = self.block_size
        table[groups.INNER] = self.inner
        table[groups.GROUPS] = self.groups
        table[groups.FUSED] = fused
        table[groups.STOCHASTIC] = self.stochastic
        table[groups.SCALE_KIND] = self.scale_kind
        table[groups.MINIMUM_KIND] = self.minimum_kind
        table[groups.KIND] = self.kind
        table[groups.ROWS] = self.rows
        object.__setattr__(self, "blocks", -(-self.numel // self.block_size))
        object.__setattr__(self, "fused", fused)
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "address", table.ctypes.data)


@dataclass(frozen=True)
class GridRows:
    """Rows of float32 levels: one for all groups, or one a group.

    Args:
        levels: Address of the levels.
        steps: Address of what rounding needs beside them, one less a row; 0 for decoding.
        size: Levels of a row.
        count: Number of rows.
    """

    levels: int
    steps: int
    size: int
    count: int


def quantize_uniform(
    source: int, codes: int, scale: int, minimum: int, seed: int, plan: UniformPlan, threads: int, norm: int = 0
) -> None:
    """Quantize a dense tensor.

    Args:
        source: Address of the elements.
        codes: Address of the packed codes, written.
        scale: Address of the scales, written.
        minimum: Address of the minima, written.
        seed: Key of the random bits, a signed 64-bit integer; unused for nearest.
        plan: The tensor's plan.
        threads: Most threads to use.
        norm: Address of the words of a normalization (`normalize`), for plans that are fused; 0 for none.
    """
    if not plan.fused:
        _calibrate(source, scale, minimum, plan, threads)
    arguments = (source, codes, scale, minimum, seed, plan.address, norm)
    share(quantize_blocks, arguments, plan.blocks, plan.block_size, threads)


def _calibrate(source: int, scale: int, minimum: int, plan: UniformPlan, threads: int) -> None:
    """Minimum and scale of groups that do not lie inside blocks: ranges of parts of the tensor, then joined."""
    keys = range_keys(source, plan, threads)
    groups.calibrate_groups(keys.ctypes.data, len(keys), scale, minimum, plan.address)


def range_keys(source: int, plan: UniformPlan, threads: int) -> np.ndarray:
    """Ranges of the groups of parts of a tensor; a second pass only where something is not finite.

    Args:
        source: Address of the elements.
        plan: The tensor's plan.
        threads: Most threads to use.

    Returns:
        (parts, 3, G) int32 keys of the lowest and the highest finite value, see `groups.key_of`, and numbers of
        elements that are not finite.
    """
    keys = _extended(groups.extend_ranges, source, plan, threads)
    if groups.all_finite(keys):
        return keys
    return _extended(groups.extend_finite_ranges, source, plan, threads)


def _extended(extend: Callable[..., None], source: int, plan: UniformPlan, threads: int) -> np.ndarray:
    keys = np.empty((_parts(plan, threads), 3, plan.groups), dtype=np.int32)
    keys[:, 0], keys[:, 1], keys[:, 2] = groups.HIGHEST_KEY, groups.LOWEST_KEY, 0
    arguments = (source, keys.ctypes.data, plan.address, plan.blocks, len(keys))
    share(extend, arguments, len(keys), -(-plan.numel // len(keys)), threads)
    return keys


def moments(source: int, offset: int, inverse: int, plan: UniformPlan, threads: int) -> np.ndarray:
    """Counts, sums and sums of squares on either side of each group's offset.

    Args:
        source: Address of the elements.
        offset: Address of the groups' float32 offsets.
        inverse: Address of the groups' float32 factors.
        plan: The tensor's plan.
        threads: Most threads to use.

    Returns:
        (parts, 6, G) int64 sums of parts of the tensor.
    """
    sums = np.zeros((_parts(plan, threads), COLUMNS, plan.groups), dtype=np.int64)
    arguments = (source, offset, inverse, sums.ctypes.data, plan.address, plan.blocks, len(sums))
    share(add_moments, arguments, len(sums), -(-plan.numel // len(sums)), threads)
    return sums


def _parts(plan: UniformPlan, threads: int) -> int:
    """Parts of a tensor that threads reduce on their own; what they find stays small beside the tensor."""
    most = max(plan.numel // (8 * plan.groups), 1) if plan.groups else 1
    return max(min(threads, most, plan.numel // (1 << 16)), 1)


def quantize_grid(
    source: int,
    codes: int,
    affine: tuple[int, int],
    rows: GridRows,
    marks: bool,
    seed: int,
    plan: UniformPlan,
    threads: int,
) -> None:
    """Quantize a dense tensor to codes of levels.

    Args:
        source: Address of the elements.
        codes: Address of the packed codes, written.
        affine: Addresses of the groups' float32 offsets and inverse scales, or zeros.
        rows: The levels.
        marks: Whether elements that are not finite take the last code.
        seed: Key of the random bits, a signed 64-bit integer; unused for nearest.
        plan: The tensor's plan.
        threads: Most threads to use.
    """
    arguments = (source, codes, *affine, rows.levels, rows.steps, rows.size, rows.count, marks, seed, plan.address)
    share(grids.quantize_grid_blocks, arguments, plan.blocks, plan.block_size, threads)


def dequantize_grid(
    codes: int,
    affine: tuple[int, int],
    rows: GridRows,
    flagged: bool,
    other: int,
    target: int,
    plan: UniformPlan,
    threads: int,
) -> None:
    """Decode codes of levels into a dense tensor, and multiply.

    Args:
        codes: Address of the packed codes.
        affine: Addresses of the groups' float32 offsets and scales, or zeros.
        rows: The levels.
        flagged: Whether a scale has its sign bit set.
        other: Address of a factor of the same type and memory order, or 0.
        target: Address of the result, written; may be `other`.
        plan: The tensor's plan.
        threads: Most threads to use.
    """
    arguments = (codes, *affine, rows.levels, rows.size, rows.count, flagged, other, target, plan.address)
    share(grids.dequantize_grid_blocks, arguments, plan.blocks, plan.block_size, threads)


def dequantize_uniform(
    codes: int, scale: int, minimum: int, other: int, target: int, plan: UniformPlan, threads: int, norm: int = 0
) -> None:
    """Decode into a dense tensor, and multiply.

    Args:
        codes: Address of the packed codes.
        scale: Address of the scales.
        minimum: Address of the minima.
        other: Address of a factor of the same type and memory order, or 0.
        target: Address of the result, written; may be `other`.
        plan: The tensor's plan.
        threads: Most threads to use.
        norm: Address of the words that undo a normalization (`normalize`); 0 for none.
    """
    arguments = (codes, scale, minimum, other, target, plan.address, norm)
    share(dequantize_blocks, arguments, plan.blocks, plan.block_size, threads)


def draw_words(seed: int, words: int, count: int, threads: int) -> None:
    """Random 32-bit words of a seed.

    Args:
        seed: A signed 64-bit integer.
        words: Address of int64 words, written.
        count: Number of words.
        threads: Most threads to use.
    """
    block = random_words.BLOCK
    share(random_words.random_word_blocks, (seed, words, count), -(-count // block), block, threads)


def pack_codes(
    source: int, item_size: int, packed: int, bit_width: int, block_size: int, numel: int, threads: int
) -> None:
    """Pack integer codes.

    Args:
        source: Address of the codes.
        item_size: Bytes of an integer: 1, 2, 4 or 8; one narrower than bit_width must be unsigned.
        packed: Address of the packed codes, written.
        bit_width: Bits a code, 1 to 32.
        block_size: Codes in a block, at most `memory.LARGEST_BLOCK`.
        numel: Number of codes.
        threads: Most threads to use.
    """
    arguments = (source, item_size, packed, bit_width, block_size, numel)
    share(code_kernels.pack_blocks, arguments, -(-numel // block_size), block_size, threads)


def unpack_codes(
    packed: int, target: int, item_size: int, bit_width: int, block_size: int, numel: int, threads: int
) -> None:
    """Unpack integer codes.

    Args:
        packed: Address of the packed codes.
        target: Address of the codes, written.
        item_size: Bytes of an integer of the target: 4 or 8.
        bit_width: Bits a code, 1 to 32.
        block_size: Codes in a block, at most `memory.LARGEST_BLOCK`.
        numel: Number of codes.
        threads: Most threads to use.
    """
    arguments = (packed, target, item_size, bit_width, block_size, numel)
    share(code_kernels.unpack_blocks, arguments, -(-numel // block_size), block_size, threads)


def pack_mask(source: int, kind: int, packed: int, numel: int, threads: int) -> None:
    """Pack bools, or the mask `~(x <= 0)` of floats.

    Args:
        source: Address of the elements.
        kind: Code of their type: `masks.BOOL` or one of `floats`.
        packed: Address of the packed mask, written.
        numel: Number of elements.
        threads: Most threads to use.
    """
    share(masks.pack_mask_blocks, (source, kind, packed, numel), -(-numel // masks.BLOCK), masks.BLOCK, threads)


def unpack_mask(packed: int, target: int, numel: int, threads: int) -> None:
    """Unpack a mask to bools.

    Args:
        packed: Address of the packed mask.
        target: Address of the bools, written.
        numel: Number of elements.
        threads: Most threads to use.
    """
    share(masks.unpack_mask_blocks, (packed, target, numel), -(-numel // masks.BLOCK), masks.BLOCK, threads)


def mask_multiply(packed: int, grad: int, target: int, kind: int, slope: float, numel: int, threads: int) -> None:
    """where(mask, grad, slope * grad).

    Args:
        packed: Address of the packed mask.
        grad: Address of the gradients.
        target: Address of the result, written; may be `grad`.
        kind: Code of the type of both.
        slope: Factor where the mask is unset; 0 gives +0.
        numel: Number of elements.
        threads: Most threads to use.
    """
    (slope_bits,) = struct.unpack("q", struct.pack("d", slope))
    arguments = (packed, grad, target, kind, slope_bits, numel)
    share(masks.mask_multiply_blocks, arguments, -(-numel // masks.BLOCK), masks.BLOCK, threads)
