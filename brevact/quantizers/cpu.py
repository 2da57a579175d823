"""CPU tensors handed to the compiled kernels, as addresses.

The functions have the names and arguments of `dispatch`, which allocates the results, and imports this module only
where Numba works.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from brevact import cpu_kernels
from brevact.quantizers.geometry import Geometry
from brevact.quantizers.grid import Grid

if TYPE_CHECKING:
    from brevact.quantizers.packed import PackedSpec
    from brevact.quantizers.uniform import UniformQuantizer

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_KINDS = {
    torch.float32: cpu_kernels.FLOAT32,
    torch.bfloat16: cpu_kernels.BFLOAT16,
    torch.float16: cpu_kernels.FLOAT16,
    torch.float64: cpu_kernels.FLOAT64,
    torch.bool: cpu_kernels.BOOL,
}
MASKED = frozenset(_KINDS)
"""Types that the kernels of masks read."""


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels can read and write these tensors.

    Subclasses may have no memory of their own; zero tensors and the tensors of torch.func transforms have none.

    Args:
        *tensors: Any tensors.

    Returns:
        True for plain CPU tensors with memory.
    """
    try:
        for x in tensors:
            if type(x) not in _PLAIN_TYPES or not x.is_cpu or (x.data_ptr() == 0 and x.numel()):
                return False
    except RuntimeError:  # data_ptr() of a wrapper
        return False
    return True


def quantize_uniform(x: Tensor, spec: PackedSpec[UniformQuantizer], seed: int | Tensor, buffer: Tensor) -> None:
    """See `dispatch.quantize_uniform`.

    Args:
        x: Tensor of the spec's layout.
        spec: Spec of a `UniformQuantizer`.
        seed: Signed 64-bit int or 0-d int64 tensor.
        buffer: Receives the bytes, made by `spec.empty`.
    """
    if not spec.layout.is_dense or x.is_neg():
        x = spec.layout.flatten(x.detach())
    codes = buffer.data_ptr()
    _, minimum, scale = spec.offsets
    plan = spec.cpu_plan or _keep_plan(spec)
    threads = torch.get_num_threads()
    cpu_kernels.quantize_uniform(x.data_ptr(), codes, codes + scale, codes + minimum, int(seed), plan, threads)


def dequantize_uniform(
    buffer: Tensor, spec: PackedSpec[UniformQuantizer], other: Tensor | None, target: Tensor
) -> None:
    """See `dispatch.dequantize_uniform` and `dispatch.dequantize_multiply_uniform`.

    Args:
        buffer: Bytes of the spec.
        spec: Spec of a `UniformQuantizer`.
        other: Dense factor, or None.
        target: Dense result; may be `other`.
    """
    codes = buffer.data_ptr()
    _, minimum, scale = spec.offsets
    factor = 0 if other is None else other.data_ptr()
    plan = spec.cpu_plan or _keep_plan(spec)
    threads = torch.get_num_threads()
    cpu_kernels.dequantize_uniform(codes, codes + scale, codes + minimum, factor, target.data_ptr(), plan, threads)


def random_words(count: int, seed: int | Tensor) -> Tensor:
    """See `row_dispatch.random_words`.

    Args:
        count: Number of words.
        seed: Signed 64-bit int or 0-d int64 tensor.

    Returns:
        (count,) int64 tensor.
    """
    words = torch.empty(count, dtype=torch.int64, device="cpu")
    cpu_kernels.draw_words(int(seed), words.data_ptr(), count, torch.get_num_threads())
    return words


def quantize_rows(
    flat: Tensor, rows: Tensor, spec: PackedSpec[UniformQuantizer], seed: int | Tensor, buffer: Tensor
) -> None:
    """See `row_dispatch.quantize_rows`.

    Args:
        flat: (n,) contiguous tensor that holds the rows.
        rows: (G,) int64 indices of groups.
        spec: Spec of the 1-D tensor of the rows, of a `UniformQuantizer`.
        seed: Signed 64-bit int or 0-d int64 tensor.
        buffer: Receives the bytes of the spec, zero where it has padding.
    """
    codes = buffer.data_ptr()
    _, minimum, scale = spec.offsets
    rows = rows.contiguous()  # in a name, so that its memory lives on
    plan = _plan(spec, rows.data_ptr())
    threads = torch.get_num_threads()
    cpu_kernels.quantize_uniform(flat.data_ptr(), codes, codes + scale, codes + minimum, int(seed), plan, threads)


