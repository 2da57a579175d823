"""Kernels of a batch norm's forward pass, in PyTorch's bits, and of its backward pass, by ATen's formula.

Forward, ATen adds the elements of a channel one by one in float64, each sum waiting for the last one. Here many lanes
add, in another order. For nearly every channel a bound on the difference proves its float32 results the same; the
elements of other channels are added one by one. Backward, ATen reads maps of less than eight elements one element at a
time, and large ones twice from memory. Here the channels of a block are read together, and stay in the cache until
their gradient is written.
"""

from __future__ import annotations

import functools
import struct
from array import array
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.intrinsics import (
    advance,
    f32_at,
    f32_scratch,
    f64_of,
    f64_scratch,
    fma,
    i64_at,
    inlined,
    kernel,
    load,
    store,
)
from brevact.cpu_kernels.teams import share
from brevact.private_names.of_torch import batch_norm_impl_index, len_dispatch_stack

X, OUT, GRAD, MEAN, INVSTD, WEIGHT, BIAS, RUNNING_MEAN, RUNNING_VAR, GRAD_WEIGHT, GRAD_BIAS = range(11)
"""Addresses of float32 arrays in the words of a call, 0 for missing ones. Backward, the gradient of X is written to
OUT, which may be X, or be missing."""

SAMPLES, CHANNELS, SIZE, CHANNELS_OF_BLOCK, MOMENTUM, EPS = range(11, 17)
"""Fields of sizes, of the channels of a block, and of the bits of two float64 numbers."""

PIECE = 1024
"""Elements of a sample that are worked on together, and lanes of the sums: scratch of 17 KiB forward, 33 backward."""

TOGETHER = 256
"""Elements of a sample in a block of small maps."""

_FEW_LANES = 32
_ROUNDING = np.float64(2.0**-52 * 1.01)
"""Most by which two float64 sums of the same n terms differ, over n and the sum of magnitudes: 2^-53 for each sum."""
_LOST = np.float64(2.0**-126)
"""Most that a square in float32 is smaller than it would be without a least magnitude."""
_SUBNORMAL = 5e-324


@inlined
def fill_run(target, lanes, count, value):
    for e in range(count):
        store(target, lanes + e, value)


@inlined
def _square(x, mean):
    """Squared difference as ATen computes it: in float32, then added in float64."""
    difference = np.float32(x - mean)
    return np.float64(np.float32(difference * difference))


@inlined
def _add(x, samples, stride, run, lanes, mean_of, sums):
    """Sum the elements of each lane, or, with means, their squared differences."""
    for e in range(lanes):
        store(sums, e, np.float64(0.0))
    for sample in range(samples):
        for piece in range(0, run, PIECE):
            source = advance(x, sample * stride + piece)
            for e in range(min(PIECE, run - piece)):
                term = np.float64(load(source, e)) if mean_of is None else _square(load(source, e), load(mean_of, e))
                store(sums, e, load(sums, e) + term)


@inlined
def sum_of(sums, first, lanes):
    """Sum of the lanes of one channel, in place: halves are added until few are left."""
    at = advance(sums, first)
    while lanes > _FEW_LANES:
        half = lanes // 2
        lanes -= half
        other = advance(at, lanes)
        for e in range(half):
            store(at, e, load(at, e) + load(other, e))
    total = np.float64(0.0)
    for e in range(lanes):
        total += np.float64(load(at, e))
    return total


@inlined
def _in_order(x, samples, stride, size, n):
    """Mean and sum of squared differences of one channel, whose elements are added one by one."""
    total, squares = np.float64(0.0), np.float64(0.0)
    for sample in range(samples):
        for e in range(size):
            total += np.float64(load(x, sample * stride + e))
    mean = np.float32(total / np.float64(n))
    for sample in range(samples):
        for e in range(size):
            squares += _square(load(x, sample * stride + e), mean)
    return mean, np.float32(squares)


