"""Kernel of a batch norm's forward pass: PyTorch's bits for contiguous tensors, in a fraction of its time.

ATen adds the elements of a channel one by one in float64, each sum waiting for the last one. Here many lanes add, in
another order. For nearly every channel a bound on the difference proves its float32 results the same; the elements of
other channels are added one by one.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.memory import (
    advance,
    f32_at,
    f32_scratch,
    f64_scratch,
    float64_of,
    fma,
    i64_at,
    inlined,
    kernel,
    load,
    store,
)
from brevact.cpu_kernels.normalize import words_of
from brevact.cpu_kernels.quantize import quantize
from brevact.cpu_kernels.tables import uniform_table
from brevact.cpu_kernels.teams import share
from brevact.geometry import Place, UniformPlan
from brevact.private_names.of_torch import batch_norm_impl_index, len_dispatch_stack

X, OUT, MEAN, INVSTD, WEIGHT, BIAS, RUNNING_MEAN, RUNNING_VAR = range(8)
"""Addresses of float32 arrays in the words of a call, 0 for missing ones."""

SAMPLES, CHANNELS, SIZE, CHANNELS_OF_BLOCK, MOMENTUM, EPS = range(8, 14)
"""Fields of sizes, of the channels of a block, and of the bits of two float64 numbers."""

PIECE = 1024
"""Elements of a sample that are worked on together, and lanes of the sums: scratch of 17 KiB forward, 41 backward."""

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
def _add_all(x, samples, stride, run, lanes, sums):
    for e in range(lanes):
        store(sums, e, np.float64(0.0))
    for sample in range(samples):
        for piece in range(0, run, PIECE):
            source = advance(x, sample * stride + piece)
            for e in range(min(PIECE, run - piece)):
                store(sums, e, load(sums, e) + np.float64(load(source, e)))


@inlined
def _add_squares(x, samples, stride, run, lanes, mean_of, sums):
    for e in range(lanes):
        store(sums, e, np.float64(0.0))
    for sample in range(samples):
        for piece in range(0, run, PIECE):
            source = advance(x, sample * stride + piece)
            for e in range(min(PIECE, run - piece)):
                store(sums, e, load(sums, e) + _square(load(source, e), load(mean_of, e)))


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
    invstd = np.float32(np.float64(1.0) / np.sqrt(np.float64(variance) + float64_of(load(words, EPS))))
    store(f32_at(load(words, MEAN)), channel, mean)
    store(f32_at(load(words, INVSTD)), channel, invstd)
    momentum = np.float32(float64_of(load(words, MOMENTUM)))
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
        _add_all(x, samples, stride, run, count * lanes, sums)
        for c in range(count):
            total = sum_of(sums, c * lanes, lanes)
            store(totals, c, total)
            fill_run(mean_or_factor_of, c * lanes, lanes, np.float32(total / np.float64(n)))
        _add_squares(x, samples, stride, run, count * lanes, mean_or_factor_of, sums)
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
    samples, channels, size, together = sizes_of(x.shape)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean, invstd = x.new_empty(channels), x.new_empty(channels)
    words = _WORDS(
        *(x.data_ptr(), out.data_ptr(), mean.data_ptr(), invstd.data_ptr()),
        *[0 if y is None else y.data_ptr() for y in given],
        *(samples, channels, size, together, _bits_of(momentum), _bits_of(eps)),
    )
    blocks, elements = -(-channels // together), together * size * samples
    share(normalize_channels, (ctypes.addressof(words),), blocks, elements, torch.get_num_threads())
    return out, mean, invstd


@functools.lru_cache(maxsize=4096)
def sizes_of(shape: torch.Size) -> tuple[int, int, int, int]:
    """Samples, channels, elements of a map, and channels of a block."""
    size = shape[2:].numel()
    return shape[0], shape[1], size, max(TOGETHER // size, 1)


_WORDS = ctypes.c_int64 * (EPS + 1)


@functools.lru_cache(maxsize=1024)
def _bits_of(number: float) -> int:
    return struct.unpack("=q", struct.pack("=d", number))[0]


def packed_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    plan: UniformPlan,
    seed: int | Tensor | None,
    place: Place,
    buffer: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    table = uniform_table(plan, x.dtype, seed is not None)
    if not table.fused:
        return NotImplemented
    found = batch_norm(x, weight, bias, running_mean, running_var, momentum, eps, False)
    if found is not NotImplemented:
        quantize(x, table, plan, seed, buffer, words_of(found[1], found[2], place))
    return found


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
