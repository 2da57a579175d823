"""How a strided tensor's distinct elements lie in memory, and how to get them back into place."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Shape, strides and dtype of a tensor, and the order in which its distinct elements lie in memory.

    Dimensions of size 1 and expanded dimensions (stride 0) hold no elements of their own and are dropped. The others,
    slowest first, are `sizes`; element `e` of the memory order is element `e` of the contiguous array of that shape.

    >>> Layout.of(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)).sizes
    (2, 4, 5, 3)
    >>> Layout.of(torch.empty(3, 1).expand(3, 7)).numel
    3

    Args:
        shape: Sizes of the tensor.
        stride: Strides of the tensor, in elements.
        dtype: Data type of the tensor.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    dims: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Dimensions that hold elements, slowest in memory first."""
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Sizes of `dims`."""
    numel: int = field(init=False, repr=False, compare=False)
    """Number of distinct elements, those that are stored."""
    is_dense: bool = field(init=False, repr=False, compare=False)
    """Whether the distinct elements fill one run of memory."""
    result_stride: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Strides of a restored tensor: `stride`, unless elements of the original overlapped."""
    is_result_dense: bool = field(init=False, repr=False, compare=False)
    """Whether a restored tensor fills one run of memory (in memory order)."""

    def __post_init__(self) -> None:
        shape, stride = tuple(self.shape), tuple(self.stride)
        dims = tuple(
            sorted((d for d, size in enumerate(shape) if size != 1 and stride[d] != 0), key=lambda d: (-stride[d], d))
        )
        numel = 0 if 0 in shape else math.prod(shape[d] for d in dims)
        dense_stride, running = {}, 1
        span, overlaps = 1, False  # span: elements from the first to the last of the dimensions seen so far
        for d in reversed(dims):
            overlaps = overlaps or stride[d] < span
            span += (shape[d] - 1) * stride[d]
            dense_stride[d] = running
            running *= shape[d]
        overlaps = overlaps and numel > 0
        result_stride = tuple(dense_stride.get(d, 0) for d in range(len(shape))) if overlaps else stride
        is_dense = numel == 0 or all(stride[d] == dense_stride[d] for d in dims)
        sizes = tuple(shape[d] for d in dims)
        self.__dict__.update(shape=shape, stride=stride, dims=dims, sizes=sizes, numel=numel, is_dense=is_dense)
        self.__dict__.update(result_stride=result_stride, is_result_dense=is_dense or overlaps)

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = hash((self.shape, self.stride, self.dtype))
        return known

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the three defining fields: hashes do not outlive the process."""
        return Layout, (self.shape, self.stride, self.dtype)

    @staticmethod
    def of(x: Tensor) -> Layout:
        """Layout of a strided tensor of any shape and dtype; equal layouts are one shared object."""
        return layout_of(x.shape, x.stride(), x.dtype)

    @staticmethod
    def of_sizes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Layout:
        """Layout of these sizes and strides; equal layouts are one shared object."""
        return layout_of(tuple(shape), tuple(stride), dtype)

    def flatten(self, x: Tensor) -> Tensor:
        """The distinct elements of a tensor of this layout, of any dtype, in memory order; a view if they are dense."""
        if self.numel == 0:
            return x.reshape(-1)
        if self.is_dense:
            return x.as_strided((self.numel,), (1,)).resolve_neg()
        x = x.as_strided(self.sizes, tuple(self.stride[d] for d in self.dims)).resolve_neg()
        return x.contiguous().view(-1)

    def empty(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor of this layout, by default of its dtype, with `shape` and `result_stride`."""
        return torch.empty_strided(self.shape, self.result_stride, dtype=dtype or self.dtype, device=device)

    def restore(self, flat: Tensor) -> Tensor:
        """Put (numel,) elements in memory order back into place, inverting `flatten`; a view if the result is dense."""
        if self.is_result_dense:
            return flat.as_strided(self.shape, self.result_stride)
        x = self.empty(flat.device, flat.dtype)
        x.as_strided(self.sizes, tuple(self.stride[d] for d in self.dims)).copy_(flat.view(self.sizes))
        return x

    def matches(self, x: Tensor) -> bool:
        """Whether a tensor of this shape can be read flat: as many distinct elements, dense in this memory order."""
        if x.is_neg():
            return False
        other = Layout.of(x)
        if other is self:
            return self.is_dense
        return other.shape == self.shape and other.is_dense and other.dims == self.dims

    def groups_along(self, dim: int) -> tuple[int, int]:
        """How the indices of one dimension divide the memory order: group of element e is `e // inner % count`.

        Returns `(inner, count)`. A dimension that the tensor lacks, or that holds no elements of its own, makes one
        group.
        """
        dim = dim + len(self.shape) if dim < 0 else dim
        if dim not in self.dims:
            return max(self.numel, 1), 1
        position = self.dims.index(dim)
        return max(math.prod(self.sizes[position + 1 :]), 1), self.sizes[position]


@functools.lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """The layout with these fields; equal layouts are one shared object."""
    return Layout(shape, stride, dtype)
