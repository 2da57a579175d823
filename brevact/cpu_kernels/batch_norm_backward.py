"""Kernel of a batch norm's backward pass, for contiguous tensors: ATen's formula, its sums added in another order.

ATen reads maps of less than eight elements one element at a time, and large ones twice from memory. Here the channels
of a block are read together, and stay in the cache until their gradient is written.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.batch_norm import PIECE, TOGETHER, fill_run, is_dense_map, sum_of
from brevact.cpu_kernels.memory import advance, f32_at, f32_scratch, fma, i64_at, inlined, kernel, load, store
from brevact.cpu_kernels.teams import share

X, GRAD, INVSTD, WEIGHT, GRAD_WEIGHT, GRAD_BIAS, SAMPLES, CHANNELS, SIZE, CHANNELS_OF_BLOCK, WRITES = range(11)
"""Fields of the words of a call: addresses of float32 arrays, WEIGHT 0 for none, sizes, and whether X is overwritten by
the gradient."""


@inlined
def _add_products(x, grad, samples, stride, run, lanes, totals, products):
    """Sum the gradients of each lane, and their products with the elements."""
    for e in range(lanes):
        store(totals, e, np.float32(0.0))
        store(products, e, np.float32(0.0))
    for sample in range(samples):
        for piece in range(0, run, PIECE):
            at = sample * stride + piece
            source, factor = advance(x, at), advance(grad, at)
            for e in range(min(PIECE, run - piece)):
                store(totals, e, load(totals, e) + load(factor, e))
                store(products, e, fma(load(factor, e), load(source, e), load(products, e)))


@kernel
def gradient_of_channels(words_at, start, stop):
    """Gradients of blocks start to stop of channels, as the words at this address say."""
    words = i64_at(words_at)
    samples, channels, size = load(words, SAMPLES), load(words, CHANNELS), load(words, SIZE)
    together, stride, n = load(words, CHANNELS_OF_BLOCK), channels * size, np.float64(samples * size)
    invstds, lanes = f32_at(load(words, INVSTD)), min(size, PIECE)
    totals, products = f32_scratch(PIECE), f32_scratch(PIECE)
    mean_of, slope_of, scale_of = f32_scratch(PIECE), f32_scratch(PIECE), f32_scratch(PIECE)
    for index in range(start, stop):
        first = index * together
        count = min(together, channels - first)
        run = count * size
        x, grad = advance(f32_at(load(words, X)), first * size), advance(f32_at(load(words, GRAD)), first * size)
        _add_products(x, grad, samples, stride, run, count * lanes, totals, products)
        for c in range(count):
            invstd = load(invstds, first + c)
            total, product = sum_of(totals, c * lanes, lanes), sum_of(products, c * lanes, lanes)
            store(f32_at(load(words, GRAD_BIAS)), first + c, np.float32(total))
            store(f32_at(load(words, GRAD_WEIGHT)), first + c, np.float32(product * np.float64(invstd)))
            wide = np.float64(invstd)
            scale = invstd
            if load(words, WEIGHT):
                scale = np.float32(invstd * load(f32_at(load(words, WEIGHT)), first + c))
            fill_run(mean_of, c * lanes, lanes, np.float32(total / n))
            fill_run(slope_of, c * lanes, lanes, np.float32(product * wide * wide / n))
            fill_run(scale_of, c * lanes, lanes, scale)
        if load(words, WRITES):
            for sample in range(samples):
                for piece in range(0, run, PIECE):
                    at = sample * stride + piece
                    target, factor = advance(x, at), advance(grad, at)
                    for e in range(min(PIECE, run - piece)):
                        rest = load(factor, e) - load(mean_of, e) - load(target, e) * load(slope_of, e)
                        store(target, e, rest * load(scale_of, e))


def centred_batch_norm_backward(
    x: Tensor, grad: Tensor, weight: Tensor | None, invstd: Tensor, eps: float, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """For contiguous float32 tensors of several channels and elements a map; the gradient takes the memory of `x`."""
    if not is_dense_map(x) or grad.dtype is not torch.float32 or not invstd.is_contiguous():
        return NotImplemented
    if weight is not None and not (weight.dtype is torch.float32 and weight.is_contiguous()):
        return NotImplemented
    grad = grad.contiguous()  # in a name, so that its memory lives on
    samples, channels, size = x.shape[0], x.shape[1], x.shape[2:].numel()
    sums = x.new_empty(2, channels)
    at = sums.data_ptr()
    together = max(TOGETHER // size, 1)
    words = (ctypes.c_int64 * (WRITES + 1))(
        *(x.data_ptr(), grad.data_ptr(), invstd.data_ptr(), 0 if weight is None else weight.data_ptr()),
        *(at, at + 4 * channels, samples, channels, size, together, mask[0]),
    )
    blocks, elements = -(-channels // together), together * size * samples
    share(gradient_of_channels, (ctypes.addressof(words),), blocks, elements, torch.get_num_threads())
    by_weight, by_bias = sums.unbind()
    return x if mask[0] else None, by_weight if mask[1] else None, by_bias if mask[2] else None
