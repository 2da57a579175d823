"""The kernels as operators of PyTorch's dispatcher, which compiled graphs hold.

Each calls the function of its name. Quantizers travel as text (`text_form`), layouts as sizes and strides.

Codes follow the memory order, in which they are decoded: that of the graph. A tensor that comes with other strides than
it was traced with is copied: PyTorch predicts those of some ops wrongly (bfloat16 `silu_backward` in channels_last).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from brevact.geometry import DEFAULT_BLOCK, packed_bytes
from brevact.quantizers import bits, normalizing
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation, PackedSpec
from brevact.quantizers.text_form import from_text

_library = torch.library.Library("brevact", "DEF")  # ends with the last reference to it


def _op(schema: str, implementation: Callable[..., Tensor], *, fake: Callable[..., Tensor]) -> None:
    """Define an op: ``fake`` gives its result without values."""
    name = schema.partition("(")[0]
    _library.define(f"{schema} -> Tensor", tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"brevact::{name}", fake, lib=_library)


def _packed(packed: Tensor, quantizer: str, *layout: Any) -> PackedActivation:
    return PackedActivation(PackedSpec.of(from_text(quantizer), Layout.of_sizes(*layout)), packed)


def _as_traced(x: Tensor, stride: Sequence[int]) -> Tensor:
    layout = Layout.of_sizes(x.shape, stride, x.dtype)
    if x.stride() == layout.stride or layout.matches(x) or layout.numel == 0:
        return x
    distinct = x[tuple(slice(None) if dim in layout.dims else slice(1) for dim in range(x.dim()))]
    rest = (dim for dim in range(x.dim()) if dim not in layout.dims)
    return layout.restore(distinct.permute(*layout.dims, *rest).reshape(-1))


def _bytes(like: Tensor, numel: int, bit_width: int = 1, block_size: int = DEFAULT_BLOCK) -> Tensor:
    return like.new_empty(packed_bytes(numel, bit_width, block_size), dtype=torch.uint8)


def _buffer(x: Tensor, quantizer: str) -> Tensor:
    return x.new_empty(PackedSpec(from_text(quantizer), _layout_of(x)).nbytes, dtype=torch.uint8)


def _layout_of(x: Tensor) -> Layout:
    """The layout of a tensor, whose sizes may be symbols, which have no hash."""
    return Layout(x.shape, x.stride(), x.dtype)


def _restored(x: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return Layout(tuple(size), tuple(stride), dtype).empty(x.device)


_op(  # the buffer of a `PackedActivation`; ``seed`` is None for quantizers that take none
    "quantize(Tensor x, Tensor? seed, str quantizer, SymInt[] stride)",
    lambda x, seed, quantizer, stride: from_text(quantizer).quantize(_as_traced(x, stride), seed).buffer,
    fake=lambda x, seed, quantizer, stride: _buffer(x, quantizer),
)
_op(
    "dequantize(Tensor packed, str quantizer, SymInt[] size, SymInt[] stride, ScalarType dtype)",
    lambda packed, quantizer, *layout: _packed(packed, quantizer, *layout).dequantize(),
    fake=lambda packed, quantizer, *layout: _restored(packed, *layout),
)
_op(
    "quantize_normalized(Tensor x, Tensor? mean, Tensor invstd, Tensor? seed, str quantizer, SymInt[] stride)",
    lambda x, mean, invstd, seed, quantizer, stride: (
        normalizing.quantize_normalized(from_text(quantizer), _as_traced(x, stride), mean, invstd, seed).buffer
    ),
    fake=lambda x, mean, invstd, seed, quantizer, stride: _buffer(x, quantizer),
)
_op(
    "denormalize(Tensor packed, Tensor? mean, Tensor invstd, str quantizer, SymInt[] size, SymInt[] stride, "
    "ScalarType dtype)",
    lambda packed, mean, invstd, quantizer, size, stride, dtype: normalizing.denormalize(
        _packed(packed, quantizer, size, stride, torch.float32), mean, invstd, dtype
    ),
    fake=lambda packed, mean, invstd, quantizer, *layout: _restored(packed, *layout),
)
_op(  # of bool, or of bytes 0 and 1
    "pack_mask(Tensor mask, SymInt[] stride)",
    lambda mask, stride: bits.pack_mask(_as_traced(mask.view(torch.bool), stride)),
    fake=lambda mask, stride: _bytes(mask, _layout_of(mask).numel),
)
_op(
    "unpack_mask(Tensor packed, SymInt[] size, SymInt[] stride, ScalarType dtype)",
    lambda packed, size, stride, dtype: bits.unpack_mask(packed, Layout.of_sizes(size, stride, torch.bool)).view(dtype),
    fake=_restored,
)
_op(
    "pack_codes(Tensor codes, int bit_width, int block_size)",
    bits.pack_codes,
    fake=lambda codes, *widths: _bytes(codes, codes.numel(), *widths),
)
_op(
    "unpack_codes(Tensor packed, int bit_width, SymInt numel, int block_size)",
    bits.unpack_codes,
    fake=lambda packed, bit_width, numel, block_size: packed.new_empty(
        numel, dtype=torch.int32 if bit_width < 32 else torch.int64
    ),
)
