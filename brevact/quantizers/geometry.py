"""The packing grid of a tensor: blocks of eight planes, and groups of elements that share metadata."""

from __future__ import annotations

import math
from dataclasses import dataclass

DEFAULT_BLOCK = 512
LARGEST_BLOCK = 4096


def block_size_for(bucket_size: int | None) -> int:
    """Elements in a packing block: whole buckets where that stays small, so that a block needs no other metadata.

    Args:
        bucket_size: Elements that share a scale, or None where groups are not buckets.

    Returns:
        The smallest multiple of bucket_size and 8 that is at least 512, if it is at most 4096, else 512.
    """
    if bucket_size is None:
        return DEFAULT_BLOCK
    multiple = math.lcm(bucket_size, 8)
    block = -(-DEFAULT_BLOCK // multiple) * multiple
    return block if block <= LARGEST_BLOCK else DEFAULT_BLOCK


def packed_bytes(numel: int, bit_width: int, block_size: int) -> int:
    """Bytes of packed codes: bit_width bits an element, the last block rounded up to eight elements.

    Args:
        numel: Number of codes.
        bit_width: Bits a code, 1 to 32.
        block_size: Codes in a packing block, a multiple of 8.

    Returns:
        Number of bytes.
    """
    blocks, tail = numel // block_size, numel % block_size  # divmod takes no symbolic sizes
    return bit_width * (blocks * (block_size // 8) + -(-tail // 8))


@dataclass(frozen=True)
class Geometry:
    """Blocks and groups of a flat tensor: the group of element e is `e // inner % groups`.

    Args:
        numel: Number of elements.
        bit_width: Bits a code.
        block_size: Elements in a packing block, a multiple of 8.
        inner: Consecutive elements of one group.
        groups: Number of groups.
        one_run: Whether each group is a single run of elements (buckets) and not a comb (channels).
    """

    numel: int
    bit_width: int
    block_size: int
    inner: int
    groups: int
    one_run: bool

    @property
    def code_bytes(self) -> int:
        """Bytes of the packed codes."""
        return packed_bytes(self.numel, self.bit_width, self.block_size)
