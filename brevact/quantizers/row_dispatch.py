"""Quantizers on some buckets of a tensor: on copies of them.

Rows are the buckets' indices, ascending; a bucket has `size` elements, the last one of the tensor may have less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brevact.quantizers.packed import PackedActivation, PackedSpec


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
    values = PackedActivation(spec, buffer).dequantize()
    whole, tail = values.numel() // size, values.numel() % size
    full = values[: whole * size].view(whole, size)
    if other is not None:
        full.mul_(_full_rows(other, size).index_select(0, rows[:whole]))
    _full_rows(target, size).index_copy_(0, rows[:whole], full)
    if tail:
        ragged = values[-tail:]
        target[-tail:] = ragged if other is None else ragged * other[-tail:]


def _full_rows(flat: Tensor, size: int) -> Tensor:
    full = flat.numel() // size
    return flat[: full * size].view(full, size)
