"""Kernel of a batch norm's backward pass, from its input or packed normalized input: ATen's formula, other order.

ATen reads maps of less than eight elements one element at a time, and large ones twice from memory. Here the channels
of a block are read together, and stay in the cache until their gradient is written.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.arrays import takes
from brevact.cpu_kernels.batch_norm import PIECE, fill_run, is_dense_map, sizes_of, sum_of
from brevact.cpu_kernels.dequantize import dequantize
from brevact.cpu_kernels.memory import (
    advance,
    f32_at,
    f32_scratch,
    f64_scratch,
    fma,
    i64_at,
    inlined,
    kernel,
    load,
    store,
)
from brevact.cpu_kernels.tables import uniform_table
from brevact.cpu_kernels.teams import share
from brevact.geometry import UniformPlan
from brevact.private_names.of_torch import len_dispatch_stack

Z, TARGET, GRAD, MEAN, INVSTD, WEIGHT, GRAD_WEIGHT, GRAD_BIAS, SAMPLES, CHANNELS, SIZE, CHANNELS_OF_BLOCK = range(12)
"""Fields of the words of a call: addresses of float32 arrays, 0 for no TARGET or WEIGHT, and sizes. Z is the input, or,
without MEANs, the decoded normalized one. Its gradient is written to TARGET, which may be Z."""


_TERMS = 32  # of a lane that are added in float32


@inlined
def _flush(parts, lanes, sums):
    for e in range(lanes):
        store(sums, e, load(sums, e) + np.float64(load(parts, e)))
        store(parts, e, np.float32(0.0))


@inlined
def _add_products(
    z, grad, has_mean, mean_of, samples, stride, run, lanes, totals, products, total_parts, product_parts
):
    """Sum each lane's gradients, and their products with elements less means: few in float32, these in float64."""
    for e in range(lanes):
        store(totals, e, np.float64(0.0))
        store(products, e, np.float64(0.0))
        store(total_parts, e, np.float32(0.0))
        store(product_parts, e, np.float32(0.0))
    terms = 0
    for sample in range(samples):
        for piece in range(0, run, PIECE):
            at = sample * stride + piece
            source, factor = advance(z, at), advance(grad, at)
            for e in range(min(PIECE, run - piece)):
                store(total_parts, e, load(total_parts, e) + load(factor, e))
                z_e = load(source, e) - load(mean_of, e) if has_mean else load(source, e)
                store(product_parts, e, fma(load(factor, e), z_e, load(product_parts, e)))
            terms += 1
            if terms == _TERMS:
                _flush(total_parts, lanes, totals)
                _flush(product_parts, lanes, products)
                terms = 0
    _flush(total_parts, lanes, totals)
    _flush(product_parts, lanes, products)


@inlined
def _decoded_ratio(invstd):
    """Inverse deviation times the deviation by which a normalized input is decoded: 1, or 0 for an infinite one."""
    deviation = np.float32(np.float32(1.0) / invstd)
    deviation = np.float32(0.0) if deviation == np.float32(np.inf) else deviation
    return np.float64(invstd) * np.float64(deviation)


@inlined
def _write(z, grad, target, count, mean_of, offset_of, slope_of, scale_of):
    for e in range(count):
        rest = load(grad, e) - load(offset_of, e) - (load(z, e) - load(mean_of, e)) * load(slope_of, e)
        store(target, e, rest * load(scale_of, e))


@inlined
def _write_centred(z, grad, count, offset_of, slope_of, scale_of):
    """Overwrite elements of the normalized input with their gradients."""
    for e in range(count):
        rest = load(grad, e) - load(offset_of, e) - load(z, e) * load(slope_of, e)
        store(z, e, rest * load(scale_of, e))


