"""CUDA and ROCm tensors handed to the Triton kernels: launches started, nothing synchronised.

The functions have the names and arguments of `dispatch`, which allocates the results, and imports this module only
where Triton is installed and a tensor on such a device comes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from brevact import triton_kernels
from brevact.quantizers.geometry import LARGEST_BLOCK
from brevact.quantizers.gpu_grids import dequantize_grid, moments, quantize_grid, ranges  # noqa: F401 (parts of this module)

if TYPE_CHECKING:
    from brevact.quantizers.blocks import MapBlocks
    from brevact.quantizers.normalizing import Groups
    from brevact.quantizers.packed import PackedSpec
    from brevact.quantizers.uniform import UniformQuantizer

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
MASKED = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.bool))
"""Types that the kernels of masks read."""


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels can read and write these tensors; float64 has no hardware worth a kernel.

    Subclasses may have no memory of their own; zero tensors and the tensors of torch.func transforms have none.

    Args:
        *tensors: Any tensors.

    Returns:
        True for plain tensors with memory on a CUDA or ROCm device, but for float64.
    """
    try:
        for x in tensors:
            if type(x) not in _PLAIN_TYPES or not x.is_cuda or x.dtype is torch.float64:
                return False
            if x.data_ptr() == 0 and x.numel():
                return False
    except RuntimeError:  # data_ptr() of a wrapper
        return False
    return True


def quantize_uniform(
    x: Tensor, spec: PackedSpec[UniformQuantizer], seed: int | Tensor, buffer: Tensor, norm: Groups | None = None
) -> None:
    """See `dispatch.quantize_uniform`. The kernel reads the seed from device memory.

    Args:
        x: Tensor of the spec's layout.
        spec: Spec of a `UniformQuantizer`.
        seed: Signed 64-bit int or 0-d int64 tensor.
        buffer: Receives the bytes, made by `spec.empty`.
        norm: Statistics to normalize by on the way, for plans that :func:`can_normalize`.
    """
    x = x.detach()
    if not spec.layout.is_dense or x.is_neg():
        x = spec.layout.flatten(x)
    plan = plan_of(spec)
    codes, minimum, scale = spec.split(buffer)
    key = None
    if plan.stochastic:
        key = seed.to(x.device) if isinstance(seed, Tensor) else x.new_full((), seed, dtype=torch.int64)
    for launch in triton_kernels.quantize_uniform(x, codes, scale, minimum, key, plan, normalization_of(norm)):
        launch.run()


def can_normalize(spec: PackedSpec[UniformQuantizer], norm: Groups) -> bool:
    """Whether tensors of a spec can be normalized as they are quantized: in one pass over them.

    Args:
        spec: Spec of a `UniformQuantizer`.
        norm: Statistics of the tensor's groups.

    Returns:
        True where programs hold whole groups.
    """
    return plan_of(spec).one_pass and can_denormalize(spec, norm)


def can_denormalize(spec: PackedSpec[UniformQuantizer], norm: Groups) -> bool:
    """Whether a normalization can be undone while tensors of a spec are decoded.

    Args:
        spec: Spec of a `UniformQuantizer`.
        norm: Statistics of the tensor's groups.

    Returns:
        True where the kernels' integers reach.
    """
    normalization = normalization_of(norm)
    return normalization is not None and normalization.fits(spec.layout.numel)


def normalization_of(norm: Groups | None) -> triton_kernels.Normalization | None:
    """Statistics as the kernels take them.

    Args:
        norm: Statistics of a tensor's groups, or None.

    Returns:
        The same, or None.
    """
    return None if norm is None else triton_kernels.Normalization(norm.mean, norm.scale, *norm.place)


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
    codes, minimum, scale = spec.split(buffer)
    plan, normalization = plan_of(spec), normalization_of(norm)
    triton_kernels.dequantize_uniform(codes, scale, minimum, other, target, plan, normalization).run()


def can_pack(codes: Tensor, bit_width: int, block_size: int) -> bool:
    """Whether the kernel packs these codes: its tiles are limited, and it does not extend signs.

    Args:
        codes: Integer tensor.
        bit_width: Bits a code.
        block_size: Codes in a block.

    Returns:
        True if `pack` takes them.
    """
    fits = codes.dtype == torch.uint8 or bit_width <= 8 * codes.itemsize
    return fits and block_size <= LARGEST_BLOCK


