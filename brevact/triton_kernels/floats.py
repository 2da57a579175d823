"""Float arithmetic that is bit for bit torch's, compiled and interpreted.

Kernels are launched without contraction to fused multiply-adds; those written out here are exact. Divisions are
`div_rn`: the `/` operator is approximate.
"""

import triton
import triton.language as tl

from brevact.geometry import BEND, FAR, STRETCH
from brevact.private_names.of_triton import InterpretedFunction

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it rounds |x| < 2^22 half to even and leaves the integer in the low bits of the sum."""
_MAGIC_BITS = tl.constexpr(0x4B400000)
_UNIT_2_23, _UNIT_2_23_BITS = tl.constexpr(8388608.0), tl.constexpr(0x4B000000)
"""2^23, whose bits plus a smaller integer are those of the sum: an int-to-float conversion at full rate."""

_UNIT_2_100 = tl.constexpr(2.0**100)
_UNIT_2_7, _UNIT_2_7_BITS = tl.constexpr(128.0), tl.constexpr(0x43000000)
"""2^7, where the last bit of a float is 2^-16."""

_SIGN, _ONE_BITS = tl.constexpr(-(2**31)), tl.constexpr(0x3F800000)
_BEND, _STRETCH, _FAR = tl.constexpr(BEND), tl.constexpr(STRETCH), tl.constexpr(FAR)


@triton.jit
def key_of(x):
    """Float32 to an int32 of the same order. NaNs lie beyond the infinities, so integer reductions keep them."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def minimum(x, y):
    """Smaller of two values; NaN wins."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(x, y):
    """Larger of two values; NaN wins."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nearest_int(x):
    """Float32 with |x| < 2^22 to int32, half to even."""
    return (x + MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS


@triton.jit
def _nearest_65536th(x):
    """65536 x, |x| <= 2^6, to int32, half to even. The product is exact, so the fused multiply-add rounds once."""
    return tl.fma(x, 65536.0, MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS


@triton.jit
def round_stochastic(t, bits, BIT_WIDTH: tl.constexpr):
    """floor(t) + ((rint(65536 (t - floor(t))) + bits) >> 16): up with the probability of the fraction."""
    if BIT_WIDTH <= 6:  # in floats, which run at full rate: t and the random bits in units of 2^-16, exact sums of them
        random = (bits | _UNIT_2_7_BITS).to(tl.float32, bitcast=True)
        q = nearest_int((t - 1.5 * _UNIT_2_7 + random) + (0.5 * _UNIT_2_7 - 0.5 + 2.0**-17))
    else:  # from the nearest integer instead of the floor: both shift by multiples of 65536
        whole = nearest_int(t)
        q = whole + ((_nearest_65536th(t - ((t + MAGIC) - MAGIC)) + bits) >> 16)
    return q


@triton.jit
def float_of_code(q):
    """Codes (uint32) below 2^23 to float32, exact."""
    return (q | _UNIT_2_23_BITS).to(tl.float32, bitcast=True) - _UNIT_2_23


@triton.jit
def round_up(x, UNIT: tl.constexpr):
    """Non-negative float32 up to a value whose last bit is that of a unit, a power of two; 2^16 for bfloat16."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + (UNIT - 1)) & -UNIT).to(tl.float32, bitcast=True)


@triton.jit
def cut(x, UNIT: tl.constexpr):
    """Non-negative float32 down in the same way."""
    return (x.to(tl.int32, bitcast=True) & -UNIT).to(tl.float32, bitcast=True)


@triton.jit
def stretch(x, MAY_BE_FAR: tl.constexpr = True):
    """See `reference.stretched`; zeros lose their sign. Unless MAY_BE_FAR, |x| is at most FAR.

    The quotient is the nearest float32 for every x, without a branch, which `div_rn` has: an inverse that is off by a
    few units in the last place takes a step of Newton's method, and the quotient by it is corrected.
    """
    near = tl.minimum(tl.maximum(x, -_FAR), _FAR) if MAY_BE_FAR else x
    divisor = tl.abs(near) + _BEND
    if _INTERPRETED:  # which rounds products in `fma`
        quotient = tl.div_rn(near, divisor)
    else:
        root = tl.rsqrt(divisor)  # one instruction, which the inverse is not
        inverse = root * root
        inverse = tl.fma(tl.fma(-divisor, inverse, 1.0), inverse, inverse)
        quotient = near * inverse
        quotient = tl.fma(tl.fma(-divisor, quotient, near), inverse, quotient)
    return x + quotient * _STRETCH


@triton.jit
def shrink(y):
    """See `reference.shrunk`."""
    near = tl.minimum(tl.maximum(y, -_FAR), _FAR)
    size = tl.abs(near)
    part = size - (_STRETCH - _BEND)
    root = tl.sqrt_rn(part * part + 4 * _STRETCH * _BEND)
    return y - tl.div_rn(near, size + root + (_STRETCH + _BEND)) * (2 * _STRETCH)


_INTERPRETED = tl.constexpr(isinstance(key_of, InterpretedFunction))


@triton.jit
def least_of(x):
    """[G] smallest of float32 [G, I]; NaN wins."""
    if _INTERPRETED:  # which is slow where reductions are not its own
        least = float_of_key(tl.min(key_of(x), axis=1))
    else:
        least = tl.reduce(x, 1, minimum)
    return least


@triton.jit
def greatest_of(x):
    """[G] largest of float32 [G, I]; NaN wins."""
    if _INTERPRETED:
        greatest = float_of_key(tl.max(key_of(x), axis=1))
    else:
        greatest = tl.reduce(x, 1, maximum)
    return greatest


@triton.jit
def widen(x):
    """A floating-point type of at most 32 bits to float32, exact."""
    if x.dtype == tl.bfloat16:  # one instruction; and the interpreter gets subnormal numbers wrong
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Float32 to a floating-point type, half to even."""
    if _INTERPRETED and dtype == tl.bfloat16:  # GPUs round; the interpreter cuts the low bits off
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        y = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def settle(x, dtype: tl.constexpr):
    """Round float32 to a floating-point type, as each op of torch does, and return the number as float32."""
    if dtype == tl.float32:
        y = x
    else:
        y = widen(cast(x, dtype))
    return y


@triton.jit
def parts_of(divisor):
    """A power of two, the divisor times it, and the inverse of this product, for :func:`quotient_to_clip`."""
    bits = divisor.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    power = ((254 - tl.minimum(tl.maximum(exponent, 1), 253)) << 23).to(tl.float32, bitcast=True)
    near = divisor * power  # of size 1 to 4, and 2^-23 to 1 for subnormal divisors
    power = tl.where(near == 0.0, float("inf"), tl.where(tl.abs(near) == float("inf"), 0.0, power))
    one = ((bits & _SIGN) | _ONE_BITS).to(tl.float32, bitcast=True)
    near = tl.where((near == 0.0) | (tl.abs(near) == float("inf")), one, near)
    return power, near, tl.div_rn(tl.zeros_like(near) + 1.0, near)


@triton.jit
def quotient_to_clip(x, power, divisor, inverse, RECTIFIES: tl.constexpr):
    """max(x, 0) or x by a divisor, as `div_rn`; sizes above 2^90 and below 2^-60 are some such sizes.

    From an inverse rounded to nearest and a quotient off by less than its last place, the next correction rounds to
    nearest (Markstein, 1990); the first one gives such a quotient.
    """
    if RECTIFIES:
        x = minimum(maximum(x, 0.0) * power, _UNIT_2_100)
    else:
        x = maximum(minimum(x * power, _UNIT_2_100), -_UNIT_2_100)
    divisor, inverse = tl.zeros_like(x) + divisor, tl.zeros_like(x) + inverse
    if _INTERPRETED:
        quotient = tl.div_rn(x, divisor)
    else:
        quotient = x * inverse
        for _ in tl.static_range(2):
            quotient = tl.fma(tl.fma(-divisor, quotient, x), inverse, quotient)
    return quotient


@triton.jit
def rint(x, IS_CLIPPED: tl.constexpr = False):
    """Any float32 to the nearest integer, half to even, with the sign of x; NaN stays. 2^23 for more if IS_CLIPPED."""
    size = tl.abs(x)
    if IS_CLIPPED:
        whole = (minimum(size, _UNIT_2_23) + _UNIT_2_23) - _UNIT_2_23
    else:
        whole = tl.where(size < _UNIT_2_23, (size + _UNIT_2_23) - _UNIT_2_23, size)
    return (whole.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & _SIGN)).to(tl.float32, bitcast=True)
