"""The passes of quantizers over some buckets of a tensor: by compiled kernels that find them, or on copies of them.

Rows are the buckets' indices, ascending; a bucket has `size` elements, the last one of the tensor may have less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from brevact.quantizers.dispatch import kernels_for
from brevact.quantizers.geometry import packed_bytes
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation, PackedSpec
from brevact.quantizers.philox import ROUNDS, philox4x32
from brevact.quantizers.uniform import UniformQuantizer

_CHUNK = 1 << 22  # elements in flight, so that temporaries stay small beside the tensor
_LOW_32 = 0xFFFFFFFF


def random_words(count: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """Random 32-bit words: word i & 3 of `philox4x32((c lo, c hi, 0, 0), seed, ROUNDS)` with c = i >> 2.

    Args:
        count: Number of words.
        seed: Signed 64-bit int or 0-d int64 tensor.
        device: Where to put them.

    Returns:
        (count,) int64 tensor.
    """
    if device.type == "cpu" and (kernels := kernels_for(torch.empty(0, device="cpu"))) is not None:
        return kernels.random_words(count, seed)
    counter = torch.arange(-(-count // 4), device=device)
    zero = torch.zeros_like(counter)
    key = torch.as_tensor(seed, dtype=torch.int64, device=device)
    words = philox4x32((counter & _LOW_32, counter >> 32, zero, zero), key, ROUNDS)
    return torch.stack(words, 1).view(-1)[:count]


def quantize_rows(
    flat: Tensor, rows: Tensor, size: int, spec: PackedSpec[Any], seed: int | Tensor, buffer: Tensor
) -> None:
    """Quantize the buckets of these rows as a 1-D tensor of them.

    Args:
        flat: (n,) contiguous tensor that holds them.
        rows: int64 indices of its buckets.
        size: Elements of a bucket.
        spec: Spec of the 1-D tensor.
        seed: Key of the random bits, a signed 64-bit int or 0-d int64 tensor.
        buffer: Receives the bytes of the spec.
    """
    kernels = _row_kernels(spec, flat, rows, buffer)
    if kernels is not None:
        kernels.quantize_rows(flat, rows, spec, seed, buffer)
        return
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
    """Decode a 1-D tensor of buckets into their places in a tensor, and multiply.

    Args:
        buffer: Bytes of the spec.
        spec: Spec of the 1-D tensor.
        rows: int64 indices of the buckets.
        size: Elements of a bucket.
        other: (n,) contiguous factor, or None.
        target: (n,) contiguous result; may be `other`.
    """
    kernels = _row_kernels(spec, target, rows, buffer, *(() if other is None else (other,)))
    if kernels is not None:
        kernels.dequantize_rows(buffer, spec, rows, other, target)
        return
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


def _row_kernels(spec: PackedSpec[Any], *tensors: Tensor) -> ModuleType | None:
    """Launchers of kernels that find rows by themselves, if there are any: those of uniform quantizers on the CPU."""
    if type(spec.quantizer) is UniformQuantizer and tensors[0].is_cpu:
        return kernels_for(*tensors)
    return None


def _full_rows(flat: Tensor, size: int) -> Tensor:
    """The full buckets of a tensor, a row each."""
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
