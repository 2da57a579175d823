"""The one place that chooses who does the work: compiled kernels, or the plain torch reference."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from brevact.private_names.of_torch import is_functional_tensor, is_functorch_tensor
from brevact.quantizers import reference
from brevact.quantizers.geometry import DEFAULT_BLOCK, packed_bytes
from brevact.quantizers.layout import Layout
from brevact.quantizers.philox import seed_value

if TYPE_CHECKING:
    from brevact.quantizers.normalizing import Groups
    from brevact.quantizers.packed import PackedSpec
    from brevact.quantizers.uniform import UniformQuantizer


@functools.cache
def _cpu() -> ModuleType | None:
    """Launchers of the compiled CPU kernels, imported when first needed; None where Numba does not work."""
    try:
        return importlib.import_module("brevact.quantizers.cpu")
    except (ImportError, OSError, SystemError) as error:  # of a shared library that does not load, as well
        warnings.warn(
            f"Numba does not work here ({type(error).__name__}: {error}); CPU tensors are quantized by plain torch, to "
            "the same bytes in several times the time. Check `python -c 'import numba'` and NUMBA_DISABLE_JIT",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _gpu() -> ModuleType:
    """Launchers of the Triton kernels, imported when first needed."""
    return importlib.import_module("brevact.quantizers.gpu")


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """Launchers of compiled kernels that take all these tensors, if there are any (ROCm devices are "cuda" too).

    Results are asked about as well as arguments: under torch.func transforms and FakeTensorMode, what is allocated for
    a plain tensor may have no memory.
    """
    if tensors[0].is_cuda:
        kernels = _gpu() if _has_triton() else None
    else:
        kernels = _cpu()
    return kernels if kernels is not None and kernels.takes(*tensors) else None


def quantize_uniform(x: Tensor, spec: PackedSpec[UniformQuantizer], seed: int | Tensor | None) -> Tensor:
    """Quantize a tensor; see `reference.quantize_uniform`.

    Args:
        x: Tensor of the spec's layout.
        spec: Spec of a `UniformQuantizer`.
        seed: Seed of stochastic rounding, None to draw one; ignored for nearest.

    Returns:
        The bytes, as the spec arranges them.
    """
    quantizer, layout = spec.quantizer, spec.layout
    key = seed_value(seed, x.device) if quantizer.is_stochastic else 0
    buffer = spec.empty(x)
    kernels = kernels_for(x, buffer)
    if kernels is not None:
        kernels.quantize_uniform(x, spec, key, buffer)
        return buffer
    refuse_wrapped(x)
    with torch.no_grad():
        codes, scale, minimum = reference.quantize_uniform(
            layout.flatten(x),
            quantizer.geometry(layout),
            torch.as_tensor(key, device=x.device) if quantizer.is_stochastic else None,
            quantizer.scale_dtype,
            quantizer.minimum_dtype,
        )
        for start, values in zip(spec.offsets, (codes, minimum, scale), strict=True):
            raw = values.contiguous().view(torch.uint8)
            buffer[start : start + raw.numel()] = raw
        return buffer


def quantize_normalized(
    x: Tensor, spec: PackedSpec[UniformQuantizer], seed: int | Tensor | None, norm: Groups
) -> Tensor | None:
    """Normalize and quantize a tensor in one pass; see `normalizing.quantize_normalized`.

    Args:
        x: Tensor of the spec's layout, which is dense; no float64.
        spec: Spec of a `UniformQuantizer`.
        seed: Seed of stochastic rounding, None to draw one; ignored for nearest.
        norm: Statistics of the tensor's groups.

    Returns:
        The bytes, as the spec arranges them; None where no kernel does it in one pass.
    """
    kernels = kernels_for(x, norm.scale)
    if kernels is None or not kernels.can_normalize(spec, norm):
        return None
    buffer = spec.empty(x)
    if not kernels.takes(buffer):
        return None
    key = seed_value(seed, x.device) if spec.quantizer.is_stochastic else 0
    kernels.quantize_uniform(x, spec, key, buffer, norm)
    return buffer


def dequantize_normalized(buffer: Tensor, spec: PackedSpec[UniformQuantizer], target: Tensor, norm: Groups) -> bool:
    """Decode and undo a normalization in one pass; see `normalizing.denormalize`.

    Args:
        buffer: Bytes of the spec.
        spec: Spec of a `UniformQuantizer`, of the dtype of the target.
        target: Tensor whose memory holds the elements densely in memory order; no float64.
        norm: Means and deviations of the tensor's groups.

    Returns:
        Whether there is a kernel that did.
    """
    kernels = kernels_for(target, buffer, norm.scale)
    if kernels is None or not kernels.can_denormalize(spec, norm):
        return False
    kernels.dequantize_uniform(buffer, spec, None, target, norm)
    return True


def dequantize_uniform(buffer: Tensor, spec: PackedSpec[UniformQuantizer], target: Tensor) -> None:
    """Decode; see `reference.dequantize_uniform`.

    Args:
        buffer: Bytes of the spec.
        spec: Spec of a `UniformQuantizer`.
        target: Tensor whose memory holds the elements densely in memory order.
    """
    kernels = kernels_for(target, buffer)
    if kernels is not None:
        kernels.dequantize_uniform(buffer, spec, None, target)
        return
    codes, minimum, scale = spec.split(buffer)
    with torch.no_grad():
        flat = flat_memory(target, spec.layout.numel)
        reference.dequantize_uniform(codes, scale, minimum, spec.quantizer.geometry(spec.layout), flat)


def dequantize_multiply_uniform(
    buffer: Tensor, spec: PackedSpec[UniformQuantizer], other: Tensor, target: Tensor
) -> None:
    """Decode and multiply by a tensor of the same dtype and memory order.

    Args:
        buffer: Bytes of the spec.
        spec: Spec of a `UniformQuantizer`.
        other: Dense factor.
        target: Dense result; may be `other`.
    """
    kernels = kernels_for(target, other, buffer)
    if kernels is not None:
        kernels.dequantize_uniform(buffer, spec, other, target)
        return
    codes, minimum, scale = spec.split(buffer)
    with torch.no_grad():
        target, other = flat_memory(target, spec.layout.numel), flat_memory(other, spec.layout.numel)
        decoded = torch.empty_like(target)
        reference.dequantize_uniform(codes, scale, minimum, spec.quantizer.geometry(spec.layout), decoded)
        torch.mul(decoded, other, out=target)


def pack(codes: Tensor, bit_width: int, block_size: int) -> Tensor:
    """Pack contiguous integer codes; see `reference.pack`.

    Args:
        codes: (n,) integer tensor.
        bit_width: Bits a code.
        block_size: Codes in a block.

    Returns:
        uint8 tensor.
    """
    packed = codes.new_empty(packed_bytes(codes.numel(), bit_width, block_size), dtype=torch.uint8)
    kernels = kernels_for(codes, packed)
    if kernels is not None and kernels.can_pack(codes, bit_width, block_size):
        kernels.pack(codes, bit_width, block_size, packed)
        return packed
    return reference.pack(codes, bit_width, block_size)


def unpack(packed: Tensor, bit_width: int, numel: int, block_size: int) -> Tensor:
    """Unpack codes; see `reference.unpack`.

    Args:
        packed: uint8 tensor.
        bit_width: Bits a code.
        numel: Number of codes.
        block_size: Codes in a block.

    Returns:
        (numel,) int32 tensor, int64 at 32 bits.
    """
    codes = packed.new_empty(numel, dtype=torch.int32 if bit_width < 32 else torch.int64)
    kernels = kernels_for(packed, codes)
    if kernels is not None and kernels.can_unpack(block_size):
        kernels.unpack(packed, bit_width, block_size, codes)
        return codes
    return reference.unpack(packed, bit_width, numel, block_size)


def pack_mask(mask: Tensor, layout: Layout) -> Tensor:
    """Pack a bool mask, or the mask `~(x <= 0)` of a floating-point tensor.

    Args:
        mask: Tensor of the layout.
        layout: Its layout.

    Returns:
        uint8 tensor.
    """
    is_flat = layout.is_dense and layout.numel == mask.numel() and not mask.is_neg()  # nothing to repeat or to turn
    flat = mask if is_flat else layout.flatten(mask.detach())
    packed = mask.new_empty(packed_bytes(layout.numel, 1, DEFAULT_BLOCK), dtype=torch.uint8)
    kernels = kernels_for(flat, packed)
    if kernels is not None and flat.dtype in kernels.MASKED:
        kernels.pack_mask(flat, packed)
        return packed
    refuse_wrapped(mask)
    flat = layout.flatten(mask.detach())
    flat = flat if flat.dtype == torch.bool else ~(flat <= 0)
    return reference.pack(flat.to(torch.uint8), 1, DEFAULT_BLOCK)


def unpack_mask(packed: Tensor, numel: int) -> Tensor:
    """Unpack a mask.

    Args:
        packed: uint8 tensor.
        numel: Number of elements.

    Returns:
        (numel,) bool tensor.
    """
    mask = packed.new_empty(numel, dtype=torch.bool)
    kernels = kernels_for(packed, mask)
    if kernels is not None:
        kernels.unpack_mask(packed.contiguous(), mask)
        return mask
    return reference.unpack(packed, 1, numel, DEFAULT_BLOCK).to(torch.bool)


def mask_multiply(packed: Tensor, numel: int, grad: Tensor, target: Tensor, negative_slope: float) -> None:
    """where(mask, grad, negative_slope * grad), all dense in the mask's memory order.

    Args:
        packed: uint8 mask.
        numel: Number of elements.
        grad: Dense floating-point gradient.
        target: Dense result of its dtype; may be `grad`.
        negative_slope: Factor where the mask is unset; 0 gives +0.
    """
    kernels = kernels_for(grad, target, packed)
    if kernels is not None and grad.dtype in kernels.MASKED:
        kernels.mask_multiply(packed.contiguous(), numel, grad, target, negative_slope)
        return
    flat = flat_memory(grad, numel)
    other = flat * negative_slope if negative_slope else torch.zeros_like(flat)
    torch.where(unpack_mask(packed, numel), flat, other, out=flat_memory(target, numel))


def refuse_wrapped(x: Tensor) -> None:
    """Raise for the tensors of torch.func transforms: in-place arithmetic on their codes mixes levels."""
    if is_functorch_tensor(x) and not is_functional_tensor(x):
        raise TypeError(
            "x: got a tensor of a torch.func transform (vmap, grad, jacrev, ...), which has no memory of its own; "
            "accepted are plain tensors, fake and functional ones; quantize outside the transform"
        )


def flat_memory(x: Tensor, numel: int) -> Tensor:
    """Dense memory as a 1-D tensor."""
    return x.as_strided((numel,), (1,)) if numel else x.reshape(-1)
