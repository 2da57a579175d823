"""Quantizers on some buckets of a tensor: on copies of them.

Rows are the buckets' indices, ascending; a bucket has `size` elements, the last one of the tensor may have less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from brevact.geometry import packed_bytes
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation, PackedSpec

_CHUNK = 1 << 22  # elements in flight, so that temporaries stay small beside the tensor


def quantize_rows(
    flat: Tensor, rows: Tensor, size: int, spec: PackedSpec[Any], seed: int | Tensor, buffer: Tensor
) -> None:
    """Quantize the buckets at int64 rows of a contiguous (n,) tensor, as a 1-D tensor of them, that of the spec."""
    elements = flat.new_empty(spec.layout.numel)
    tail = elements.numel() % size
    whole = elements.numel() // size
    torch.index_select(_full_rows(flat, size), 0, rows[:whole], out=elements[: whole * size].view(whole, size))
    if tail:
        elements[-tail:] = flat[-tail:]
    buffer.copy_(spec.quantizer.quantize(elements, seed).buffer)


def dequantize_rows(
    buffer: Tensor, spec: PackedSpec[Any], rows: Tensor, size: int, other: Tensor | None, target: Tensor
) -> None:
    """Decode a 1-D tensor of buckets to int64 rows of a contiguous (n,) tensor, times contiguous `other`, maybe it."""
    for first, values in _decoded_chunks(buffer, spec, size):
        whole, tail = values.numel() // size, values.numel() % size
        places = rows[first : first + whole]
        full = values[: whole * size].view(whole, size)
        if other is not None:
            full.mul_(_full_rows(other, size).index_select(0, places))
        _full_rows(target, size).index_copy_(0, places, full)
        if tail:
            ragged = values[-tail:]
            target[-tail:] = ragged if other is None else ragged * other[-tail:]


def _full_rows(flat: Tensor, size: int) -> Tensor:
    full = flat.numel() // size
    return flat[: full * size].view(full, size)


def _decoded_chunks(buffer: Tensor, spec: PackedSpec[Any], size: int) -> Iterator[tuple[int, Tensor]]:
    """(first bucket, values) of runs of whole buckets and whole packing blocks, which are packed tensors in turn."""
    quantizer, layout = spec.quantizer, spec.layout
    geometry = quantizer.geometry(layout)
    step = math.lcm(size, geometry.block_size)
    step *= max(_CHUNK // step, 1)
    if layout.numel <= step:
        yield 0, PackedActivation(spec, buffer).dequantize()
        return
    codes, *metadata = spec.split(buffer)
    for start in range(0, layout.numel, step):
        stop = min(start + step, layout.numel)
        piece: PackedSpec[Any] = PackedSpec(quantizer, Layout((stop - start,), (1,), layout.dtype))
        copy = piece.empty(buffer)
        own, *values = piece.split(copy)
        first, last = (packed_bytes(n, geometry.bit_width, geometry.block_size) for n in (start, stop))
        own.copy_(codes[first:last])
        for to, of in zip(values, metadata, strict=True):
            to.copy_(of[start // size : start // size + to.numel()])
        yield start // size, PackedActivation(piece, copy).dequantize()
