"""CPU tensors handed to the compiled kernels, as addresses.

The functions have the names and arguments of `dispatch`, which allocates the results, and imports this module only
where Numba works.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brevact import cpu_kernels
from brevact.quantizers.cpu_grids import dequantize_grid, moments, quantize_grid, ranges  # noqa: F401 (parts of this)
from brevact.quantizers.cpu_kinds import KINDS

if TYPE_CHECKING:
    from brevact.quantizers.blocks import MapBlocks
    from brevact.quantizers.normalizing import Groups
    from brevact.quantizers.packed import PackedSpec
    from brevact.quantizers.uniform import UniformQuantizer

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
MASKED = frozenset(KINDS)
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


def quantize_uniform(
    x: Tensor, spec: PackedSpec[UniformQuantizer], seed: int | Tensor, buffer: Tensor, norm: Groups | None = None
) -> None:
    """See `dispatch.quantize_uniform`.

    Args:
        x: Tensor of the spec's layout.
        spec: Spec of a `UniformQuantizer`.
        seed: Signed 64-bit int or 0-d int64 tensor.
        buffer: Receives the bytes, made by `spec.empty`.
        norm: Statistics to normalize by on the way, for plans that :func:`can_normalize`.
    """
    if not spec.layout.is_dense or x.is_neg():
        x = spec.layout.flatten(x.detach())
    codes = buffer.data_ptr()
    _, minimum, scale = spec.offsets
    plan = spec.cpu_plan or _keep_plan(spec)
    threads = torch.get_num_threads()
    words = _words_of(norm)
    address = 0 if words is None else ctypes.addressof(words)
    pointers = x.data_ptr(), codes, codes + scale, codes + minimum
    cpu_kernels.quantize_uniform(*pointers, int(seed), plan, threads, address)


def can_normalize(spec: PackedSpec[UniformQuantizer], norm: Groups) -> bool:
    """Whether tensors of a spec can be normalized as they are quantized: in one pass over them.

    Args:
        spec: Spec of a `UniformQuantizer`.
        norm: Statistics of the tensor's groups.

    Returns:
        True where buckets lie in blocks.
    """
    return bool((spec.cpu_plan or _keep_plan(spec)).fused)


def can_denormalize(spec: PackedSpec[UniformQuantizer], norm: Groups) -> bool:
    """Whether a normalization can be undone while tensors of a spec are decoded.

    Args:
        spec: Spec of a `UniformQuantizer`.
        norm: Statistics of the tensor's groups.

    Returns:
        True.
    """
    return True


def _words_of(norm: Groups | None) -> Any:
    """Words of a normalization, as kernels read them."""
    if norm is None:
        return None
    mean = 0 if norm.mean is None else norm.mean.data_ptr()
    return (ctypes.c_int64 * 6)(mean, norm.scale.data_ptr(), *norm.place)


def dequantize_uniform(
    buffer: Tensor,
    spec: PackedSpec[UniformQuantizer],
    other: Tensor | None,
    target: Tensor,
    norm: Groups | None = None,
) -> None:
    """See `dispatch.dequantize_uniform` and `dispatch.dequantize_multiply_uniform`.

    Args:
        buffer: Bytes of the spec.
        spec: Spec of a `UniformQuantizer`.
        other: Dense factor, or None.
        target: Dense result; may be `other`.
        norm: Means and deviations to undo a normalization by.
    """
    codes = buffer.data_ptr()
    _, minimum, scale = spec.offsets
    factor = 0 if other is None else other.data_ptr()
    plan = spec.cpu_plan or _keep_plan(spec)
    threads = torch.get_num_threads()
    words = _words_of(norm)
    address = 0 if words is None else ctypes.addressof(words)
    pointers = codes, codes + scale, codes + minimum, factor, target.data_ptr()
    cpu_kernels.dequantize_uniform(*pointers, plan, threads, address)


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
        flat: Dense tensor of n elements, bool or floating point.
        packed: uint8 result.
    """
    pointers = flat.data_ptr(), KINDS[flat.dtype], packed.data_ptr()
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
    pointers = packed.data_ptr(), grad.data_ptr(), target.data_ptr(), KINDS[grad.dtype]
    cpu_kernels.mask_multiply(*pointers, negative_slope, numel, torch.get_num_threads())


def can_split(blocks: MapBlocks) -> bool:
    """Whether the kernels take blocks of these sides.

    Args:
        blocks: Division of a tensor into maps and blocks.

    Returns:
        True if `split_maps` and `join_maps` take them.
    """
    return cpu_kernels.can_pool(blocks.block[2])


def split_maps(flat: Tensor, blocks: MapBlocks, low: Tensor, residual: Tensor) -> None:
    """See `blocks_dispatch.split_maps`.

    Args:
        flat: Contiguous elements, map by map.
        blocks: Their division.
        low: float16 means, written.
        residual: float32 result.
    """
    pointers = flat.data_ptr(), KINDS[flat.dtype], low.data_ptr(), residual.data_ptr()
    cpu_kernels.split_maps(*pointers, _pooling_plan(blocks), torch.get_num_threads())


def join_maps(residual: Tensor, blocks: MapBlocks, low: Tensor, other: Tensor | None, target: Tensor) -> None:
    """See `blocks_dispatch.join_maps`.

    Args:
        residual: float32 elements, map by map.
        blocks: Their division.
        low: float16 means.
        other: Contiguous factor, or None.
        target: Contiguous result; may be `residual` or `other`.
    """
    factor = 0 if other is None else other.data_ptr()
    pointers = residual.data_ptr(), low.data_ptr(), factor, target.data_ptr(), KINDS[target.dtype]
    cpu_kernels.join_maps(*pointers, _pooling_plan(blocks), torch.get_num_threads())


@functools.lru_cache(maxsize=4096)
def _pooling_plan(blocks: MapBlocks) -> cpu_kernels.PoolingPlan:
    return cpu_kernels.PoolingPlan(maps=blocks.maps, sides=blocks.sides, block=blocks.block)


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
        scale_kind=KINDS[quantizer.scale_dtype],
        minimum_kind=KINDS[quantizer.minimum_dtype],
        kind=KINDS[spec.layout.dtype],
        rows=rows,
    )
