"""The arithmetic of the references in plain torch: random bits, calibration, rounding, and packing in eight planes.

Shapes: n elements, G groups, K blocks of 8 planes by W columns, b bits a code. Every tensor here is flat (memory
order) and float arithmetic is float32 with one rounding an operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from brevact.geometry import BEND, FAR, STRETCH, Geometry, packed_bytes
from brevact.quantizers.brief import brief

ROUNDS = 7
"""Philox rounds of the stochastic quantizers: the fewest that pass BigCrush (Random123)."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_32 = 0xFFFFFFFF


def draw_seed(device: torch.device | str = "cpu") -> Tensor:
    """Draw a 0-d int64 seed in [0, 2^63 - 1) from torch's default generator of a device, without a synchronisation."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)


def seed_value(seed: int | Tensor | None, device: torch.device) -> int | Tensor:
    """Check a seed, an int taken modulo 2**64 or a 0-d int64 tensor, or draw one where it is None.

    The result is an int in [-2**63, 2**63) or a tensor; a seed of another kind raises a TypeError.
    """
    if type(seed) is int and -(2**63) <= seed < 2**63:
        return seed
    if seed is None:
        return draw_seed(device)
    if isinstance(seed, Tensor) and seed.dtype == torch.int64 and seed.dim() == 0:
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(
            f"seed: got {brief(seed)}; accepted are an int, a 0-d torch.int64 tensor (by quantizers.draw_seed), or "
            "None; pass int(seed)"
        )
    return (seed + 2**63) % 2**64 - 2**63


def moved_seed(seed: int | Tensor, shift: int) -> int | Tensor:
    """Another seed of the same kind: an int in [-2**63, 2**63), or a 0-d int64 tensor, plus a number, modulo 2**64."""
    shift = (shift + 2**63) % 2**64 - 2**63
    return seed + shift if isinstance(seed, Tensor) else (seed + shift + 2**63) % 2**64 - 2**63


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Tensor, rounds: int) -> tuple[Tensor, ...]:
    """Philox4x32: four 32-bit words of random bits for each 128-bit counter under a 64-bit key.

    Counters are four int64 tensors of one shape that hold words, least significant first, and so are the results. The
    key is a 0-d int64 tensor. Most libraries have 10 rounds, and this one `ROUNDS`.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011, section 3.3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _LOW_32, (key >> 32) & _LOW_32
    for _ in range(rounds):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # the low 64 bits, which is all there are
        c0 = ((product1 >> 32) & _LOW_32) ^ c1 ^ k0
        c2 = ((product0 >> 32) & _LOW_32) ^ c3 ^ k1
        c1, c3 = product1 & _LOW_32, product0 & _LOW_32
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_32, (k1 + _KEY_STEPS[1]) & _LOW_32
    return c0, c1, c2, c3


def words_of(index: Tensor, seed: Tensor, third: int = 0) -> tuple[Tensor, ...]:
    """The words of `philox4x32((c lo, c hi, third, 0), seed, ROUNDS)` for (n,) int64 indices c."""
    zero = torch.zeros_like(index)
    return philox4x32((index & _LOW_32, index >> 32, zero + third, zero), seed, ROUNDS)


def column_bits(columns: Tensor, seed: Tensor) -> Tensor:
    """16 random bits for each of the eight elements of packing columns: (8, C) int64 of (C,) int64 column indices c.

    Element i takes half `i >> 2` (0 = the low one) of word `i & 3` of `words_of(c, seed)`.
    """
    words = torch.stack(words_of(columns, seed))
    return torch.cat((words & 0xFFFF, words >> 16))


SMALLEST_SCALE = 2.0**-126
"""Smallest normal float32: the inverse of a scale stays finite."""
LARGEST_RANGE, LARGEST_END = 2.0**128 - 2.0**122, 2.0**125
"""A range as large as the first, for which float32 has no grid whose scale is rounded up, gets ends of the second."""
LARGEST_ALIGNED = 2.0**126
"""The same of grids with a level at zero, whose scale may be twice that of others."""
ZERO_UNITS = {torch.float32: (1 << 8, 1), torch.bfloat16: (1 << 20, 1 << 20)}
"""By the type of the minimum: last bits that the code of zero and the scale may have in float32, so that their product
is a minimum; 16 and 24 significant bits, or 4 each."""

LEAST_SPREAD = 8192
"""Mean of d (256 - d) from which on a group shifts its levels: 65536 / 8, three quarters of the even spread's."""
MOST_ALIKE = 6
"""See `spreads`: one group of twenty whose elements are spread at random has more."""

_CHUNK = 1 << 18  # elements in flight, so that temporaries stay small beside the tensor


