"""Base of quantizers that store the buckets of a tensor by several others, those of each kind apart."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from brevact.quantizers.backends import refuse_wrapped
from brevact.quantizers.kernel_ops import flat_memory
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation, PackedSpec
from brevact.quantizers.quantizer import Quantizer
from brevact.quantizers.reference import moved_seed


class ApartQuantizer(Quantizer):
    """Quantizer that stores the buckets of each kind as a 1-D tensor of them, by a quantizer of that kind.

    Its two parts are the bytes of the kinds, each from the next multiple of 4 on, and of which kind buckets are.
    """

    __slots__ = ()

    @abstractmethod
    def choose(self, flat: Tensor, layout: Layout, seed: int | Tensor) -> Tensor:
        """The bytes that say of which kind the buckets of an (n,) tensor are."""

    @abstractmethod
    def kinds(self, layout: Layout, choice: Tensor) -> Iterable[tuple[PackedSpec[Any], Tensor, int]]:
        """Spec of each kind, int64 indices of its buckets, ascending, and a number that moves the seed."""

    def packs(self, packed: PackedActivation) -> list[tuple[PackedActivation, Tensor]]:
        """The tensor of each kind, and which buckets, in memory order, it has."""
        return [(own, rows) for own, rows, _ in self._each(packed.spec, packed.buffer)]

    def encode(self, dense: Tensor, spec: PackedSpec[Any], seed: int | Tensor | None, buffer: Tensor) -> None:
        refuse_wrapped(dense)
        key = 0 if seed is None else seed
        with torch.no_grad():
            flat = flat_memory(dense.detach(), spec.layout.numel)
            choice = spec.split(buffer.zero_())[1]
            choice.copy_(self.choose(flat, spec.layout, key))
            for own, rows, shift in self._each(spec, buffer):
                elements, size = flat.new_empty(own.layout.numel), _size_of(own)
                (whole, tail), (from_whole, from_tail) = _divided(elements, size), _divided(flat, size)
                torch.index_select(from_whole, 0, rows[: len(whole)], out=whole)
                tail.copy_(from_tail[: len(tail)])
                own.buffer.copy_(own.spec.quantizer.quantize(elements, moved_seed(key, shift)).buffer)

    def decode(self, buffer: Tensor, spec: PackedSpec[Any], target: Tensor, other: Tensor | None = None) -> None:
        numel = spec.layout.numel
        with torch.no_grad():
            for own, rows, _ in self._each(spec, buffer):
                values, size = own.dequantize(), _size_of(own)
                (whole, tail), (to_whole, to_tail) = _divided(values, size), _divided(flat_memory(target, numel), size)
                rows = rows[: len(whole)]
                if other is not None:
                    by_whole, by_tail = _divided(flat_memory(other, numel), size)
                    whole.mul_(by_whole.index_select(0, rows))
                    tail.mul_(by_tail[: len(tail)])
                to_whole.index_copy_(0, rows, whole)
                to_tail[: len(tail)] = tail

    def _each(self, spec: PackedSpec[Any], buffer: Tensor) -> Iterator[tuple[PackedActivation, Tensor, int]]:
        if not spec.layout.numel:
            return
        (packs, choice), start = spec.split(buffer), 0
        for own, rows, shift in self.kinds(spec.layout, choice):
            yield PackedActivation(own, packs[start : start + own.nbytes]), rows, shift
            start += aligned(own.nbytes)


def aligned(nbytes: int) -> int:
    """The next multiple of 4."""
    return -(-nbytes // 4) * 4


def _size_of(packed: PackedActivation) -> int:
    quantizer: Any = packed.quantizer
    return int(quantizer.geometry(packed.layout).inner)


def _divided(flat: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The full buckets, a row each, and the rest; a kind has it all or nothing of it."""
    full = flat.numel() // size * size
    return flat[:full].view(-1, size), flat[full:]
