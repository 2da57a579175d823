"""A bit width a sample: the samples of a tensor to whose noise the gradient is most sensitive have more bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.geometry import Geometry
from brevact.quantizers import kernel_ops
from brevact.quantizers.apart import ApartQuantizer
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_int, check_number
from brevact.quantizers.formats.uniform import UniformQuantizer
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation, PackedSpec, Part
from brevact.quantizers.rounding import Rounding

NARROWEST, WIDEST = 1, 8


class SampleWeights:
    """Factors of the sensitivities of a batch's samples: squared norms of their gradients, say.

    One object serves all quantizers of a model; who knows the batch writes `values` before each forward pass. It counts
    as equal to itself alone, a copy of a model shares it, and a pickled one has no values.

    >>> weights = SampleWeights()
    >>> weights.values = torch.tensor([1.0, 4.0])
    >>> weights.of_parts(4, 2)
    tensor([1., 1., 4., 4.], dtype=torch.float64)

    Attributes:
        values: (N,) floating-point factors of at least 0, of the samples in the order of the batch; None for 1.
    """

    __slots__ = ("__weakref__", "values")

    def __init__(self) -> None:
        self.values: Tensor | None = None

    def of_parts(self, parts: int, samples: int) -> Tensor | None:
        """(parts,) float64 factors of equal parts of a tensor, some for each sample, or each of some samples.

        `samples` is the size of the dimension along which the tensor holds samples, or several rows of each. None if
        there are no factors, or if they are of another batch.
        """
        values = self.values
        count = 0 if values is None else values.numel()
        if values is None or count == 0 or samples % count:
            return None
        values = values.detach().to("cpu", torch.float64)
        if parts % count == 0:
            return values.repeat_interleave(parts // count)
        return values.view(parts, -1).sum(1) if count % parts == 0 else None

    def __deepcopy__(self, memo: object) -> SampleWeights:
        """The same object: a copied model runs the same batches."""
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle no values: they are of one batch."""
        return SampleWeights, ()


def widths_of_least_noise(sensitivity: Tensor, total: int) -> Tensor:
    """Bit widths that minimize sum_n sensitivity_n / (2^b_n - 1)^2, the b_n adding up to a total.

    The noise falls by less with each further bit of a sample, so that the bits that lower it most, one by one, are the
    best of all choices. Widths of equally sensitive samples differ by a bit at most.

    Source: ActNN, arXiv:2104.14129, equation 10, for samples of one size. Differs: exact, where ActNN starts from 8
    bits and takes away the cheapest.

    >>> widths_of_least_noise(torch.tensor([1.0, 100.0, 1.0]), 6).tolist()
    [1, 4, 1]

    Args:
        sensitivity: (N,) floating-point numbers of at least 0; NaN counts as 0.
        total: Sum of the widths, N to 8 N.

    Returns:
        (N,) uint8 widths, 1 to 8.
    """
    count = sensitivity.numel()
    widths = torch.arange(NARROWEST, WIDEST + 1, dtype=torch.float64)
    noise = (torch.exp2(widths) - 1) ** -2
    gains = torch.outer(noise[:-1] - noise[1:], sensitivity.detach().to("cpu", torch.float64).nan_to_num())
    order = gains.flatten().argsort(descending=True, stable=True)  # ties: first the first bit of all
    chosen = order[: total - NARROWEST * count] % count
    return (NARROWEST + torch.bincount(chosen, minlength=count)).to(torch.uint8)


_WIDTH_KEY = 0x5851F42D4C957F2D  # moves the seed, for each bit of width
_METADATA_BYTES = 6  # of a bucket: float32 minimum, bfloat16 scale
_ALIGNMENT = 4
_FEWEST_SHARE = 4  # a bucket has at least bucket_size over this many elements, unless a part is one


class _Division(NamedTuple):
    """Equal parts of a tensor, each a run of memory, and equal buckets of a part."""

    parts: int
    elements: int
    bucket: int

    @property
    def buckets(self) -> int:
        return self.elements // self.bucket


