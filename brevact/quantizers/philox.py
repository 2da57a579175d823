"""Counter-based random bits: Philox4x32 in torch's int64 arithmetic, on any device, and the seeds it takes."""

from __future__ import annotations

import torch
from torch import Tensor

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
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim() != 0:
            raise TypeError(
                f"seed: got a {seed.dtype} tensor of shape {tuple(seed.shape)}; accepted are an int, a 0-d torch.int64 "
                "tensor (brevact.quantizers.draw_seed makes one), or None"
            )
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(
            f"seed: got {brief(seed)}; accepted are an int, a 0-d torch.int64 tensor, or None; pass int(seed)"
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


def column_bits(columns: Tensor, seed: Tensor) -> Tensor:
    """16 random bits for each of the eight elements of packing columns: (8, C) int64 of (C,) int64 column indices c.

    Element i takes half `i >> 2` (0 = the low one) of word `i & 3` of `philox4x32((c lo, c hi, 0, 0), seed, ROUNDS)`.
    """
    zero = torch.zeros_like(columns)
    words = torch.stack(philox4x32((columns & _LOW_32, columns >> 32, zero, zero), seed, ROUNDS))
    return torch.cat((words & 0xFFFF, words >> 16))