@kernel
def gradient_of_channels(words_at, start, stop):
    """With z = (x - mean) s of the input: g_b = sum(g), g_w = sum(g z), g_x = w s (g - g_b / n - z g_w / n)."""
    words = i64_at(words_at)
    samples, channels, size = load(words, SAMPLES), load(words, CHANNELS), load(words, SIZE)
    together, stride, n = load(words, CHANNELS_OF_BLOCK), channels * size, np.float64(samples * size)
    invstds, lanes = f32_at(load(words, INVSTD)), min(size, PIECE)
    totals, products = f64_scratch(PIECE), f64_scratch(PIECE)
    total_parts, product_parts = f32_scratch(PIECE), f32_scratch(PIECE)
    mean_of, offset_of = f32_scratch(PIECE), f32_scratch(PIECE)
    slope_of, scale_of = f32_scratch(PIECE), f32_scratch(PIECE)
    for index in range(start, stop):
        first = index * together
        count = min(together, channels - first)
        run = count * size
        z, grad = advance(f32_at(load(words, Z)), first * size), advance(f32_at(load(words, GRAD)), first * size)
        for c in range(count):
            mean = load(f32_at(load(words, MEAN)), first + c) if load(words, MEAN) else np.float32(0.0)
            fill_run(mean_of, c * lanes, lanes, mean)
        sums = totals, products, total_parts, product_parts
        if load(words, MEAN):
            _add_products(z, grad, True, mean_of, samples, stride, run, count * lanes, *sums)
        else:
            _add_products(z, grad, False, mean_of, samples, stride, run, count * lanes, *sums)
        for c in range(count):
            invstd = load(invstds, first + c)
            ratio = np.float64(invstd) if load(words, MEAN) else _decoded_ratio(invstd)
            total = sum_of(totals, c * lanes, lanes)
            product = sum_of(products, c * lanes, lanes) * ratio
            store(f32_at(load(words, GRAD_BIAS)), first + c, np.float32(total))
            store(f32_at(load(words, GRAD_WEIGHT)), first + c, np.float32(product))
            scale = invstd
            if load(words, WEIGHT):
                scale = np.float32(invstd * load(f32_at(load(words, WEIGHT)), first + c))
            fill_run(offset_of, c * lanes, lanes, np.float32(total / n))
            fill_run(slope_of, c * lanes, lanes, np.float32(product * ratio / n))
            fill_run(scale_of, c * lanes, lanes, scale)
        target = load(words, TARGET)
        for sample in range(samples if target else 0):
            for piece in range(0, run, PIECE):
                at, count_of_piece = sample * stride + piece, min(PIECE, run - piece)
                source, factor = advance(z, at), advance(grad, at)
                # One pointer for both: of two that overlap LLVM makes no vectors.
                if target == load(words, Z) and load(words, MEAN):
                    _write(source, factor, source, count_of_piece, mean_of, offset_of, slope_of, scale_of)
                elif target == load(words, Z):
                    _write_centred(source, factor, count_of_piece, offset_of, slope_of, scale_of)
                else:
                    result = advance(f32_at(target), first * size + at)
                    _write(source, factor, result, count_of_piece, mean_of, offset_of, slope_of, scale_of)


_WORDS = ctypes.c_int64 * (CHANNELS_OF_BLOCK + 1)


def packed_batch_norm_backward(
    buffer: Tensor,
    plan: UniformPlan,
    target: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    invstd: Tensor,
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The input's gradient is in `target`. Not under dispatch modes, which would not see it."""
    if not _is_taken(target, grad, weight):
        return NotImplemented
    dequantize(buffer, uniform_table(plan, torch.float32), plan, None, target)
    return _run(target, target, grad, weight, None, invstd, mask)


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    mask: list[bool],
    overwrites: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if not _is_taken(x, grad, weight) or not mean.dtype is invstd.dtype is torch.float32:
        return NotImplemented
    target = x if overwrites or not mask[0] else torch.empty_like(x)
    return _run(x, target, grad, weight, mean, invstd, mask)


def _is_taken(x: Tensor, grad: Tensor, weight: Tensor | None) -> bool:
    """Whether the kernel reads these tensors, and no dispatch mode is there to see them read."""
    if len_dispatch_stack() or not is_dense_map(x) or not takes((grad, x)):
        return False
    if grad.dtype is not torch.float32 or grad.is_neg():
        return False
    return weight is None or (weight.dtype is torch.float32 and weight.is_contiguous())


def _run(
    z: Tensor,
    target: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    invstd: Tensor,
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    grad = grad.contiguous()  # in a name, so that its memory lives on
    samples, channels, size, together = sizes_of(z.shape)
    by_weight, by_bias = z.new_empty(channels), z.new_empty(channels)
    words = _WORDS(
        *(z.data_ptr(), target.data_ptr() if mask[0] else 0, grad.data_ptr()),
        *(0 if mean is None else mean.data_ptr(), invstd.data_ptr(), 0 if weight is None else weight.data_ptr()),
        *(by_weight.data_ptr(), by_bias.data_ptr(), samples, channels, size, together),
    )
    blocks, elements = -(-channels // together), together * size * samples
    share(gradient_of_channels, (ctypes.addressof(words),), blocks, elements, torch.get_num_threads())
    return target if mask[0] else None, by_weight if mask[1] else None, by_bias if mask[2] else None