@dataclass(frozen=True, kw_only=True)
class SampleQuantizer(ApartQuantizer):
    """Uniform quantizer that gives each sample of a batch a width of its own, 1 to 8 bits, `bit_width` in the mean.

    Widths b_n of N samples minimize the noise that they add to the gradient, under sum_n b_n <= floor(bit_width * N):

        sum_n g_n sum_k R_nk^2 / (2^b_n - 1)^2

    R_nk are the ranges of the buckets of sample n; g_n is the squared norm of its gradient if `weights` has it, or 1.

    Samples are the indices of dimension 0 if this dimension is the slowest in memory, as in contiguous tensors and in
    channels_last; of other tensors they are the indices of the slowest dimension. Samples of fewer than `bucket_size`
    elements share a width with their neighbours. A bucket lies in one sample: it has the largest number of elements up
    to `bucket_size` that divides the sample, or all of the sample.

    **Bytes**: the samples of each width, in ascending order of widths, packed as a 1-D tensor by the `UniformQuantizer`
    of that width, from the next multiple of 4 on; zeros; a uint8 width for each sample. Their number follows from the
    layout alone. On a GPU, quantizing and decoding wait for the device: the host finds widths from ranges, and the
    samples of a width.

    Source: ActNN, arXiv:2104.14129, sections 4.2 and 4.3, equations 9 and 10. Differs: the widths are the best ones for
    these sensitivities (`widths_of_least_noise`), of every kind of layer. Bytes depend on the number of samples: with
    `torch.compile`, tensors of another size make another graph, `dynamic=True` or not.

    >>> q = SampleQuantizer(bit_width=2)
    >>> x = torch.stack([torch.linspace(0, scale, 512) for scale in (1.0, 1.0, 9.0)])
    >>> q.bit_widths(q.quantize(x, seed=0)).tolist()
    [1, 1, 4]

    Args:
        bit_width: Bits a code in the mean over the samples, a number from 1 to 8.
        rounding: Nearest or stochastic.
        bucket_size: Most consecutive elements that share a scale, at least 8.
        weights: Factors of the sensitivities of the batch that runs; None for 1. Quantizers with weights have no text,
            so that graphs of `torch.compile` leave their ops to the compiler.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If an argument has the wrong type.
    """

    bit_width: float = 2
    rounding: Rounding = Rounding.STOCHASTIC
    bucket_size: int = 512
    weights: SampleWeights | None = None

    def __post_init__(self) -> None:
        check_number("bit_width", self.bit_width, NARROWEST, WIDEST)
        check_int("bucket_size", self.bucket_size, 8)
        if not (self.weights is None or isinstance(self.weights, SampleWeights)):
            raise TypeError(f"weights: got {brief(self.weights)}; accepted are a SampleWeights and None")
        object.__setattr__(self, "rounding", self._of_width(NARROWEST, self.bucket_size).rounding)

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        if layout.numel == 0:
            return (Part("packs", torch.uint8, 0),)
        division = self._division(layout)
        widths = min(division.parts, WIDEST)
        ragged = 0 if division.elements % 8 == 0 else sum(range(NARROWEST, WIDEST + 1))
        codes = -(-self._total(division) * division.elements // 8) + ragged
        metadata = division.parts * division.buckets * _METADATA_BYTES + widths * (_ALIGNMENT + 1)
        return Part("packs", torch.uint8, codes + metadata), Part("bit_widths", torch.uint8, division.parts)

    def bit_widths(self, packed: PackedActivation) -> Tensor:
        """The uint8 widths that the samples of a quantized tensor, which is not empty, have."""
        return packed.tensors[1]

    def kinds(self, layout: Layout, choice: Tensor) -> Iterable[tuple[PackedSpec[Any], Tensor, int]]:
        division, widths = self._division(layout), choice.cpu()
        buckets = torch.arange(division.buckets)
        for width in widths.unique().tolist():
            parts = (widths == width).nonzero()
            rows = (parts * division.buckets + buckets).view(-1).to(choice.device)
            own = Layout((len(parts) * division.elements,), (1,), layout.dtype)
            yield PackedSpec(self._of_width(width, division.bucket), own), rows, width * _WIDTH_KEY

    def choose(self, flat: Tensor, layout: Layout, seed: int | Tensor) -> Tensor:
        """(parts,) uint8 widths on the CPU; ranges of finite elements, and weights, decide."""
        division = self._division(layout)
        geometry = Geometry.of_buckets(layout.numel, WIDEST, division.bucket)
        low, high, _, _ = kernel_ops.ranges(flat, geometry)
        ranges = (high.cpu().double() - low.cpu().double()).nan_to_num().view(division.parts, division.buckets)
        sensitivity = ranges.square().sum(1)
        if self.weights is not None and layout.dims and layout.dims[0] == 0:
            factors = self.weights.of_parts(division.parts, layout.shape[0])
            sensitivity = sensitivity if factors is None else sensitivity * factors
        return widths_of_least_noise(sensitivity, self._total(division))

    def _total(self, division: _Division) -> int:
        return math.floor(self.bit_width * division.parts)

    def _division(self, layout: Layout) -> _Division:
        # In a graph with symbols for sizes, int makes it one of these sizes.
        return _division(int(layout.numel), int(layout.sizes[0]) if layout.sizes else 1, self.bucket_size)

    def _of_width(self, bit_width: int, bucket_size: int) -> UniformQuantizer:
        return UniformQuantizer(bit_width=bit_width, rounding=self.rounding, bucket_size=bucket_size)


@functools.lru_cache(maxsize=4096)
def _division(numel: int, rows: int, bucket_size: int) -> _Division:
    """Parts of as few rows as have a bucket's elements together, and their buckets."""
    enough = (n for n in range(1, rows + 1) if rows % n == 0 and n * (numel // rows) >= bucket_size)
    parts = rows // next(enough, rows)
    elements = numel // parts
    sizes = range(min(bucket_size, elements), bucket_size // _FEWEST_SHARE, -1)
    return _Division(parts, elements, next((size for size in sizes if elements % size == 0), elements))