def dequantize_rows(
    buffer: Tensor, spec: PackedSpec[UniformQuantizer], rows: Tensor, other: Tensor | None, target: Tensor
) -> None:
    """See `row_dispatch.dequantize_rows`.

    Args:
        buffer: Bytes of the spec.
        spec: Spec of the 1-D tensor of the rows, of a `UniformQuantizer`.
        rows: (G,) int64 indices of groups.
        other: (n,) contiguous factor, or None.
        target: (n,) contiguous result; may be `other`.
    """
    codes = buffer.data_ptr()
    _, minimum, scale = spec.offsets
    factor = 0 if other is None else other.data_ptr()
    rows = rows.contiguous()
    plan = _plan(spec, rows.data_ptr())
    threads = torch.get_num_threads()
    cpu_kernels.dequantize_uniform(codes, codes + scale, codes + minimum, factor, target.data_ptr(), plan, threads)


def ranges(flat: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """See `grid_dispatch.ranges`.

    Args:
        flat: (n,) contiguous tensor.
        geometry: Its groups.

    Returns:
        `(low, high)`, each (G,) float32.
    """
    keys = cpu_kernels.range_keys(flat.data_ptr(), _grid_plan(geometry, flat.dtype, False), torch.get_num_threads())
    lowest, highest = torch.from_numpy(keys[:, 0].min(0)), torch.from_numpy(keys[:, 1].max(0))
    low, high = ((key ^ ((key >> 31) & 0x7FFFFFFF)).view(torch.float32) for key in (lowest, highest))
    broken = ~(torch.isfinite(low) & torch.isfinite(high))
    return (low + 0.0).masked_fill(broken, float("nan")), (high + 0.0).masked_fill(broken, float("nan"))


def moments(flat: Tensor, geometry: Geometry, offset: Tensor, inverse: Tensor) -> Tensor:
    """See `grid_dispatch.moments`.

    Args:
        flat: (n,) contiguous tensor.
        geometry: Its groups.
        offset: (G,) contiguous float32 offsets.
        inverse: (G,) contiguous float32 factors.

    Returns:
        (G, 6) int64.
    """
    plan = _grid_plan(geometry, flat.dtype, False)
    pointers = flat.data_ptr(), offset.data_ptr(), inverse.data_ptr()
    return torch.from_numpy(cpu_kernels.moments(*pointers, plan, torch.get_num_threads()).sum(0))


def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: int | Tensor | None, codes: Tensor) -> None:
    """See `grid_dispatch.quantize_grid`.

    Args:
        flat: (n,) contiguous tensor.
        geometry: Its blocks and groups.
        grid: Its levels.
        seed: Signed 64-bit int or 0-d int64 tensor, None for nearest.
        codes: Receives the packed codes.
    """
    stochastic = seed is not None
    levels, steps = grid.levels.contiguous(), grid.steps(stochastic=stochastic).contiguous()
    offset, inverse = _affine(grid.offset, grid.inverse)  # in names, so that their memory lives on
    affine = (offset.data_ptr(), inverse.data_ptr()) if inverse is not None and offset is not None else (0, 0)
    rows = cpu_kernels.GridRows(levels.data_ptr(), steps.data_ptr(), levels.shape[1], levels.shape[0])
    plan = _grid_plan(geometry, flat.dtype, stochastic)
    key = 0 if seed is None else int(seed)
    cpu_kernels.quantize_grid(flat.data_ptr(), codes.data_ptr(), affine, rows, key, plan, torch.get_num_threads())


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    """See `grid_dispatch.dequantize_grid`.

    Args:
        codes: Packed codes.
        geometry: Blocks and groups.
        grid: Levels.
        other: Dense factor, or None.
        target: Dense result; may be `other`.
    """
    levels = grid.levels.contiguous()
    offset, scale = _affine(grid.offset, grid.scale)
    affine = (offset.data_ptr(), scale.data_ptr()) if scale is not None and offset is not None else (0, 0)
    rows = cpu_kernels.GridRows(levels.data_ptr(), 0, levels.shape[1], levels.shape[0])
    factor = 0 if other is None else other.data_ptr()
    plan = _grid_plan(geometry, target.dtype, False)
    pointers = factor, target.data_ptr()
    cpu_kernels.dequantize_grid(codes.data_ptr(), affine, rows, *pointers, plan, torch.get_num_threads())