def pack(codes: Tensor, bit_width: int, block_size: int) -> Tensor:
    """Pack (n,) integer codes of 1 to 32 bits, the lowest ones, into eight-plane blocks (see `PackedActivation`)."""
    out = codes.new_empty(packed_bytes(codes.numel(), bit_width, block_size), dtype=torch.uint8)
    for start, stop, _ in chunks(codes.numel(), block_size):
        pack_chunk(codes[start:stop], start, bit_width, block_size, out)
    return out


def pack_chunk(codes: Tensor, start: int, bit_width: int, block_size: int, out: Tensor) -> None:
    """Pack a run of whole blocks, or the ragged last block, whose first code has this index, into its place."""
    columns = min(block_size // 8, -(-codes.numel() // 8))
    padding = 0, -codes.numel() % (8 * columns)  # fills up the last block with zeros
    codes_K8W = torch.nn.functional.pad(codes.to(torch.int64), padding).view(-1, 8, columns)
    first = packed_bytes(start, bit_width, block_size)
    bytes_KbW = torch.zeros(codes_K8W.shape[0], bit_width, columns, dtype=torch.int64, device=codes.device)
    for i, k, shift in _overlaps(bit_width):
        code = codes_K8W[:, i] & ((1 << bit_width) - 1)
        bytes_KbW[:, k].bitwise_or_((code << shift if shift >= 0 else code >> -shift) & 0xFF)
    out[first : first + bytes_KbW.numel()] = bytes_KbW.flatten()


def unpack(packed: Tensor, bit_width: int, numel: int, block_size: int) -> Tensor:
    """The inverse of `pack`: (n,) int32 codes, or int64 at 32 bits."""
    out = torch.empty(numel, dtype=torch.int32 if bit_width < 32 else torch.int64, device=packed.device)
    for start, stop, columns in chunks(numel, block_size):
        out[start:stop] = unpack_chunk(packed, bit_width, start, stop, columns, block_size)
    return out


def calibrate(flat: Tensor, geometry: Geometry, scale_dtype: torch.dtype, minimum_dtype: torch.dtype):
    """(G,) minimum m and scale s of each group, rounded to the types in which they are stored, and which hold zeros.

    m = round_down(min), s = round_up((max - m) / levels) with levels = 2^b - 1, 0 for a constant group. A group that
    holds NaN or an infinity, too, is flagged: min and max are those of its finite elements, levels = max(2^b - 2, 1),
    and the sign bit of s is set, that of 0 as well. A group without a finite element gets m = s = NaN. See `bounded`
    for ranges that float32 has no room for.

    A group with an element that is exactly 0 has a level there: see `aligned`. At 1 bit there is none where elements
    have both signs; a flagged group of 1 bit, in which one code is left, gets m = s = 0.
    """
    low, high, missing, has_zero = group_ranges(flat, geometry)
    flagged, empty = missing > 0, low > high
    low, high = low.masked_fill(empty, 0.0) + 0.0, high.masked_fill(empty, 0.0)  # + 0.0 turns -0.0 into 0.0
    top = (1 << geometry.bit_width) - 1
    is_aligned = has_zero & (low < 0.0) & ((high <= 0.0) | (top > 1))
    low, high = bounded(low, high, is_aligned)
    levels = torch.where(flagged, max(top - 1, 1), top).float()  # a tensor: CUDA multiplies by a scalar's inverse
    minimum = low
    if minimum_dtype == torch.bfloat16:
        bits = low.view(torch.int32)
        minimum = (torch.where(bits < 0, bits + 0xFFFF, bits) & ~0xFFFF).view(torch.float32)
        minimum = minimum.clamp(min=torch.finfo(torch.bfloat16).min)
    width = high - minimum
    scale = width / levels
    scale = round_up(scale, 1 << 16) if scale_dtype == torch.bfloat16 else scale
    scale = torch.where(width > 0, scale.clamp(min=SMALLEST_SCALE), 0.0)
    code, own_scale = aligned(low, high, levels, geometry.bit_width, scale_dtype, minimum_dtype)
    minimum, scale = torch.where(is_aligned, -(own_scale * code), minimum), torch.where(is_aligned, own_scale, scale)
    if top == 1:
        alone = flagged & has_zero
        minimum, scale = minimum.masked_fill(alone, 0.0), scale.masked_fill(alone, 0.0)
    scale = torch.where(flagged, -scale, scale)
    return (
        minimum.to(minimum_dtype).masked_fill(empty, float("nan")),  # after the cast, which has NaNs of its own
        scale.to(scale_dtype).masked_fill(empty, float("nan")),
        has_zero,
    )


def aligned(
    low: Tensor, high: Tensor, levels: Tensor, bit_width: int, scale_dtype: torch.dtype, minimum_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(G,) float32 code k of zero and scale s of grids with a level at zero, from m = -k s, of the least s that covers.

    `low` is negative, or unused, `high` at least 0, `levels` the number of steps. Decoding computes m + k s, which is
    exactly 0. k is one of the two integers around (0 - low) / ((high - low) / levels), of as few bits as `ZERO_UNITS`
    says.
    """
    unit, scale_unit = ZERO_UNITS[minimum_dtype]
    scale_unit = max(scale_unit, 1 << 16 if scale_dtype == torch.bfloat16 or bit_width > 16 else 1)
    most = _cut(levels - (high > 0).float(), unit).clamp(min=1.0)
    lower = _cut((-low / (high - low) * levels).floor(), unit).maximum(torch.ones_like(most)).minimum(most)
    upper = (lower + 1.0).maximum((lower.view(torch.int32) + unit).view(torch.float32)).minimum(most)
    of_lower, of_upper = ((-low / k).maximum(high / (levels - k).clamp(min=1.0)) for k in (lower, upper))
    code, scale = torch.where(of_upper < of_lower, upper, lower), of_lower.minimum(of_upper)
    return code, round_up(scale, scale_unit).clamp(min=SMALLEST_SCALE)


def positions_of_zeros(steps: Tensor) -> Tensor:
    """Positions of zeros (of 16 bits) without float32's errors, at most 2^-22 of them, which show from 6 bits on."""
    return ((steps.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)


def shifts(seed: Tensor, groups: int) -> Tensor:
    """(G,) float32 shifts in steps: (w >> 8) / 2^24 - 1/2, w word 0 of `words_of(g, seed, 1)`."""
    return (words_of(torch.arange(groups, device=seed.device), seed, 1)[0] >> 8).float() * 2.0**-24 - 0.5


def parts_of_steps(steps: Tensor) -> Tensor:
    """Where between two levels float32 positions t lie, d = rint(256 (t - floor(t))), int64 from 0 to 256."""
    return ((steps - steps.floor()) * 256.0).round().to(torch.int64)


def spreads(spread: Tensor, upper: Tensor, outer: Tensor, sizes: Tensor) -> Tensor:
    """(G,) bool: whether groups shift their levels: elements lie between levels, and in all parts of a step alike.

    `spread` is the sum of d (256 - d), `upper` and `outer` are the numbers of elements with d & 128, in the upper half
    of a step, and with (d + 64) & 128, in its middle half. The first is at least `LEAST_SPREAD` per element: with less,
    stochastic rounding has less variance. And A^2 + B^2 is at most `MOST_ALIKE` times the size n, with A = n - 2 upper
    and B = n - 2 outer; it is 2 n on average for elements that are spread at random. With more, many elements have
    errors in common.
    """
    alike = (sizes - 2 * upper).square() + (sizes - 2 * outer).square()
    return (spread >= sizes * LEAST_SPREAD) & (alike <= sizes * MOST_ALIKE)


def bounded(low: Tensor, high: Tensor, is_aligned: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Ends of ranges that float32 has room for: -2^125 and 2^125 at most where the range is 2^128 - 2^122 or more.

    Of grids that are aligned to zero, (G,) bool, where it is 2^126 or more. Elements beyond an end count as the end.
    Such a range means that a mask, say, left the lowest float among other values. Ends that are NaN stay.
    """
    wide = high - low >= LARGEST_RANGE  # the difference may be infinite
    if is_aligned is not None:
        wide = wide | is_aligned & (high - low >= LARGEST_ALIGNED)
    return (torch.where(wide, low.clamp(min=-LARGEST_END), low), torch.where(wide, high.clamp(max=LARGEST_END), high))


def round_codes(steps: Tensor, random_bits: Tensor | None) -> Tensor:
    """Round (n,) float32 positions t in [0, 2^b - 1] on the grid to int64 codes.

    Nearest: half to even. Stochastic, with (n,) int64 random bits r in [0, 65536): floor(t) + ((D + r) >> 16) with D =
    rint(65536 (t - floor(t))), so that the chance of rounding up is the fraction and grid points stay.
    """
    if random_bits is None:
        return steps.round().to(torch.int64)
    floor = steps.floor()
    threshold = ((steps - floor) * 65536.0).round().to(torch.int64)
    return floor.to(torch.int64) + ((threshold + random_bits) >> 16)


def chunks(numel: int, block_size: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, columns a block): runs of whole blocks, then the ragged last block."""
    step = max(_CHUNK // block_size, 1) * block_size
    whole = numel // block_size * block_size
    for start in range(0, whole, step):
        yield start, min(start + step, whole), block_size // 8
    if whole < numel:
        yield whole, numel, -(-(numel - whole) // 8)


def _overlaps(bit_width: int) -> Iterator[tuple[int, int, int]]:
    """(i, k, shift): code i of a column, shifted left by shift, reaches into byte k."""
    for i in range(8):
        for k in range(i * bit_width // 8, ((i + 1) * bit_width - 1) // 8 + 1):
            yield i, k, i * bit_width - 8 * k


def unpack_chunk(packed: Tensor, bit_width: int, start: int, stop: int, columns: int, block_size: int) -> Tensor:
    """Codes start to stop, which lie in blocks of the given number of columns, as int64."""
    first = packed_bytes(start, bit_width, block_size)
    blocks = -(-(stop - start) // (8 * columns))
    bytes_KbW = packed[first : first + blocks * bit_width * columns].view(blocks, bit_width, columns).to(torch.int64)
    codes_K8W = torch.zeros(blocks, 8, columns, dtype=torch.int64, device=packed.device)
    for i, k, shift in _overlaps(bit_width):
        byte = bytes_KbW[:, k]
        part = (byte >> shift if shift >= 0 else byte << -shift) & ((1 << bit_width) - 1)
        codes_K8W[:, i].bitwise_or_(part)
    return codes_K8W.flatten()[: stop - start]


def element_bits(start: int, stop: int, columns: int, seed: Tensor) -> Tensor:
    """16 random bits for each element of whole or partial blocks; a block's first column is its start / 8."""
    blocks = -(-(stop - start) // (8 * columns))
    index = torch.arange(start // 8, start // 8 + blocks * columns, device=seed.device)
    bits_8KW = column_bits(index, seed).view(8, blocks, columns)
    return bits_8KW.transpose(0, 1).flatten()[: stop - start]


def by_groups(flat: Tensor, geometry: Geometry, *values: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """(groups, elements, values) of pieces: which groups, (repeats, groups, inner) views, their (groups, 1) values."""
    inner = geometry.inner
    if geometry.one_run:
        step, whole = max(_CHUNK // inner, 1), flat.numel() // inner
        ends = [*range(0, max(whole, 1), step), whole]  # nothing is one piece, without groups
        pieces = [(slice(a, b), flat[a * inner : b * inner].view(1, b - a, inner)) for a, b in itertools.pairwise(ends)]
        if flat.numel() % inner:
            pieces.append((slice(whole, None), flat[whole * inner :].view(1, 1, -1)))
    else:
        repeats = flat.view(-1, geometry.groups, inner).split(max(_CHUNK // (inner * geometry.groups), 1))
        pieces = [(slice(None), part) for part in repeats]
    for groups, part in pieces:
        yield groups, part, *(None if each is None else each[groups, None] for each in values)


def group_ranges(flat: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(G,) float32 ends of finite values (infinity and -infinity without any), int64 numbers of others, any zeros."""
    found = zip(*(finite_range(part.float(), (0, 2)) for _, part in by_groups(flat, geometry)), strict=True)
    if geometry.one_run:
        low, high, missing, zeros = map(torch.cat, found)
        return low, high, missing, zeros
    low, high, missing, zeros = map(torch.stack, found)
    return low.amin(0), high.amax(0), missing.sum(0), zeros.any(0)


def finite_range(x: Tensor, dims: int | tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`group_ranges` over dimensions; by `nan_to_num`, of a tenth of the time of `masked_fill`."""
    low, high = (x.nan_to_num(nan=end, posinf=end, neginf=end) for end in (float("inf"), -float("inf")))
    missing = (~(x.abs() < float("inf"))).sum(dims)
    return low.amin(dims), high.amax(dims), missing, low.abs().amin(dims) == 0


def round_up(x: Tensor, unit: int) -> Tensor:
    """Round non-negative float32 up to values whose last bit is that of a unit, a power of two; 2^16 for bfloat16."""
    return ((x.view(torch.int32) + (unit - 1)) & -unit).view(torch.float32)


def _cut(x: Tensor, unit: int) -> Tensor:
    return (x.view(torch.int32) & -unit).view(torch.float32)


def stretched(x: Tensor) -> Tensor:
    """y = x + 50 x / (2.5 + |x|), float32: levels of y are dense where derivatives of activation functions bend."""
    near = x.clamp(-FAR, FAR)  # so that infinities stay
    return x + near / (near.abs() + BEND) * STRETCH


def shrunk(y: Tensor) -> Tensor:
    """The inverse of `stretched`: y - 2 p y / (|y| + r + p + b) with p = 50, b = 2.5, r^2 = (|y| - p + b)^2 + 4 p b."""
    near = y.clamp(-FAR, FAR)
    size = near.abs()
    part = size - (STRETCH - BEND)
    root = (part * part + 4 * STRETCH * BEND).double().sqrt().float()  # MKL's float32 root is not the nearest one
    return y - near / (size + root + (STRETCH + BEND)) * (2 * STRETCH)
