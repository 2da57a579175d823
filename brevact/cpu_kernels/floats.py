"""Blocks of any floating-point type to float32 and back, bit for bit as torch casts."""

from __future__ import annotations

import numpy as np
import torch

from brevact.cpu_kernels.intrinsics import advance, bits_of, f32_at, float_of, inlined, load, store, u16_at

FLOAT32, BFLOAT16, FLOAT16 = range(3)
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

_HALF_EXPONENT = np.uint32(0x7C00 << 13)


@inlined
def limit_of(kind):
    """Largest finite value of a type that float32 reaches, by code of the type."""
    if kind == FLOAT16:
        return np.float32(65504.0)
    return np.float32(3.3895313892515355e38) if kind == BFLOAT16 else np.float32(3.4028234663852886e38)


@inlined
def half_to_float(h):
    """float16 bits (uint16) to float32, without denormal arithmetic."""
    bits = np.uint32(np.uint32(h & np.uint16(0x7FFF)) << np.uint32(13))
    exponent = np.uint32(bits & _HALF_EXPONENT)
    bits = np.uint32(bits + np.uint32(112 << 23))
    special = np.uint32(bits + np.uint32(112 << 23))
    small = float_of(np.int32(bits + np.uint32(1 << 23))) - float_of(np.int32(113 << 23))
    value = float_of(np.int32(special if exponent == _HALF_EXPONENT else bits))
    value = small if exponent == np.uint32(0) else value
    return float_of(np.int32(np.uint32(bits_of(value)) | np.uint32(np.uint32(h & np.uint16(0x8000)) << np.uint32(16))))


@inlined
def float_to_half(x):
    """float32 to float16 bits (uint16), half to even."""
    bits = np.uint32(bits_of(x))
    sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(magnitude + np.uint32(0xC8000FFF) + odd) >> np.uint32(13))
    small = np.uint32(np.uint32(bits_of(float_of(np.int32(magnitude)) + np.float32(0.5))) - np.uint32(0x3F000000))
    half = small if magnitude < np.uint32(0x38800000) else normal
    half = np.uint32(0x7C00) if magnitude >= np.uint32(0x47800000) else half
    half = np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else half
    return np.uint16(half | sign)


@inlined
def bfloat16_to_float(h):
    return float_of(np.int32(np.uint32(np.uint32(h) << np.uint32(16))))


@inlined
def float_to_bfloat16(x):
    """float32 to bfloat16 bits (uint16), half to even."""
    bits = np.uint32(bits_of(x))
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return np.uint16(np.uint32(0x7FC0) if x != x else rounded)


@inlined
def stage(source, kind, first, count, scratch):
    """Pointer to elements first to first + count of a tensor as float32: its own, if it is that, else the scratch."""
    if kind == FLOAT32:
        return advance(f32_at(source), first)
    x16 = advance(u16_at(source), first)
    if kind == BFLOAT16:
        for e in range(count):
            store(scratch, e, bfloat16_to_float(load(x16, e)))
    else:
        for e in range(count):
            store(scratch, e, half_to_float(load(x16, e)))
    return scratch


@inlined
def emit(values, target, kind, first, count):
    """Write float32 values to elements first to first + count of a tensor of this kind, rounded half to even."""
    if kind == FLOAT32:
        y32 = advance(f32_at(target), first)
        for e in range(count):
            store(y32, e, load(values, e))
    elif kind == BFLOAT16:
        y16 = advance(u16_at(target), first)
        for e in range(count):
            store(y16, e, float_to_bfloat16(load(values, e)))
    else:
        y16 = advance(u16_at(target), first)
        for e in range(count):
            store(y16, e, float_to_half(load(values, e)))


@inlined
def round_to(kind, values, count):
    """Round float32 values to a kind, half to even, in place."""
    if kind == BFLOAT16:
        for e in range(count):
            store(values, e, bfloat16_to_float(float_to_bfloat16(load(values, e))))
    elif kind == FLOAT16:
        for e in range(count):
            store(values, e, half_to_float(float_to_half(load(values, e))))


@inlined
def emit_product(values, other, other_kind, target, kind, first, count, scratch):
    """Multiply by `other`, round and write; the target may be `other`, and the values are overwritten."""
    factor = stage(other, other_kind, first, count, scratch)
    if kind == FLOAT32:
        y32 = advance(f32_at(target), first)
        for e in range(count):
            store(y32, e, load(values, e) * load(factor, e))
    else:
        for e in range(count):
            store(values, e, load(values, e) * load(factor, e))
        emit(values, target, kind, first, count)


@inlined
def limited(y, limit):
    y = limit if y > limit else y
    return -limit if y < -limit else y


@inlined
def key_of(bits):
    """Float bits to an integer of the same order, and back. NaNs lie beyond the infinities."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inlined
def is_finite(x):
    return abs(x) < np.float32(np.inf)


@inlined
def round_up(x, unit):
    """Round up to values whose last bit is that of a unit; see `reference.calibrate`."""
    return float_of(np.int32(np.int32(bits_of(x) + np.int32(unit - np.int32(1))) & np.int32(-unit)))