def pack(codes: Tensor, bit_width: int, block_size: int, packed: Tensor) -> None:
    """See `dispatch.pack`.

    Args:
        codes: (n,) contiguous integer tensor.
        bit_width: Bits a code.
        block_size: Codes in a block.
        packed: uint8 result.
    """
    triton_kernels.pack_codes(codes, packed, bit_width, block_size).run()


def can_unpack(block_size: int) -> bool:
    """Whether the kernel unpacks codes in blocks of this size.

    Args:
        block_size: Codes in a block.

    Returns:
        True if `unpack` takes them.
    """
    return block_size <= LARGEST_BLOCK


def unpack(packed: Tensor, bit_width: int, block_size: int, codes: Tensor) -> None:
    """See `dispatch.unpack`.

    Args:
        packed: uint8 tensor.
        bit_width: Bits a code.
        block_size: Codes in a block.
        codes: (numel,) int32 or int64 result.
    """
    triton_kernels.unpack_codes(packed, codes, bit_width, block_size).run()


def pack_mask(flat: Tensor, packed: Tensor) -> None:
    """See `dispatch.pack_mask`.

    Args:
        flat: Dense tensor of n elements, bool or floating point.
        packed: uint8 result.
    """
    source = flat.detach()
    triton_kernels.pack_mask(source.view(torch.uint8) if flat.dtype == torch.bool else source, packed).run()


def unpack_mask(packed: Tensor, mask: Tensor) -> None:
    """See `dispatch.unpack_mask`.

    Args:
        packed: uint8 tensor.
        mask: (numel,) bool result.
    """
    triton_kernels.unpack_mask(packed, mask.view(torch.uint8)).run()


def mask_multiply(packed: Tensor, numel: int, grad: Tensor, target: Tensor, negative_slope: float) -> None:
    """See `dispatch.mask_multiply`.

    Args:
        packed: uint8 mask.
        numel: Number of elements.
        grad: Dense gradient.
        target: Dense result of its dtype; may be `grad`.
        negative_slope: Factor where the mask is unset; 0 gives +0.
    """
    triton_kernels.mask_multiply(packed, grad, target, negative_slope, numel).run()


def can_split(blocks: MapBlocks) -> bool:
    """Whether the kernels take a tensor of these maps.

    Args:
        blocks: Division of a tensor into maps and blocks.

    Returns:
        True if `split_maps` and `join_maps` take them.
    """
    return triton_kernels.can_pool(_pooling_plan(blocks))


def split_maps(flat: Tensor, blocks: MapBlocks, low: Tensor, residual: Tensor) -> None:
    """See `blocks_dispatch.split_maps`.

    Args:
        flat: Contiguous elements, map by map.
        blocks: Their division.
        low: float16 means, written.
        residual: float32 result.
    """
    for launch in triton_kernels.split_maps(flat, low, residual, _pooling_plan(blocks)):
        launch.run()


def join_maps(residual: Tensor, blocks: MapBlocks, low: Tensor, other: Tensor | None, target: Tensor) -> None:
    """See `blocks_dispatch.join_maps`.

    Args:
        residual: float32 elements, map by map.
        blocks: Their division.
        low: float16 means.
        other: Contiguous factor, or None.
        target: Contiguous result; may be `residual` or `other`.
    """
    triton_kernels.join_maps(residual, low, other, target, _pooling_plan(blocks)).run()


@functools.lru_cache(maxsize=4096)
def _pooling_plan(blocks: MapBlocks) -> triton_kernels.PoolingPlan:
    return triton_kernels.PoolingPlan(maps=blocks.maps, sides=blocks.sides, block=blocks.block)


@functools.lru_cache(maxsize=4096)
def plan_of(spec: PackedSpec[UniformQuantizer]) -> triton_kernels.UniformPlan:
    """What the kernels need to know of a tensor.

    Args:
        spec: Spec of a `UniformQuantizer`.

    Returns:
        Its plan.
    """
    geometry = spec.quantizer.geometry(spec.layout)
    return triton_kernels.UniformPlan(
        numel=geometry.numel,
        bit_width=geometry.bit_width,
        block_size=geometry.block_size,
        inner=geometry.inner,
        groups=geometry.groups,
        one_run=geometry.one_run,
        stochastic=spec.quantizer.is_stochastic,
    )
