"""Mixing of two quantizers: some buckets of a tensor are stored by another one than the rest."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from brevact.private_names.of_torch import disable_modes
from brevact.quantizers.backends import refuse_wrapped
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_input, is_on_host
from brevact.quantizers.formats.mixed.sized_mix import BucketQuantizer, DrawnMix
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation
from brevact.quantizers.philox import seed_value

Self = TypeVar("Self", bound="MixingQuantizer")


class MixingQuantizer:
    """Quantizer that stores each bucket by `high` with a probability, independently, and by `low` otherwise.

    The number of high buckets, k ~ Binomial(n, probability), is drawn on the host, and a random k-subset on the device:
    the distribution is that of independent draws, and the size is known without waiting for the device. A tensor whose
    buckets all turn out alike is stored as that quantizer alone would.

    A graph of `torch.compile` has fixed sizes: there k is drawn when the graph is traced, once for each tensor that it
    stores, and each run draws which k buckets are high; tensors of another size make another graph, `dynamic=True` or
    not. The same holds for a CUDA graph. A non-reentrant checkpoint around a region wants tensors of the same sizes
    when it recomputes them: there k is drawn once for each number of elements.

    A subclass is a frozen dataclass. Its `kind` gets the values of the fields that both have; the kind's first field is
    one of two, whose names are in `mixed`, before that of the field with the probability of the second.
    """

    __slots__ = ()

    kind: ClassVar[type]
    mixed: ClassVar[tuple[str, str, str]]

    @functools.cached_property
    def low(self) -> BucketQuantizer:
        """Quantizer of most buckets."""
        found: BucketQuantizer = self._of(self.mixed[0])
        return found

    @functools.cached_property
    def high(self) -> BucketQuantizer:
        """Quantizer of the others."""
        found: BucketQuantizer = self._of(self.mixed[1])
        return found

    def _of(self, mixed: str) -> Any:
        first, *rest = (field.name for field in dataclasses.fields(self.kind))
        shared = {name: getattr(self, name) for name in rest if hasattr(self, name)}
        return self.kind(**{first: getattr(self, mixed)}, **shared)

    @property
    def probability(self) -> float:
        """Probability of `high`."""
        return float(getattr(self, self.mixed[2]))

    def with_probability(self: Self, probability: float) -> Self:
        """The same mixture with another probability of `high`, from 0 to 1."""
        changed: Any = {self.mixed[2]: probability}
        return dataclasses.replace(self, **changed)  # type: ignore[type-var]

    @property
    def is_stochastic(self) -> bool:
        """Whether the codes depend on the seed: by rounding, or by the choice of the buckets."""
        return self.low.is_stochastic or self.high.is_stochastic or 0 < self.probability < 1

    def with_drawn_size(self, numel: int, host_seed: int) -> BucketQuantizer | DrawnMix:
        """Draw how many buckets of a tensor of so many distinct elements are high, by an int seed.

        Returns a quantizer of tensors of that many elements, whose bytes are known beforehand.
        """
        size = self.low.geometry(Layout.of_sizes((numel,), (1,), torch.float32)).inner
        with disable_modes():  # of fake tensors, which have no values
            generator = torch.Generator("cpu").manual_seed(host_seed)
            counts = torch.tensor([numel // size, int(numel % size > 0)], dtype=torch.float64, device="cpu")
            drawn = torch.binomial(counts, torch.full_like(counts, self.probability), generator=generator)
            high, tail = map(int, drawn.tolist())
        if high + tail == 0:
            return self.low
        if high + tail == -(-numel // size):
            return self.high
        return DrawnMix(low=self.low, high=self.high, numel=numel, size=size, high_count=high, high_tail=bool(tail))

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Quantize and pack a tensor; see `Quantizer.quantize`.

        With a seed on a device the number of high buckets is drawn from torch's default generator on the host.
        """
        check_input(x)
        refuse_wrapped(x)
        numel = Layout.of(x).numel
        if not self.is_stochastic:
            return self.with_drawn_size(numel, 0).quantize(x)
        key = seed_value(seed, x.device)
        on_host = not isinstance(key, Tensor) or is_on_host(key)
        if on_host:
            host_seed = int(key)
        else:
            with disable_modes():
                host_seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        return self.with_drawn_size(numel, host_seed).quantize(x, key)


def check_probability(name: str, value: object) -> None:
    """Raise a TypeError unless it is a number, and a ValueError for one outside of 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {brief(value)} of type {type(value).__name__}; accepted is a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: got {brief(value)}; accepted is a number from 0 to 1")