@inlined
def _is_sure(total, bound, n):
    """Whether all sums up to a bound away have the same float32 quotient, and the same sign if it is 0."""
    low, high = np.float32((total - bound) / np.float64(n)), np.float32((total + bound) / np.float64(n))
    return low == high and (low != np.float32(0.0) or bound == np.float64(0.0))


@inlined
def _store_statistics(words, channel, mean, squares, n):
    """Store mean and inverse deviation of a channel, move the running ones as ATen rounds them; return the inverse."""
    variance = np.float32(squares / np.float32(n))
    invstd = np.float32(np.float64(1.0) / np.sqrt(np.float64(variance) + f64_of(load(words, EPS))))
    store(f32_at(load(words, MEAN)), channel, mean)
    store(f32_at(load(words, INVSTD)), channel, invstd)
    momentum = np.float32(f64_of(load(words, MOMENTUM)))
    rest = np.float32(np.float32(1.0) - momentum)
    if load(words, RUNNING_MEAN):
        running = f32_at(load(words, RUNNING_MEAN))
        kept = np.float32(rest * load(running, channel))
        store(running, channel, np.float32(np.float32(momentum * mean) + kept))
    if load(words, RUNNING_VAR):
        running = f32_at(load(words, RUNNING_VAR))
        moved = np.float64(momentum) * np.float64(np.float32(squares / np.float32(n - 1)))
        store(running, channel, np.float32(moved + np.float64(np.float32(rest * load(running, channel)))))
    return invstd


