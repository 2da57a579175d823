"""Launchers: the passes of `quantizers.passes` by compiled kernels, on several threads where that pays.

They have the names, the parameters and the bytes of the laws, and take tensors that :func:`takes` accepts.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels import codes as code_kernels
from brevact.cpu_kernels import grids, groups, masks
from brevact.cpu_kernels import random_words as word_kernels
from brevact.cpu_kernels.dequantize import dequantize_blocks
from brevact.cpu_kernels.memory import LARGEST_BLOCK
from brevact.cpu_kernels.moments import COLUMNS, add_moments
from brevact.cpu_kernels.pooling_blocks import join_maps_tiles, split_maps_tiles
from brevact.cpu_kernels.quantize import quantize_blocks
from brevact.cpu_kernels.segments import look_up_blocks, map_levels_blocks
from brevact.cpu_kernels.tables import KINDS, GroupTable, grid_table, map_table
from brevact.cpu_kernels.teams import share
from brevact.geometry import Geometry, Grid, MapBlocks, Place, Segments, UniformPlan, ranges_of_keys

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def takes(arrays: tuple[Tensor | None, ...]) -> bool:
    """Whether the kernels can read and write these arrays: plain CPU tensors with memory.

    Subclasses may have no memory of their own; zero tensors and the tensors of torch.func transforms have none.
    """
    try:
        for x in arrays:
            if x is None:
                continue
            if type(x) not in _PLAIN_TYPES or not x.is_cpu or (x.data_ptr() == 0 and x.numel()):
                return False
    except RuntimeError:  # data_ptr() of a wrapper
        return False
    return True


def pack_codes(codes: Tensor, bit_width: int, block_size: int, packed: Tensor) -> None:
    """The kernel's scratch is limited, and it does not extend signs."""
    if block_size > LARGEST_BLOCK or (codes.dtype != torch.uint8 and bit_width > 8 * codes.itemsize):
        return NotImplemented
    numel = codes.numel()
    arguments = (codes.data_ptr(), codes.itemsize, packed.data_ptr(), bit_width, block_size, numel)
    share(code_kernels.pack_blocks, arguments, -(-numel // block_size), block_size, torch.get_num_threads())


def unpack_codes(packed: Tensor, bit_width: int, block_size: int, codes: Tensor) -> None:
    """The kernel's scratch is limited."""
    if block_size > LARGEST_BLOCK:
        return NotImplemented
    numel = codes.numel()
    arguments = (packed.data_ptr(), codes.data_ptr(), codes.itemsize, bit_width, block_size, numel)
    share(code_kernels.unpack_blocks, arguments, -(-numel // block_size), block_size, torch.get_num_threads())


def pack_mask(x: Tensor, packed: Tensor) -> None:
    """Types that the kernel does not read are those that quantizers do not take either."""
    kind, numel = KINDS.get(x.dtype), x.numel()
    if kind is None:
        return NotImplemented
    arguments = (x.data_ptr(), kind, packed.data_ptr(), numel)
    share(masks.pack_mask_blocks, arguments, -(-numel // masks.BLOCK), masks.BLOCK, torch.get_num_threads())


def unpack_mask(packed: Tensor, mask: Tensor) -> None:
    """See the law."""
    numel = mask.numel()
    arguments = (packed.data_ptr(), mask.data_ptr(), numel)
    share(masks.unpack_mask_blocks, arguments, -(-numel // masks.BLOCK), masks.BLOCK, torch.get_num_threads())


def mask_multiply(packed: Tensor, numel: int, grad: Tensor, negative_slope: float, target: Tensor) -> None:
    """The kernel reads the factor as its bits."""
    kind = KINDS.get(grad.dtype)
    if kind is None:
        return NotImplemented
    (slope_bits,) = struct.unpack("q", struct.pack("d", negative_slope))
    arguments = (packed.data_ptr(), grad.data_ptr(), target.data_ptr(), kind, slope_bits, numel)
    share(masks.mask_multiply_blocks, arguments, -(-numel // masks.BLOCK), masks.BLOCK, torch.get_num_threads())


def split_maps(flat: Tensor, blocks: MapBlocks, low: Tensor, residual: Tensor) -> None:
    """The kernel's scratch is limited."""
    if blocks.block[2] > LARGEST_BLOCK:
        return NotImplemented
    table = map_table(blocks)
    arguments = (flat.data_ptr(), KINDS[flat.dtype], low.data_ptr(), residual.data_ptr(), table.address)
    share(split_maps_tiles, arguments, table.tiles, table.tile_size, torch.get_num_threads())


def join_maps(residual: Tensor, blocks: MapBlocks, low: Tensor, other: Tensor | None, target: Tensor) -> None:
    """The kernel's scratch is limited."""
    if blocks.block[2] > LARGEST_BLOCK:
        return NotImplemented
    table, factor = map_table(blocks), 0 if other is None else other.data_ptr()
    pointers = residual.data_ptr(), low.data_ptr(), factor, target.data_ptr()
    arguments = (*pointers, KINDS[target.dtype], table.address)
    share(join_maps_tiles, arguments, table.tiles, table.tile_size, torch.get_num_threads())


def ranges(flat: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """See the law."""
    keys = _range_keys(flat.data_ptr(), grid_table(geometry, flat.dtype, groups.NEAREST), torch.get_num_threads())
    return ranges_of_keys(torch.from_numpy(keys))


def moments(flat: Tensor, geometry: Geometry, offset: Tensor, inverse: Tensor) -> Tensor:
    """Parts of the tensor have sums of their own, which are then joined."""
    table, threads = grid_table(geometry, flat.dtype, groups.NEAREST), torch.get_num_threads()
    sums = np.zeros((_parts(geometry, threads), COLUMNS, geometry.groups), dtype=np.int64)
    offset, inverse = offset.contiguous(), inverse.contiguous()  # in names, so that their memory lives on
    pointers = flat.data_ptr(), offset.data_ptr(), inverse.data_ptr(), sums.ctypes.data
    share(
        add_moments,
        (*pointers, table.address, table.blocks, len(sums)),
        len(sums),
        -(-geometry.numel // len(sums)),
        threads,
    )
    return torch.from_numpy(sums.sum(0).T)


def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: int | Tensor | None, codes: Tensor) -> None:
    """See the law."""
    stochastic = seed is not None
    levels, steps = grid.levels.contiguous(), grid.steps(stochastic=stochastic).contiguous()
    offset, inverse = _affine(grid.offset, grid.inverse)  # in names, so that their memory lives on
    affine = (0, 0) if offset is None else (offset.data_ptr(), inverse.data_ptr())
    table = grid_table(geometry, flat.dtype, groups.STOCHASTIC if stochastic else groups.NEAREST)
    rows = levels.data_ptr(), steps.data_ptr(), levels.shape[1], levels.shape[0]
    key = int(seed) if stochastic else 0
    arguments = (flat.data_ptr(), codes.data_ptr(), *affine, *rows, grid.marks, key, table.address)
    share(grids.quantize_grid_blocks, arguments, table.blocks, geometry.block_size, torch.get_num_threads())


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    """See the law."""
    levels = grid.levels.contiguous()
    offset, scale = _affine(grid.offset, grid.scale)
    affine = (0, 0) if offset is None else (offset.data_ptr(), scale.data_ptr())
    table, factor = grid_table(geometry, target.dtype, groups.NEAREST), 0 if other is None else other.data_ptr()
    flagged = grid.scale is not None and bool(torch.signbit(grid.scale).any())
    rows = levels.data_ptr(), levels.shape[1], levels.shape[0]
    arguments = (codes.data_ptr(), *affine, *rows, flagged, factor, target.data_ptr(), table.address)
    share(grids.dequantize_grid_blocks, arguments, table.blocks, geometry.block_size, torch.get_num_threads())


def quantize_uniform(x: Tensor, plan: UniformPlan, seed: int | Tensor | None, buffer: Tensor) -> None:
    """One read of the elements where groups lie in blocks, else two."""
    _quantize(x, _uniform_table(plan, x.dtype, _rounding(plan, seed)), plan, seed, buffer)


def quantize_normalized(
    x: Tensor,
    plan: UniformPlan,
    seed: int | Tensor | None,
    mean: Tensor | None,
    factor: Tensor,
    place: Place,
    buffer: Tensor,
) -> None:
    """Where groups lie in blocks."""
    table = _uniform_table(plan, x.dtype, _rounding(plan, seed))
    if not table.fused:
        return NotImplemented
    words = _words_of(mean, factor, place)
    _quantize(x, table, plan, seed, buffer, ctypes.addressof(words))


def dequantize_uniform(buffer: Tensor, plan: UniformPlan, other: Tensor | None, target: Tensor) -> None:
    """See the law."""
    _dequantize(buffer, _uniform_table(plan, target.dtype, groups.NEAREST), plan, other, target)


def denormalize(
    buffer: Tensor, plan: UniformPlan, mean: Tensor | None, factor: Tensor, place: Place, target: Tensor
) -> None:
    """See the law."""
    words = _words_of(mean, factor, place)
    _dequantize(buffer, _uniform_table(plan, target.dtype, groups.NEAREST), plan, None, target, ctypes.addressof(words))


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
    """The kernel's registers are limited."""
    if plan.geometry.bit_width > 4:
        return NotImplemented
    own, words = _uniform_table(plan, dtype, groups.NEAREST), _words_of_segments(segments)
    norm = None if factor is None or place is None else _words_of(mean, factor, place)
    codes = buffer.data_ptr()
    metadata = codes + plan.scale_at, codes + plan.minimum_at
    norm_at, segments_at = 0 if norm is None else ctypes.addressof(norm), ctypes.addressof(words)
    arguments = (*metadata, norm_at, segments_at, table.data_ptr(), KINDS[table.dtype], own.address)
    entries = segments.slots << plan.geometry.bit_width
    share(map_levels_blocks, arguments, segments.rows // segments.slots, entries, torch.get_num_threads())


def look_up(
    buffer: Tensor, plan: UniformPlan, segments: Segments, table: Tensor, other: Tensor | None, target: Tensor
) -> None:
    """The kernel's registers are limited."""
    if plan.geometry.bit_width > 4:
        return NotImplemented
    own, words = _uniform_table(plan, target.dtype, groups.NEAREST), _words_of_segments(segments)
    factor, kind = (0, 0) if other is None else (other.data_ptr(), KINDS[other.dtype])
    pointers = buffer.data_ptr(), ctypes.addressof(words), table.data_ptr(), factor, kind, target.data_ptr()
    share(look_up_blocks, (*pointers, own.address), own.blocks, plan.geometry.block_size, torch.get_num_threads())


def quantize_rows(flat: Tensor, rows: Tensor, plan: UniformPlan, seed: int | Tensor | None, buffer: Tensor) -> None:
    """Quantize the tensor of some groups of another one, which are read where they lie.

    Args:
        flat: (n,) contiguous tensor that holds the groups.
        rows: (G,) int64 indices of the groups.
        plan: Plan of the 1-D tensor of these groups, each a run of elements.
        seed: Signed 64-bit int or 0-d int64 tensor, None for nearest.
        buffer: Receives the bytes of the plan, zero where it has padding.
    """
    rows = rows.contiguous()  # in a name, so that its memory lives on
    _quantize(flat, _table_of(plan, flat.dtype, _rounding(plan, seed), rows.data_ptr()), plan, seed, buffer)


def dequantize_rows(buffer: Tensor, plan: UniformPlan, rows: Tensor, other: Tensor | None, target: Tensor) -> None:
    """Decode a tensor of groups into their places in another one, and multiply.

    Args:
        buffer: Bytes of the plan.
        plan: Plan of the 1-D tensor of these groups.
        rows: (G,) int64 indices of the groups.
        other: (n,) contiguous factor, or None.
        target: (n,) contiguous result; may be `other`.
    """
    rows = rows.contiguous()
    _dequantize(buffer, _table_of(plan, target.dtype, groups.NEAREST, rows.data_ptr()), plan, other, target)


def random_words(seed: int | Tensor, words: Tensor) -> None:
    """See the law."""
    block, count = word_kernels.BLOCK, words.numel()
    arguments = (int(seed), words.data_ptr(), count)
    share(word_kernels.random_word_blocks, arguments, -(-count // block), block, torch.get_num_threads())


def _quantize(
    x: Tensor, table: GroupTable, plan: UniformPlan, seed: int | Tensor | None, buffer: Tensor, norm: int = 0
) -> None:
    """Quantize, and normalize on the way by the words at an address."""
    source, codes, threads = x.data_ptr(), buffer.data_ptr(), torch.get_num_threads()
    metadata = codes + plan.scale_at, codes + plan.minimum_at
    if not table.fused:
        keys = _range_keys(source, table, threads)
        groups.calibrate_groups(keys.ctypes.data, len(keys), *metadata, table.address)
    arguments = (source, codes, *metadata, 0 if seed is None else int(seed), table.address, norm)
    share(quantize_blocks, arguments, table.blocks, plan.geometry.block_size, threads)


def _dequantize(
    buffer: Tensor, table: GroupTable, plan: UniformPlan, other: Tensor | None, target: Tensor, norm: int = 0
) -> None:
    """Decode, multiply, and undo a normalization by the words at an address."""
    codes, factor = buffer.data_ptr(), 0 if other is None else other.data_ptr()
    metadata = codes + plan.scale_at, codes + plan.minimum_at
    arguments = (codes, *metadata, factor, target.data_ptr(), table.address, norm)
    share(dequantize_blocks, arguments, table.blocks, plan.geometry.block_size, torch.get_num_threads())


def _rounding(plan: UniformPlan, seed: int | Tensor | None) -> int:
    if seed is None:
        return groups.NEAREST
    return groups.DITHERED if plan.dithered else groups.STOCHASTIC


def _table_of(plan: UniformPlan, dtype: torch.dtype, rounding: int, rows: int = 0) -> GroupTable:
    return GroupTable(plan.geometry, dtype, rounding, plan.scale_dtype, plan.minimum_dtype, rows)


_uniform_table = functools.lru_cache(maxsize=4096)(_table_of)


def _words_of(mean: Tensor | None, factor: Tensor, place: Place) -> ctypes.Array:
    """Words of a normalization, as kernels read them."""
    return (ctypes.c_int64 * 6)(0 if mean is None else mean.data_ptr(), factor.data_ptr(), *place)


@functools.lru_cache(maxsize=4096)
def _words_of_segments(segments: Segments) -> ctypes.Array:
    """Words of segments, as kernels read them."""
    return (ctypes.c_int64 * 4)(*segments)


def _affine(offset: Tensor | None, factor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Both, contiguous, or neither: what is missing is 1, or -0.0, to which adding changes no zero either."""
    if factor is None:
        if offset is None:
            return None, None
        factor = torch.ones_like(offset)
    elif offset is None:
        offset = torch.full_like(factor, -0.0)
    return offset.contiguous(), factor.contiguous()


def _range_keys(source: int, table: GroupTable, threads: int) -> np.ndarray:
    """Ranges of the groups of parts of a tensor; a second pass only where something is not finite.

    Args:
        source: Address of the elements.
        table: The tensor's table.
        threads: Most threads to use.

    Returns:
        (parts, 3, G) int32 keys of the lowest and the highest finite value, see `groups.key_of`, and numbers of
        elements that are not finite.
    """
    keys = _extended(groups.extend_ranges, source, table, threads)
    if groups.all_finite(keys):
        return keys
    return _extended(groups.extend_finite_ranges, source, table, threads)


def _extended(extend: Callable[..., None], source: int, table: GroupTable, threads: int) -> np.ndarray:
    keys = np.empty((_parts(table.geometry, threads), 3, table.geometry.groups), dtype=np.int32)
    keys[:, 0], keys[:, 1], keys[:, 2] = groups.HIGHEST_KEY, groups.LOWEST_KEY, 0
    arguments = (source, keys.ctypes.data, table.address, table.blocks, len(keys))
    share(extend, arguments, len(keys), -(-table.geometry.numel // len(keys)), threads)
    return keys


def _parts(geometry: Geometry, threads: int) -> int:
    """Parts of a tensor that threads reduce on their own; what they find stays small beside the tensor."""
    most = max(geometry.numel // (8 * geometry.groups), 1) if geometry.groups else 1
    return max(min(threads, most, geometry.numel // (1 << 16)), 1)
