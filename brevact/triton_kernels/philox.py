"""Counter-based random bits: one Philox4x32 call gives the eight elements of a packing column 16 bits each."""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)
"""The fewest rounds that pass BigCrush (Random123)."""

_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_KEY_STEP_0, _KEY_STEP_1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit
def shifts(groups, seed):
    """By how many steps the levels of groups are shifted where they are; see `reference.shifts`."""
    word = _philox(groups, 1, seed)[0]
    return (word >> 8).to(tl.int32).to(tl.float32) * (2.0**-24) - 0.5


@triton.jit
def _philox(index, third: tl.constexpr, seed):
    """philox4x32((index lo, index hi, third, 0), seed, ROUNDS): as `tl.philox`, by one 64-bit product, not two."""
    c0, c1 = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0) + third, tl.zeros_like(c0)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        product0, product1 = c0.to(tl.uint64) * _MULTIPLIER_0, c2.to(tl.uint64) * _MULTIPLIER_1
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        k0, k1 = k0 + _KEY_STEP_0, k1 + _KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def element_bits(words, i: tl.constexpr):
    """The 16 random bits of a column's element i, as int32.

    Grids have one dimension, which compilers do not know: the mask is no constant, of which instructions take one.
    """
    word = words[i % 4]
    bits = word & (0xFFFF + tl.program_id(1)).to(tl.uint32) if i < 4 else word >> 16
    return bits.to(tl.int32)


@triton.jit
def seed_words(tile, seed_ptr, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Random words of a tile's columns; column 0 of a block is its first element / 8. Unused for nearest.

    The seed is loaded as a tensor: words have the loads' layout then; from indices alone, they would go through shared
    memory. A thread loads the one address once.
    """
    first, row, column, _, _ = tile
    if STOCHASTIC:
        seed = tl.load(seed_ptr + (row * 0 + column * 0))
        words = _philox(first // 8 + (row * (BLOCK // 8) + column), 0, seed)
    else:
        words = (0, 0, 0, 0)
    return words
