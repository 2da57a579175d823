"""The kernels as operators of PyTorch's dispatcher, so that traced graphs can hold them.

Each is called by the function of its name for tensors without values (`is_traced`), and calls that function again with
real ones when the graph runs. Quantizers travel as text (`text_form`), layouts as sizes and strides.

Codes follow the memory order, in which they are decoded: that of the graph. A tensor that comes with other strides than
it was traced with is copied: PyTorch foretells those of some ops wrongly (bfloat16 `silu_backward` in channels_last).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from brevact.geometry import DEFAULT_BLOCK, packed_bytes
from brevact.quantizers import bits, normalizing
from brevact.quantizers.layout import Layout, layout_of
from brevact.quantizers.packed import PackedActivation, PackedSpec
from brevact.quantizers.text_form import from_text

_library = torch.library.Library("brevact", "DEF")  # ends with the last reference to it


def _op(schema: str, *, fake: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Define an op: ``fake`` gives its result without values."""

    def register(implementation: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = schema.partition("(")[0]
        _library.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
        _library.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"brevact::{name}", fake, lib=_library)
        return implementation

    return register


def _spec(quantizer: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> PackedSpec[Any]:
    return PackedSpec.of(from_text(quantizer), layout_of(tuple(size), tuple(stride), dtype))


def _as_traced(x: Tensor, stride: Sequence[int]) -> Tensor:
    """``x``, in the memory order that it was traced with."""
    layout = layout_of(tuple(x.shape), tuple(stride), x.dtype)
    if x.stride() == layout.stride or layout.matches(x) or layout.numel == 0:
        return x
    distinct = x[tuple(slice(None) if dim in layout.dims else slice(1) for dim in range(x.dim()))]
    rest = (dim for dim in range(x.dim()) if dim not in layout.dims)
    return layout.restore(distinct.permute(*layout.dims, *rest).reshape(-1))


def _fake_quantize(x: Tensor, seed: Tensor | None, quantizer: str, stride: Sequence[int]) -> Tensor:
    return x.new_empty(PackedSpec.of(from_text(quantizer), Layout.of(x)).nbytes, dtype=torch.uint8)


def _fake_dequantize(
    packed: Tensor, quantizer: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return _like(Layout.of_sizes(size, stride, dtype), packed)


def _fake_dequantize_multiply(
    packed: Tensor, other: Tensor, quantizer: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return _like(Layout.of(other), packed, torch.promote_types(dtype, other.dtype))


def _like(layout: Layout, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_strided(layout.shape, layout.result_stride, dtype=dtype or layout.dtype, device=x.device)


@_op("quantize(Tensor x, Tensor? seed, str quantizer, SymInt[] stride) -> Tensor", fake=_fake_quantize)
def quantize(x: Tensor, seed: Tensor | None, quantizer: str, stride: Sequence[int]) -> Tensor:
    """The buffer of a `PackedActivation`; ``seed`` is a 0-d int64 tensor, None for quantizers that take none."""
    return from_text(quantizer).quantize(_as_traced(x, stride), seed).buffer


@_op(
    "dequantize(Tensor packed, str quantizer, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor",
    fake=_fake_dequantize,
)
def dequantize(
    packed: Tensor, quantizer: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """See `PackedActivation.dequantize`."""
    return PackedActivation(_spec(quantizer, size, stride, dtype), packed).dequantize()


@_op(
    "dequantize_multiply(Tensor packed, Tensor other, str quantizer, SymInt[] size, SymInt[] stride, ScalarType dtype)"
    " -> Tensor",
    fake=_fake_dequantize_multiply,
)
def dequantize_multiply(
    packed: Tensor, other: Tensor, quantizer: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """See `PackedActivation.dequantize_multiply`."""
    return PackedActivation(_spec(quantizer, size, stride, dtype), packed).dequantize_multiply(other)


@_op(
    "quantize_normalized(Tensor x, Tensor? mean, Tensor invstd, Tensor? seed, str quantizer, SymInt[] stride) "
    "-> Tensor",
    fake=lambda x, mean, invstd, seed, quantizer, stride: _fake_quantize(x, seed, quantizer, stride),
)
def quantize_normalized(
    x: Tensor, mean: Tensor | None, invstd: Tensor, seed: Tensor | None, quantizer: str, stride: Sequence[int]
) -> Tensor:
    """The buffer of `normalizing.quantize_normalized`."""
    return normalizing.quantize_normalized(from_text(quantizer), _as_traced(x, stride), mean, invstd, seed).buffer


@_op(
    "denormalize(Tensor packed, Tensor? mean, Tensor invstd, str quantizer, SymInt[] size, SymInt[] stride, "
    "ScalarType dtype) -> Tensor",
    fake=lambda packed, mean, invstd, quantizer, size, stride, dtype: _like(
        Layout.of_sizes(size, stride, dtype), packed
    ),
)
def denormalize(
    packed: Tensor,
    mean: Tensor | None,
    invstd: Tensor,
    quantizer: str,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """See `normalizing.denormalize`."""
    values = PackedActivation(_spec(quantizer, size, stride, torch.float32), packed)
    return normalizing.denormalize(values, mean, invstd, dtype)


@_op(
    "pack_mask(Tensor mask, SymInt[] stride) -> Tensor",
    fake=lambda mask, stride: mask.new_empty(packed_bytes(Layout.of(mask).numel, 1, DEFAULT_BLOCK), dtype=torch.uint8),
)
def pack_mask(mask: Tensor, stride: Sequence[int]) -> Tensor:
    """See `bits.pack_mask`."""
    return bits.pack_mask(_as_traced(mask, stride))


@_op(
    "unpack_mask(Tensor packed, SymInt[] size, SymInt[] stride) -> Tensor",
    fake=lambda packed, size, stride: _like(Layout.of_sizes(size, stride, torch.bool), packed),
)
def unpack_mask(packed: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """See `bits.unpack_mask`."""
    return bits.unpack_mask(packed, layout_of(tuple(size), tuple(stride), torch.bool))


@_op(
    "mask_multiply(Tensor packed, Tensor grad, SymInt[] size, SymInt[] stride, float negative_slope) -> Tensor",
    fake=lambda packed, grad, size, stride, negative_slope: _like(Layout.of(grad), grad),
)
def mask_multiply(
    packed: Tensor, grad: Tensor, size: Sequence[int], stride: Sequence[int], negative_slope: float
) -> Tensor:
    """See `bits.mask_multiply`; ``grad`` lies densely in the memory order of the mask."""
    layout = layout_of(tuple(size), tuple(stride), torch.bool)
    return bits.mask_multiply(packed, layout, grad, negative_slope=negative_slope)


@_op(
    "pack_codes(Tensor codes, int bit_width, int block_size) -> Tensor",
    fake=lambda codes, bit_width, block_size: codes.new_empty(
        packed_bytes(codes.numel(), bit_width, block_size), dtype=torch.uint8
    ),
)
def pack_codes(x: Tensor, bit_width: int, block_size: int) -> Tensor:
    """See `bits.pack_codes`."""
    return bits.pack_codes(x, bit_width, block_size)


@_op(
    "unpack_codes(Tensor packed, int bit_width, SymInt numel, int block_size) -> Tensor",
    fake=lambda packed, bit_width, numel, block_size: packed.new_empty(
        numel, dtype=torch.int32 if bit_width < 32 else torch.int64
    ),
)
def unpack_codes(packed: Tensor, bit_width: int, numel: int, block_size: int) -> Tensor:
    """See `bits.unpack_codes`."""
    return bits.unpack_codes(packed, bit_width, numel, block_size)
