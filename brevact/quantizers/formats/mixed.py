"""Mixing of two quantizers: some buckets of a tensor are stored by another one than the rest."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from brevact.geometry import DEFAULT_BLOCK, packed_bytes
from brevact.private_names.of_torch import disable_modes
from brevact.quantizers.apart import ApartQuantizer, aligned
from brevact.quantizers.backends import refuse_wrapped
from brevact.quantizers.bits import pack_mask, unpack_mask
from brevact.quantizers.checks import check_bit_width, check_input, check_number, is_on_host
from brevact.quantizers.formats.uniform import BIT_WIDTHS, Granularity, UniformQuantizer
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation, PackedSpec, Part
from brevact.quantizers.reference import moved_seed, seed_value, words_of
from brevact.quantizers.rounding import Rounding
from brevact.quantizers.traits import Traits

Self = TypeVar("Self", bound="MixingQuantizer")


class MixingQuantizer(Traits):
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
    draws_size = True

    @functools.cached_property
    def low(self) -> Any:
        """Quantizer of most buckets: ``geometry(layout)`` has a group per bucket, which depends on no other."""
        return self._of(self.mixed[0])

    @functools.cached_property
    def high(self) -> Any:
        """Quantizer of the others."""
        return self._of(self.mixed[1])

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

    def with_drawn_size(self, numel: int, host_seed: int) -> Any:
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


_HIGH_KEY = 0x5851F42D4C957F2D  # moves the seed of the high buckets
_PLACEMENT_KEY = 0x2545F4914F6CDD1D  # and this one the seed that chooses them


@dataclass(frozen=True, kw_only=True)
class DrawnMix(ApartQuantizer):
    """A `MixingQuantizer` for tensors of one size, with the numbers of buckets of each kind drawn, none of them 0.

    Bytes: `packs`, the low buckets in memory order, as `low` stores a 1-D tensor of them; the high ones likewise, from
    the next multiple of 4; `mask`, one bit a bucket, set where it is high. The ragged last bucket is one as well.
    """

    low: Any
    high: Any
    numel: int
    size: int
    high_count: int
    high_tail: bool

    @property
    def is_stochastic(self) -> bool:
        return True

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        low, high = self.specs(layout)
        mask = Part("mask", torch.uint8, packed_bytes(self._buckets, 1, DEFAULT_BLOCK))
        return Part("packs", torch.uint8, aligned(low.nbytes) + high.nbytes), mask

    def choose(self, flat: Tensor, layout: Layout, seed: int | Tensor) -> Tensor:
        if layout.numel != self.numel:
            raise ValueError(
                f"x: got a tensor of {layout.numel} distinct elements; the numbers of buckets were drawn for one of "
                f"{self.numel}; quantize it by the MixingQuantizer, or call its with_drawn_size with that number"
            )
        return pack_mask(self._choose(moved_seed(seed, _PLACEMENT_KEY), flat.device))

    def kinds(self, layout: Layout, choice: Tensor) -> Iterable[tuple[PackedSpec[Any], Tensor, int]]:
        rows = self._rows(unpack_mask(choice, Layout((self._buckets,), (1,), torch.bool)))
        return zip(self.specs(layout), rows, (0, _HIGH_KEY), strict=True)

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
            index = torch.arange(-(-full // 4), device=device)
            words = torch.stack(words_of(index, torch.as_tensor(key, device=device)), 1).view(-1)[:full]
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


@dataclass(frozen=True, kw_only=True)
class MixedQuantizer(MixingQuantizer):
    """Uniform quantizer that stores each bucket at `mix_bit_width` with probability `mix_prob`, else at `bit_width`.

    Buckets are drawn independently. An element takes (1 - mix_prob) * bit_width + mix_prob * mix_bit_width bits on
    average; each bucket adds the metadata of `UniformQuantizer` and one bit. Graphs of `torch.compile` and CUDA graphs
    draw the number of wider buckets once, when they are made, and in each run which buckets these are.

    Source: J. Li, master's thesis, Heidelberg University, 2025, section 5.7. Differs: there every element is stored at
    the higher width.

    >>> q = MixedQuantizer(bit_width=2, mix_bit_width=4, mix_prob=0.5, bucket_size=64)
    >>> q.quantize(torch.linspace(0, 1, 6400), seed=0).dequantize().shape
    torch.Size([6400])

    Args:
        bit_width: Bits a code of most buckets.
        mix_bit_width: Bits a code of the others.
        mix_prob: Probability of `mix_bit_width`, from 0 to 1.
        rounding: Nearest or stochastic; which buckets are mixed in is random either way.
        bucket_size: Elements that share a scale and a width; None for the whole tensor.
        granularity: `Granularity.BUCKET`, or `Granularity.TENSOR` for one width a tensor (the thesis' global variant).
        scale_dtype: See `UniformQuantizer`.
        minimum_dtype: See `UniformQuantizer`.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If an argument has the wrong type.
    """

    bit_width: int = 2
    mix_bit_width: int = 4
    mix_prob: float = 0.5
    rounding: Rounding = Rounding.STOCHASTIC
    bucket_size: int | None = 512
    granularity: Granularity = Granularity.BUCKET
    scale_dtype: torch.dtype = torch.bfloat16
    minimum_dtype: torch.dtype = torch.float32

    kind = UniformQuantizer
    mixed = ("bit_width", "mix_bit_width", "mix_prob")

    def __post_init__(self) -> None:
        check_number("mix_prob", self.mix_prob, 0, 1)
        for name in ("bit_width", "mix_bit_width"):
            check_bit_width(name, getattr(self, name), BIT_WIDTHS[:-1])
        plain = self._of("bit_width")  # checks the rest
        if plain.granularity not in (Granularity.BUCKET, Granularity.TENSOR):
            raise ValueError(
                f"granularity: got {self.granularity}; accepted are Granularity.BUCKET and Granularity.TENSOR: widths "
                "are mixed by buckets or by tensors"
            )
        object.__setattr__(self, "rounding", plain.rounding)
        object.__setattr__(self, "granularity", plain.granularity)