def _affine(offset: Tensor | None, factor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Both, contiguous, or neither: what is missing is 0 or 1."""
    if factor is None:
        if offset is None:
            return None, None
        factor = torch.ones_like(offset)
    elif offset is None:
        offset = torch.zeros_like(factor)
    return offset.contiguous(), factor.contiguous()


@functools.lru_cache(maxsize=4096)
def _grid_plan(geometry: Geometry, dtype: torch.dtype, stochastic: bool) -> cpu_kernels.UniformPlan:
    """What the kernels of grids need to know of a tensor."""
    return cpu_kernels.UniformPlan(
        numel=geometry.numel,
        bit_width=geometry.bit_width,
        block_size=geometry.block_size,
        inner=geometry.inner,
        groups=geometry.groups,
        one_run=geometry.one_run,
        stochastic=stochastic,
        scale_kind=cpu_kernels.FLOAT32,
        minimum_kind=cpu_kernels.FLOAT32,
        kind=_KINDS[dtype],
    )


def can_pack(codes: Tensor, bit_width: int, block_size: int) -> bool:
    """Whether the kernel packs these codes: its scratch is limited, and it does not extend signs.

    Args:
        codes: Integer tensor.
        bit_width: Bits a code.
        block_size: Codes in a block.

    Returns:
        True if `pack` takes them.
    """
    fits = codes.dtype == torch.uint8 or bit_width <= 8 * codes.itemsize
    return fits and block_size <= cpu_kernels.LARGEST_BLOCK


def pack(codes: Tensor, bit_width: int, block_size: int, packed: Tensor) -> None:
    """See `dispatch.pack`.

    Args:
        codes: (n,) contiguous integer tensor.
        bit_width: Bits a code.
        block_size: Codes in a block.
        packed: uint8 result.
    """
    pointers = codes.data_ptr(), codes.itemsize, packed.data_ptr()
    cpu_kernels.pack_codes(*pointers, bit_width, block_size, codes.numel(), torch.get_num_threads())


def can_unpack(block_size: int) -> bool:
    """Whether the kernel unpacks codes in blocks of this size.

    Args:
        block_size: Codes in a block.

    Returns:
        True if `unpack` takes them.
    """
    return block_size <= cpu_kernels.LARGEST_BLOCK


def unpack(packed: Tensor, bit_width: int, block_size: int, codes: Tensor) -> None:
    """See `dispatch.unpack`.

    Args:
        packed: uint8 tensor.
        bit_width: Bits a code.
        block_size: Codes in a block.
        codes: (numel,) int32 or int64 result.
    """
    pointers = packed.data_ptr(), codes.data_ptr(), codes.itemsize
    cpu_kernels.unpack_codes(*pointers, bit_width, block_size, codes.numel(), torch.get_num_threads())


def pack_mask(flat: Tensor, packed: Tensor) -> None:
    """See `dispatch.pack_mask`.

    Args:
        flat: (n,) contiguous tensor, bool or floating point.
        packed: uint8 result.
    """
    pointers = flat.data_ptr(), _KINDS[flat.dtype], packed.data_ptr()
    cpu_kernels.pack_mask(*pointers, flat.numel(), torch.get_num_threads())


def unpack_mask(packed: Tensor, mask: Tensor) -> None:
    """See `dispatch.unpack_mask`.

    Args:
        packed: uint8 tensor.
        mask: (numel,) bool result.
    """
    cpu_kernels.unpack_mask(packed.data_ptr(), mask.data_ptr(), mask.numel(), torch.get_num_threads())


def mask_multiply(packed: Tensor, numel: int, grad: Tensor, target: Tensor, negative_slope: float) -> None:
    """See `dispatch.mask_multiply`.

    Args:
        packed: uint8 mask.
        numel: Number of elements.
        grad: Dense gradient.
        target: Dense result of its dtype; may be `grad`.
        negative_slope: Factor where the mask is unset.
    """
    pointers = packed.data_ptr(), grad.data_ptr(), target.data_ptr(), _KINDS[grad.dtype]
    cpu_kernels.mask_multiply(*pointers, negative_slope, numel, torch.get_num_threads())


def _keep_plan(spec: PackedSpec[UniformQuantizer]) -> cpu_kernels.UniformPlan:
    plan = spec.cpu_plan = _plan(spec)
    return plan


def _plan(spec: PackedSpec[UniformQuantizer], rows: int = 0) -> cpu_kernels.UniformPlan:
    """What the kernels need to know of a tensor; of one of whole groups of another one, with the address of these."""
    quantizer = spec.quantizer
    geometry = quantizer.geometry(spec.layout)
    return cpu_kernels.UniformPlan(
        numel=geometry.numel,
        bit_width=geometry.bit_width,
        block_size=geometry.block_size,
        inner=geometry.inner,
        groups=geometry.groups,
        one_run=geometry.one_run,
        stochastic=quantizer.is_stochastic,
        scale_kind=_KINDS[quantizer.scale_dtype],
        minimum_kind=_KINDS[quantizer.minimum_dtype],
        kind=_KINDS[spec.layout.dtype],
        rows=rows,
    )