@kernel
def normalize_channels(words_at, start, stop):
    words = i64_at(words_at)
    samples, channels, size = load(words, SAMPLES), load(words, CHANNELS), load(words, SIZE)
    together, stride, n = load(words, CHANNELS_OF_BLOCK), channels * size, samples * size
    lanes = min(size, PIECE)
    sums, mean_or_factor_of, offset_of = f64_scratch(PIECE), f32_scratch(PIECE), f32_scratch(PIECE)
    totals = f64_scratch(together)
    for index in range(start, stop):
        first = index * together
        count = min(together, channels - first)
        run = count * size
        x, out = advance(f32_at(load(words, X)), first * size), advance(f32_at(load(words, OUT)), first * size)
        _add(x, samples, stride, run, count * lanes, None, sums)
        for c in range(count):
            total = sum_of(sums, c * lanes, lanes)
            store(totals, c, total)
            fill_run(mean_or_factor_of, c * lanes, lanes, np.float32(total / np.float64(n)))
        _add(x, samples, stride, run, count * lanes, mean_or_factor_of, sums)
        for c in range(count):
            mean, squares = load(mean_or_factor_of, c * lanes), sum_of(sums, c * lanes, lanes)
            # The sum of magnitudes is at most the root of n times the sum of squares, which is that of the squared
            # differences and n mean^2; the factor is for the rounding of the squares.
            moment = squares + np.float64(n) * (np.float64(mean) * np.float64(mean) + _LOST)
            most = np.sqrt(np.float64(n) * moment * 1.01)
            sure = _is_sure(load(totals, c), np.float64(n) * _ROUNDING * most, n)
            if sure and _is_sure(squares, np.float64(n) * _ROUNDING * squares, 1):
                sum_of_squares = np.float32(squares)
            else:
                mean, sum_of_squares = _in_order(advance(x, c * size), samples, stride, size, n)
            factor = _store_statistics(words, first + c, mean, sum_of_squares, n)
            if load(words, WEIGHT):
                factor = np.float32(factor * load(f32_at(load(words, WEIGHT)), first + c))
            offset = load(f32_at(load(words, BIAS)), first + c) if load(words, BIAS) else np.float32(0.0)
            fill_run(offset_of, c * lanes, lanes, fma(-mean, factor, offset))
            fill_run(mean_or_factor_of, c * lanes, lanes, factor)
        for sample in range(samples):
            for piece in range(0, run, PIECE):
                source, target = advance(x, sample * stride + piece), advance(out, sample * stride + piece)
                for e in range(min(PIECE, run - piece)):
                    store(target, e, fma(load(source, e), load(mean_or_factor_of, e), load(offset_of, e)))


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Not under dispatch modes, which would not see it, nor where subnormal numbers count as 0 on this thread."""
    if type(momentum) is not float or type(eps) is not float or not eps > 0.0 or len_dispatch_stack():
        return NotImplemented
    given = weight, bias, running_mean, running_var
    if _SUBNORMAL * 1.0 == 0.0 or not is_dense_map(x) or (running_mean is None) != (running_var is None):
        return NotImplemented
    for y in given:
        if y is not None and not (y.dtype is torch.float32 and y.shape == (x.shape[1],) and y.is_contiguous()):
            return NotImplemented
    return _run(x, given, momentum, eps) if gives_bits_of_torch() else NotImplemented


def is_dense_map(x: Tensor) -> bool:
    """Whether it is contiguous float32, several channels and elements a map: of one, ATen may pick another order."""
    shape = x.shape
    if x.dtype is not torch.float32 or len(shape) < 3 or not x.is_contiguous():
        return False
    return shape[1] > 1 and shape[0] > 0 and x.numel() > shape[0] * shape[1]


def _run(x: Tensor, given: tuple[Tensor | None, ...], momentum: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean, invstd = x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
    _launch(normalize_channels, (x, out, None, mean, invstd, *given, None, None), momentum, eps)
    return out, mean, invstd


def _launch(kernel: Any, arrays: tuple[Tensor | None, ...], momentum: float = 0.0, eps: float = 0.0) -> None:
    """Run a kernel on the channels of the first array; all are in the order of the fields."""
    shape = arrays[0].shape  # type: ignore[union-attr]
    samples, channels, size = shape[0], shape[1], shape[2:].numel()
    together = max(TOGETHER // size, 1)
    addresses = (0 if y is None else y.data_ptr() for y in arrays)
    numbers = struct.unpack("=2q", struct.pack("=2d", momentum, eps))
    words = array("q", (*addresses, samples, channels, size, together, *numbers))
    share(kernel, words.buffer_info()[:1], -(-channels // together), together * size * samples)


@functools.cache
def gives_bits_of_torch() -> bool:
    """Whether PyTorch computes a batch norm as the kernel does: releases, and builds for processors, may differ."""
    generator = np.random.default_rng(0)
    for index, shape in enumerate(((5, 70, 3, 3), (3, 37, 2, 2), (2, 3, 33, 33), (4, 5, 29))):
        affine = generator.normal(1.0, 2.0, (4, shape[1])).astype(np.float32)
        values = generator.normal(0.0, 1.0, shape).astype(np.float32) * np.float32(3.0) + np.float32(0.7)
        values[:, 1], values[:, 2] = np.float32(1.5), values[:, 2] + np.float32(1e4)
        x, numbers = torch.from_numpy(values), (0.1 + 0.2 * index, 1e-5)
        given, other = torch.from_numpy(affine.copy()), torch.from_numpy(affine)
        with torch.no_grad():
            for has_affine in (True, False):
                weights = [(y[0], y[1]) if has_affine else (None, None) for y in (given, other)]
                weight, bias = weights[0]
                found = _run(x, (weight, bias, given[2], given[3]), *numbers)
                wanted = batch_norm_impl_index(x, *weights[1], other[2], other[3], True, *numbers, False)
                if not (torch.equal(given, other) and all(map(torch.equal, found, wanted[:3]))):
                    return False
    return True


@inlined
def _add_products(z, grad, mean_of, samples, stride, run, lanes, totals, products):
    """Sum each lane's gradients, and their products with elements less means."""
    for e in range(lanes):
        store(totals, e, np.float64(0.0))
        store(products, e, np.float64(0.0))
    for sample in range(samples):
        for piece in range(0, run, PIECE):
            at = sample * stride + piece
            source, factor = advance(z, at), advance(grad, at)
            for e in range(min(PIECE, run - piece)):
                g = np.float64(load(factor, e))
                store(totals, e, load(totals, e) + g)
                store(products, e, load(products, e) + g * np.float64(load(source, e) - load(mean_of, e)))


