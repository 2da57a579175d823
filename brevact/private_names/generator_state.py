"""The state of torch's CPU generator, and the 31 bits of it that no random number depends on.

MT19937 has 624 words of 32 bits and a state of 19937 = 624 * 32 - 31 bits: of the oldest word its recurrence reads the
top bit alone. torch makes all 624 words at once before it hands out the first one, so that between two draws word 0 is
either handed out already or, just seeded, never will be: its low 31 bits are unused until the words are made anew.

Source: M. Matsumoto and T. Nishimura, Mersenne Twister, ACM TOMACS 8 (1998); `MT19937RNGEngine.h` and
`CPUGeneratorImpl.cpp` of torch, whose state has the seed (8 bytes), how many words are left (4), whether it is seeded
(4), the place of the next word (8), then each word in 8 bytes.
"""

from __future__ import annotations

import functools
import hashlib
import sys

import numpy as np
import torch
from torch import Generator

_NBYTES = 5056
_LEFT, _NEXT, _WORDS = slice(8, 12), slice(16, 24), 24
_HASHED = _WORDS + 16 * 8  # 512 bits of the state, beside seed and place
_UNUSED = 2**31 - 1


def fingerprint(generator: Generator) -> int:
    """Return 64 bits that follow from the state of a CPU generator, its unused bits included.

    The caller takes torch's modes off: they would see how the state becomes an array.
    """
    state = generator.get_state().numpy()
    hashed = state[:_HASHED] if has_unused_bits() else state
    return int.from_bytes(hashlib.sha256(hashed.tobytes()).digest()[:8], "little")


def count_on(generator: Generator) -> bool:
    """Add 1 to the unused bits of the state of a CPU generator, which goes on with the same random numbers.

    Draws of other threads meanwhile are lost; the caller takes torch's modes off.

    Returns:
        Whether the state has unused bits; nothing has changed if not.
    """
    if not has_unused_bits():
        return False
    state = generator.get_state()
    values = state.numpy()
    if values[_NEXT].view(np.uint64)[0] == 0 and values[_LEFT].view(np.int32)[0] != 1:
        return False  # a state that somebody has made, in which word 0 is about to be handed out
    word = values[_WORDS : _WORDS + 4].view(np.uint32)
    first = int(word[0])
    word[0] = (first & ~_UNUSED) | ((first + 1) & _UNUSED)
    generator.set_state(state)
    return True


@functools.cache
def has_unused_bits() -> bool:
    """Return whether this torch has the generator that this file knows: tried, on a generator of its own."""
    if sys.byteorder != "little" or Generator("cpu").get_state().numel() != _NBYTES:
        return False
    for drawn in (0, 1, 1000):
        plain, other = (Generator("cpu").manual_seed(5489) for _ in range(2))
        for each in (plain, other):
            torch.randint(2**31, (drawn,), device="cpu", generator=each)
        state = other.get_state()
        state.numpy()[_WORDS : _WORDS + 4].view(np.uint32)[0] ^= _UNUSED
        other.set_state(state)
        if not torch.equal(other.get_state(), state):
            return False
        if not torch.equal(*(torch.randint(2**31, (2000,), device="cpu", generator=each) for each in (plain, other))):
            return False
    return True
