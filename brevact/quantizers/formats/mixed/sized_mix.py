"""The stored form of a tensor whose buckets are of two kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from brevact.geometry import DEFAULT_BLOCK, Geometry, packed_bytes
from brevact.quantizers import row_dispatch
from brevact.quantizers.bits import pack_mask, unpack_mask
from brevact.quantizers.checks import is_on_host
from brevact.quantizers.kernel_ops import flat_memory, random_words
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import ActivationQuantizer, Decoder, PackedSpec, Part
from brevact.quantizers.philox import moved_seed
from brevact.quantizers.quantizer import Quantizer

_HIGH_KEY = 0x5851F42D4C957F2D  # moves the seed of the high buckets
_PLACEMENT_KEY = 0x2545F4914F6CDD1D  # and this one the seed that chooses them


class BucketQuantizer(ActivationQuantizer, Decoder, Protocol):
    """Quantizer of buckets: each run of so many elements has metadata of its own, and depends on no other.

    It stores a 1-D tensor as packed codes, then arrays of one value per bucket.
    """

    def geometry(self, layout: Layout) -> Geometry:
        """Blocks and groups of a tensor: a group is a bucket."""


@dataclass(frozen=True, kw_only=True)
class DrawnMix(Quantizer):
    """A `MixingQuantizer` for tensors of one size, with the numbers of buckets of each kind drawn, none of them 0.

    Bytes: the low buckets in memory order, as `low` stores a 1-D tensor of them; the high ones likewise, from the next
    multiple of 4; a mask of one bit a bucket, set where it is high. The ragged last bucket is one as well.

    Args:
        low: Quantizer of most buckets.
        high: Quantizer of the others.
        numel: Elements of the tensors.
        size: Elements of a bucket.
        high_count: How many full buckets are high.
        high_tail: Whether the ragged last bucket is.
    """

    low: BucketQuantizer
    high: BucketQuantizer
    numel: int
    size: int
    high_count: int
    high_tail: bool

    @property
    def is_stochastic(self) -> bool:
        return True

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        low, high = self.specs(layout)
        aligned = -(-low.nbytes // 4) * 4
        sizes = {"low": aligned, "high": high.nbytes, "mask": packed_bytes(self._buckets, 1, DEFAULT_BLOCK)}
        return tuple(Part(name, torch.uint8, size) for name, size in sizes.items())

    def encode(self, dense: Tensor, spec: PackedSpec[Any], seed: int | Tensor | None, buffer: Tensor) -> None:
        numel, specs = spec.layout.numel, self.specs(spec.layout)
        if numel != self.numel:
            raise ValueError(
                f"x: got a tensor of {numel} distinct elements; the numbers of buckets were drawn for one of "
                f"{self.numel}; quantize it by the MixingQuantizer, or call its with_drawn_size with that number"
            )
        assert seed is not None  # a mix is always stochastic
        with torch.no_grad():
            flat = flat_memory(dense.detach(), numel)
            if specs[0].nbytes % 4 or any(part.has_padding for part in specs):
                buffer.zero_()
            *packs, mask = spec.split(buffer)
            is_high = self._choose(moved_seed(seed, _PLACEMENT_KEY), flat.device)
            mask.copy_(pack_mask(is_high))
            seeds = seed, moved_seed(seed, _HIGH_KEY)
            for part, rows, own, pack in zip(specs, self._rows(is_high), seeds, packs, strict=True):
                row_dispatch.quantize_rows(flat, rows, self.size, part, own, pack[: part.nbytes])

    def decode(self, buffer: Tensor, spec: PackedSpec[Any], target: Tensor, other: Tensor | None = None) -> None:
        *packs, mask = spec.split(buffer)
        rows = self._rows(unpack_mask(mask, Layout((self._buckets,), (1,), torch.bool)))
        factor = None if other is None else flat_memory(other, self.numel)
        with torch.no_grad():
            flat = flat_memory(target, self.numel)
            for part, own, pack in zip(self.specs(spec.layout), rows, packs, strict=True):
                row_dispatch.dequantize_rows(pack[: part.nbytes], part, own, self.size, factor, flat)

    def specs(self, layout: Layout) -> tuple[PackedSpec[Any], PackedSpec[Any]]:
        high = self.high_count * self.size + (self.numel % self.size if self.high_tail else 0)
        numels = ((self.low, self.numel - high), (self.high, high))
        a, b = (PackedSpec(quantizer, Layout((n,), (1,), layout.dtype)) for quantizer, n in numels)
        return a, b

    @property
    def _buckets(self) -> int:
        return -(-self.numel // self.size)

    def _choose(self, key: int | Tensor, device: torch.device) -> Tensor:
        """(buckets,) bool: True for `high_count` of the full buckets, those with the largest random words."""
        full = self.numel // self.size
        is_high = torch.zeros(self._buckets, dtype=torch.bool, device=device)
        if self.high_count:
            words = torch.empty(full, dtype=torch.int64, device=device)
            random_words(key, words)
            unequal = words << 31 | torch.arange(full, device=device)
            torch.ge(unequal, unequal.kthvalue(full - self.high_count + 1).values, out=is_high[:full])
        is_high[full:] = self.high_tail
        return is_high

    def _rows(self, is_high: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of the low buckets and of the high ones, each in ascending order."""
        if is_on_host(is_high):
            return is_high.logical_not().nonzero().view(-1), is_high.nonzero().view(-1)
        order = is_high.to(torch.uint8).argsort(stable=True)  # nonzero would wait for the device
        low = self._buckets - self.high_count - self.high_tail
        return order[:low], order[low:]
