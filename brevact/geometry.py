"""How tensors are divided into blocks and groups, and the levels of their codes: plain data for the kernels."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DEFAULT_BLOCK = 512
LARGEST_BLOCK = 4096
SMALLEST_GAP = 2.0**-126
"""Smallest normal float32: closer levels count as equal, so that the inverse of a gap stays finite."""

SENTINELS = (1e7, 1e8, 1e9, 1e10, 1e12, 1e15, 1e20, 1e30)
"""Far values of uneven buckets with codes of their own, exact; others keep 16 significant bits."""
BEND, STRETCH, FAR = 2.5, 50.0, 1e4
"""Magnitude at which derivatives of activation functions bend, how far levels are stretched around it, 21 times at 0,
and the magnitude from which on no farther; see `quantizers.reference.stretched`."""
_DEFAULT_METADATA = torch.bfloat16, torch.float32


def block_size_for(bucket_size: int | None) -> int:
    """Elements per packing block: whole buckets where the block stays small, so that a block needs no other metadata.

    The smallest multiple of the bucket size and 8 that is at least 512, if it is at most 4096; else, and without
    buckets, 512.
    """
    if bucket_size is None:
        return DEFAULT_BLOCK
    multiple = math.lcm(bucket_size, 8)
    block = -(-DEFAULT_BLOCK // multiple) * multiple
    return block if block <= LARGEST_BLOCK else DEFAULT_BLOCK


def packed_bytes(numel: int, bit_width: int, block_size: int) -> int:
    """Bytes of packed codes: `bit_width` bits per element, the last block rounded up to eight elements."""
    blocks, tail = numel // block_size, numel % block_size  # divmod takes no symbolic sizes
    return bit_width * (blocks * (block_size // 8) + -(-tail // 8))


@dataclass(frozen=True)
class Geometry:
    """Blocks and groups of a flat tensor: the group of element e is `e // inner % groups`.

    Args:
        numel: Number of elements.
        bit_width: Bits per code.
        block_size: Elements per packing block, a multiple of 8.
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

    @staticmethod
    def of_buckets(numel: int, bit_width: int, bucket_size: int | None) -> Geometry:
        """Groups of consecutive elements, the last possibly shorter; a single group if `bucket_size` is None."""
        inner = max(numel, 1) if bucket_size is None else bucket_size
        return Geometry(numel, bit_width, block_size_for(bucket_size), inner, -(-numel // inner), True)

    @staticmethod
    def of_indices(numel: int, bit_width: int, inner: int, groups: int) -> Geometry:
        """One group per index of a dimension, as returned by `Layout.groups_along`."""
        return Geometry(numel, bit_width, DEFAULT_BLOCK, inner, groups if numel else 0, inner * groups >= numel)

    @property
    def in_blocks(self) -> bool:
        """Whether each group is one run of elements inside of a packing block, as kernels of uniform codes want it."""
        return self.one_run and self.block_size % self.inner == 0

    @property
    def code_bytes(self) -> int:
        return packed_bytes(self.numel, self.bit_width, self.block_size)


@dataclass(frozen=True, eq=False)
class Grid:
    """How a tensor's codes decode: code q of group g is offset[g] + scale[g] * levels[row, q].

    Args:
        levels: (R, N) float32 levels, each row ascending (equal neighbours are allowed); R is 1 or the number of
            groups, one row per group.
        bounds: (R, N - 1) float32 bounds of nearest rounding: the code of z is the number of bounds b with z >= b. None
            puts them half-way between levels.
        offset: (G,) float32 offsets, or None for 0. A group with offset NaN decodes to NaN.
        scale: (G,) float32 scales, or None for 1; a group with scale 0 is constant. Only the magnitude scales: a sign
            bit, also that of 0, flags a group whose last code is NaN; finite elements take the other codes.
        marks: Whether non-finite elements take the last of the 2^b codes. It decodes to NaN in flagged groups, and
            where the last level of a row is NaN.
    """

    levels: Tensor
    bounds: Tensor | None = None
    offset: Tensor | None = None
    scale: Tensor | None = None
    marks: bool = False

    @property
    def inverse(self) -> Tensor | None:
        """(G,) inverse scales with their sign bits, 0 for constant and broken groups; None for 1."""
        if self.scale is None:
            return None
        step = self.scale.abs()
        return torch.where(step > 0, torch.ones_like(step) / step, 0.0).copysign(self.scale)

    def steps(self, *, stochastic: bool) -> Tensor:
        """(R, N - 1) float32: inverse gaps between levels, 0 where they are equal; for nearest rounding, the bounds."""
        low, high = self.levels[:, :-1], self.levels[:, 1:]
        if stochastic:
            gap = high - low
            return torch.where(gap >= SMALLEST_GAP, torch.ones_like(gap) / gap, 0.0)
        return low * 0.5 + high * 0.5 if self.bounds is None else self.bounds


@dataclass(frozen=True, eq=False)
class UniformPlan:
    """A tensor's groups and the byte offsets of their metadata, for the kernel ops of a uniform quantizer.

    A spec caches its plan: plans compare by identity.

    Args:
        geometry: Blocks and groups.
        scale_dtype: bfloat16 or float32.
        minimum_dtype: bfloat16 or float32.
        minimum_at: First byte of the minima; codes come first.
        scale_at: First byte of the scales.
        dithered: Whether groups, which then lie in blocks, may shift their levels; see `kernel_ops.quantize_uniform`.
        stretched: Whether codes are those of `reference.stretched` elements.
    """

    geometry: Geometry
    scale_dtype: torch.dtype
    minimum_dtype: torch.dtype
    minimum_at: int
    scale_at: int
    dithered: bool = False
    stretched: bool = False

    @functools.cached_property
    def has_kernels(self) -> bool:
        """Whether kernels take it: groups that each lie in one block, at most 8 bits, and the default metadata."""
        dtypes = self.scale_dtype, self.minimum_dtype
        return self.geometry.in_blocks and self.geometry.bit_width <= 8 and dtypes == _DEFAULT_METADATA

    @functools.cached_property
    def uneven(self) -> bool:
        """Whether groups with far values or tails have levels of their own, see `quantizers.uneven`."""
        return self.has_kernels and self.geometry.inner >= 8 and self.geometry.bit_width >= 2

    def split(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of a uint8 buffer: the codes, the (G,) minima and the (G,) scales."""
        minimum, scale = (
            buffer[start : start + self.geometry.groups * dtype.itemsize].view(dtype)
            for start, dtype in ((self.minimum_at, self.minimum_dtype), (self.scale_at, self.scale_dtype))
        )
        return buffer[: self.geometry.code_bytes], minimum, scale


class Place(NamedTuple):
    """Index of an element's statistics: e // outer * row + e % inner // run, for element e in memory order."""

    outer: int
    row: int
    inner: int
    run: int


class Segments(NamedTuple):
    """Runs of elements in one quantizer group with one affine map: within a run, equal codes decode to equal values.

    Element e lies in run b = e // inner of a group, and in run e // run of elements with the same statistics. Its
    segment is number b * slots + e // run - b * inner // run: each b has the same number of slots, some possibly
    unused.

    Args:
        inner: Consecutive elements of one group, see `Geometry`.
        run: Consecutive elements with the same statistics.
        slots: Maximum number of statistics runs that overlap one group run.
        rows: Slots of the whole tensor.
    """

    inner: int
    run: int
    slots: int
    rows: int

    @staticmethod
    def of(geometry: Geometry, place: Place | None) -> Segments:
        """Segments of a tensor; `place` locates its statistics, None without an affine map."""
        inner, run, slots = geometry.inner, max(geometry.numel, 1), 1
        if place is not None:
            run = place.run if place.row > 1 else place.outer
            slots = (run - math.gcd(inner, run) + inner - 1) // run + 1
        return Segments(inner, run, slots, -(-geometry.numel // inner) * slots)


class IntegerPlan(NamedTuple):
    """Fake quantization of a flat tensor: y = (clip(round(x / s + z), lowest, highest) - z) s,
    rounded to the nearest integer, half to even.

    Args:
        numel: Number of elements.
        bit_width: Bits per code; a code is an integer minus `lowest`.
        rectifies: Whether a ReLU precedes, so that x is its input.
        clips: Whether clipped elements have no gradient; elements that a ReLU sets to zero never have.
        has_spare: Whether the last code is NaN.
        inner: Consecutive elements of one scale and zero point.
        groups: Number of scales: element e has scale `e // inner % groups`.
    """

    numel: int
    bit_width: int
    lowest: int
    highest: int
    rectifies: bool
    clips: bool
    has_spare: bool
    inner: int
    groups: int


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def are_plain(arrays: tuple[Tensor | None, ...], *, on_gpu: bool) -> bool:
    """Whether all are plain tensors of a CPU or a GPU (ROCm as well) with memory, as kernels read them; not float64.

    Subclasses, zero tensors and those of torch.func may lack memory.
    """
    try:
        for x in arrays:
            if x is None:
                continue
            if type(x) not in _PLAIN_TYPES or not (x.is_cuda if on_gpu else x.is_cpu) or x.dtype is torch.float64:
                return False
            if x.data_ptr() == 0 and x.numel():
                return False
    except RuntimeError:  # data_ptr() of a wrapper
        return False
    return True