@inlined
def _write(z, grad, target, count, mean_of, offset_of, slope_of, scale_of):
    for e in range(count):
        rest = load(grad, e) - load(offset_of, e) - (load(z, e) - load(mean_of, e)) * load(slope_of, e)
        store(target, e, rest * load(scale_of, e))


@kernel
def gradient_of_channels(words_at, start, stop):
    """With z = (x - mean) s of the input: g_b = sum(g), g_w = sum(g z), g_x = w s (g - g_b / n - z g_w / n)."""
    words = i64_at(words_at)
    samples, channels, size = load(words, SAMPLES), load(words, CHANNELS), load(words, SIZE)
    together, stride, n = load(words, CHANNELS_OF_BLOCK), channels * size, np.float64(samples * size)
    invstds, lanes = f32_at(load(words, INVSTD)), min(size, PIECE)
    totals, products = f64_scratch(PIECE), f64_scratch(PIECE)
    mean_of, offset_of = f32_scratch(PIECE), f32_scratch(PIECE)
    slope_of, scale_of = f32_scratch(PIECE), f32_scratch(PIECE)
    for index in range(start, stop):
        first = index * together
        count = min(together, channels - first)
        run = count * size
        z, grad = advance(f32_at(load(words, X)), first * size), advance(f32_at(load(words, GRAD)), first * size)
        for c in range(count):
            fill_run(mean_of, c * lanes, lanes, load(f32_at(load(words, MEAN)), first + c))
        _add_products(z, grad, mean_of, samples, stride, run, count * lanes, totals, products)
        for c in range(count):
            invstd = load(invstds, first + c)
            total = sum_of(totals, c * lanes, lanes)
            product = sum_of(products, c * lanes, lanes) * np.float64(invstd)
            store(f32_at(load(words, GRAD_BIAS)), first + c, np.float32(total))
            store(f32_at(load(words, GRAD_WEIGHT)), first + c, np.float32(product))
            scale = invstd
            if load(words, WEIGHT):
                scale = np.float32(invstd * load(f32_at(load(words, WEIGHT)), first + c))
            fill_run(offset_of, c * lanes, lanes, np.float32(total / n))
            fill_run(slope_of, c * lanes, lanes, np.float32(product * np.float64(invstd) / n))
            fill_run(scale_of, c * lanes, lanes, scale)
        target = load(words, OUT)
        for sample in range(samples if target else 0):
            for piece in range(0, run, PIECE):
                at, count_of_piece = sample * stride + piece, min(PIECE, run - piece)
                source, factor = advance(z, at), advance(grad, at)
                # One pointer for both: of two that overlap LLVM makes no vectors.
                if target == load(words, X):
                    _write(source, factor, source, count_of_piece, mean_of, offset_of, slope_of, scale_of)
                else:
                    result = advance(f32_at(target), first * size + at)
                    _write(source, factor, result, count_of_piece, mean_of, offset_of, slope_of, scale_of)


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
    """Not under dispatch modes, which would not see it."""
    floats = (grad, x, mean, invstd) if weight is None else (grad, x, mean, invstd, weight)
    if len_dispatch_stack() or not is_dense_map(x) or any(y.dtype is not torch.float32 for y in floats):
        return NotImplemented
    if grad.is_neg() or not (weight is None or weight.is_contiguous()):
        return NotImplemented
    by_weight, by_bias = x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
    out = None if not mask[0] else x if overwrites else torch.empty_like(x)
    given = x, out, grad.contiguous(), mean, invstd, weight, None, None, None, by_weight, by_bias
    _launch(gradient_of_channels, given)
    return out, by_weight if mask[1] else None, by_bias if mask[2] else None
