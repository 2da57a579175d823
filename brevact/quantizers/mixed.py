"""Mixing of two widths: some buckets of a tensor are stored at a higher width than the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.quantizers.codes import pack_codes, unpack_codes
from brevact.quantizers.geometry import DEFAULT_BLOCK, packed_bytes
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation, PackedSpec, Part
from brevact.quantizers.philox import ROUNDS, philox4x32, seed_value
from brevact.quantizers.uniform import BIT_WIDTHS, Granularity, Rounding, UniformQuantizer

_LOW_32 = 0xFFFFFFFF
_PLACEMENT_WORD = 1  # third word of the Philox counters that place buckets; those that round have 0 there
_HIGH_KEY = 0x5851F42D4C957F2D  # what the seed of the high buckets is moved by


@dataclass(frozen=True, kw_only=True)
class MixedQuantizer:
    """Uniform quantizer of two widths: each bucket has the higher one with a probability, independently.

    The number of such buckets, k ~ Binomial(n, mix_prob), is drawn on the host, and a random k-subset on the device:
    the distribution is that of independent draws, and the size is known without waiting for the device. An element
    takes (1 - mix_prob) * bit_width + mix_prob * mix_bit_width bits on average, metadata and one bit a bucket apart.

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

    def __post_init__(self) -> None:
        """Validate, and turn strings into enums."""
        if isinstance(self.mix_prob, bool) or not isinstance(self.mix_prob, int | float):
            raise TypeError(f"mix_prob: got {self.mix_prob!r}; accepted is a number from 0 to 1")
        if not 0 <= self.mix_prob <= 1:
            raise ValueError(f"mix_prob: got {self.mix_prob!r}; accepted is a number from 0 to 1")
        for name in ("bit_width", "mix_bit_width"):
            width = getattr(self, name)
            if isinstance(width, bool) or not isinstance(width, int):
                raise TypeError(f"{name}: got {width!r} of type {type(width).__name__}; accepted is an int")
            if width not in BIT_WIDTHS[:-1]:
                accepted = ", ".join(map(str, BIT_WIDTHS[:-1]))
                raise ValueError(f"{name}: got {width}; accepted are {accepted}")
        plain = self._uniform(self.bit_width)  # checks the rest
        object.__setattr__(self, "rounding", plain.rounding)
        object.__setattr__(self, "granularity", plain.granularity)
        if plain.granularity not in (Granularity.BUCKET, Granularity.TENSOR):
            raise ValueError(
                f"granularity: got {self.granularity}; accepted are Granularity.BUCKET and Granularity.TENSOR: widths "
                "are mixed by buckets or by tensors"
            )

    @property
    def is_stochastic(self) -> bool:
        """Whether the codes depend on the seed: they do, by the placement of the buckets."""
        return True

    def sized(self, numel: int, host_seed: int) -> SizedMix:
        """Draw how many buckets of a tensor have the higher width.

        Args:
            numel: Distinct elements of the tensor.
            host_seed: Seed of the draw, an int.

        Returns:
            A quantizer of tensors of that many elements, whose bytes are known beforehand.
        """
        size = max(numel, 1) if self.granularity is Granularity.TENSOR else self.bucket_size or max(numel, 1)
        generator = torch.Generator("cpu").manual_seed(host_seed)
        counts = torch.tensor([numel // size, int(numel % size > 0)], dtype=torch.float64, device="cpu")
        high, tail = torch.binomial(counts, torch.full_like(counts, self.mix_prob), generator=generator).tolist()
        return SizedMix(mix=self, numel=numel, size=size, high=int(high), high_tail=bool(tail))

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Quantize and pack a tensor.

        Args:
            x: float32, bfloat16, float16 or float64 tensor of any shape and strides.
            seed: Key of the random bits: an int, a 0-d int64 tensor, or None to draw one from torch's generator. On
                a device the number of high buckets is then drawn from torch's default generator on the host.

        Returns:
            The packed activation, on the device of `x`.

        Raises:
            TypeError: If `x` is not a dense floating-point tensor of these types, or `seed` is of another type.
        """
        seed = seed_value(seed, x.device) if isinstance(x, Tensor) else seed
        on_host = not isinstance(seed, Tensor) or seed.device.type == "cpu"
        host_seed = int(seed) if on_host and seed is not None else int(torch.randint(2**63 - 1, (), device="cpu"))
        numel = Layout.of(x).numel if isinstance(x, Tensor) and x.layout is torch.strided else 0
        return self.sized(numel, host_seed).quantize(x, seed)

    def _uniform(self, bit_width: int) -> UniformQuantizer:
        return UniformQuantizer(
            bit_width=bit_width,
            rounding=self.rounding,
            bucket_size=self.bucket_size,
            granularity=self.granularity,
            scale_dtype=self.scale_dtype,
            minimum_dtype=self.minimum_dtype,
        )


@dataclass(frozen=True, kw_only=True)
class SizedMix:
    """A `MixedQuantizer` for tensors of one size, with the numbers of buckets drawn.

    Bytes: a mask of one bit a full bucket, set where it is high; the low buckets in memory order, the ragged last one
    included if it is low, as `UniformQuantizer` stores a 1-D tensor of them; the high ones likewise.

    Args:
        mix: The quantizer.
        numel: Elements of the tensors.
        size: Elements of a bucket.
        high: How many full buckets have the higher width.
        high_tail: Whether the ragged last bucket has it.
    """

    mix: MixedQuantizer
    numel: int
    size: int
    high: int
    high_tail: bool
    is_stochastic: bool = True

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """What is stored for a tensor.

        Args:
            layout: Its layout, of `numel` elements.

        Returns:
            The buckets of either width, and the mask.
        """
        low, high = self._specs(layout)
        mask = packed_bytes(self.numel // self.size, 1, DEFAULT_BLOCK)
        aligned = (-(-spec.nbytes // 4) * 4 for spec in (low, high))  # for the metadata of the one behind
        sizes = zip(("low", "high", "mask"), (*aligned, mask), strict=True)
        return tuple(Part(name, torch.uint8, size) for name, size in sizes)

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """See `MixedQuantizer.quantize`.

        Args:
            x: Tensor of `numel` distinct elements.
            seed: Key of the random bits: an int, a 0-d int64 tensor on the device of `x`, or None to draw one.

        Returns:
            The packed activation.
        """
        low, high = self._uniform()
        key = torch.as_tensor(seed_value(seed, x.device), dtype=torch.int64, device=x.device)
        layout = Layout.of(x)
        flat = layout.flatten(x.detach())
        placement = self._draw_placement(key)
        spec: PackedSpec[SizedMix] = PackedSpec(self, layout)
        buffer = spec.empty(flat)
        *packs, mask = spec.split(buffer)
        sets = self._split(flat, placement)
        for quantizer, elements, pack, shift in zip((low, high), sets, packs, (0, _HIGH_KEY), strict=True):
            found = quantizer.quantize(elements, key + shift).buffer
            pack[: found.numel()].copy_(found)
            pack[found.numel() :].zero_()
        full = self.numel // self.size
        is_high = torch.zeros(full, dtype=torch.uint8, device=x.device)
        mask.copy_(pack_codes(is_high.index_fill_(0, placement[full - self.high :], 1), 1))
        return PackedActivation(spec, buffer)

    def decode(self, buffer: Tensor, spec: PackedSpec[SizedMix], target: Tensor) -> None:
        """Decode into memory that is dense in the layout's memory order.

        Args:
            buffer: Stored bytes.
            spec: Their spec.
            target: Tensor of the layout's dtype whose memory holds the layout's elements in that order.
        """
        full = self.numel // self.size
        *packs, mask = spec.split(buffer)
        placement = unpack_codes(mask, 1, full).argsort(stable=True)  # low buckets, then high ones, each in order
        specs = self._specs(spec.layout)
        low, high = (
            PackedActivation(part, pack[: part.nbytes]).dequantize() for part, pack in zip(specs, packs, strict=True)
        )
        flat = target.as_strided((self.numel,), (1,))
        rows = flat[: full * self.size].view(full, self.size)
        for elements, indices in ((low, placement[: full - self.high]), (high, placement[full - self.high :])):
            rows.index_copy_(0, indices, elements[: len(indices) * self.size].view(-1, self.size))
        tail = self.numel % self.size
        if tail:
            flat[-tail:].copy_((high if self.high_tail else low)[-tail:])

    def decode_multiply(self, buffer: Tensor, spec: PackedSpec[SizedMix], other: Tensor, target: Tensor) -> None:
        """Decode, multiply and write to memory that is dense in the layout's memory order.

        Args:
            buffer: Stored bytes.
            spec: Their spec.
            other: Factor of the layout's dtype, dense in the layout's memory order.
            target: Tensor of the layout's dtype, dense in that order; may be `other`.
        """
        decoded = torch.empty_like(target)
        self.decode(buffer, spec, decoded)
        flat = (self.numel,), (1,)
        torch.mul(decoded.as_strided(*flat), other.as_strided(*flat), out=target.as_strided(*flat))

    def _uniform(self) -> tuple[UniformQuantizer, UniformQuantizer]:
        return self.mix._uniform(self.mix.bit_width), self.mix._uniform(self.mix.mix_bit_width)

    def _specs(self, layout: Layout) -> tuple[PackedSpec[UniformQuantizer], PackedSpec[UniformQuantizer]]:
        """Specs of the 1-D tensors of low and of high elements."""
        low, high = self._uniform()
        tail = self.numel % self.size
        high_numel = self.high * self.size + (tail if self.high_tail else 0)
        numels = self.numel - high_numel, high_numel
        a, b = (PackedSpec(q, Layout((n,), (1,), layout.dtype)) for q, n in zip((low, high), numels, strict=True))
        return a, b

    def _draw_placement(self, key: Tensor) -> Tensor:
        """Indices of the full buckets: low ones in ascending order, then as many high ones as there are."""
        full = self.numel // self.size
        index = torch.arange(full, device=key.device)
        zero = torch.zeros_like(index)
        words = philox4x32((index & _LOW_32, index >> 32, zero + _PLACEMENT_WORD, zero), key, ROUNDS)[0]
        shuffled = words.argsort(stable=True)
        low = full - self.high
        return torch.cat((shuffled[:low].sort().values, shuffled[low:].sort().values))

    def _split(self, flat: Tensor, placement: Tensor) -> tuple[Tensor, Tensor]:
        """Elements of the low and of the high buckets, each in memory order."""
        full = self.numel // self.size
        rows, tail = flat[: full * self.size].view(full, self.size), flat[full * self.size :]
        low = rows.index_select(0, placement[: full - self.high]).view(-1)
        high = rows.index_select(0, placement[full - self.high :]).view(-1)
        if self.high_tail:
            return low, torch.cat((high, tail))
        return torch.cat((low, tail)), high
