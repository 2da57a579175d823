"""Pooling: max-pooling saves the position in its window in the fewest bits, average pooling saves nothing.

A maximum's flat index i in the input map is saved as its position in the window, sum over the dimensions of
(coordinate - window start) / dilation * place value: ceil(log2(window elements)) bits. Exact.
Source: DIVISION, arXiv:2208.04187, section 3.4.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.call_arguments import Parameters
from brevact.autograd.deriving.derived import Kind, derive
from brevact.autograd.ops.base import Formula, Needs, blank, save
from brevact.autograd.ops.op import EXACT, NOTHING, Op, Saves, Stored, everywhere
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import Decoder, Region
from brevact.qat.integer_codes import track_pooled_codes
from brevact.quantizers import pack_codes, unpack_codes

aten = torch.ops.aten


class _Windows(NamedTuple):
    input: tuple[int, ...]
    extent: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def bit_width(self) -> int:
        return max(1, (math.prod(self.extent) - 1).bit_length())

    def _first(self, like: Tensor) -> Tensor:
        """Flat input index of each window's first element (.., *outputs), negative in padding; on ``like``'s device."""
        rank, stride = len(self.input), 1
        first = torch.zeros((), dtype=torch.int64, device=like.device)
        for dim in reversed(range(rank)):
            start = torch.arange(like.shape[dim - rank], device=like.device) * self.stride[dim] - self.padding[dim]
            first = first + (start * stride).view([-1 if axis == dim else 1 for axis in range(rank)])
            stride *= self.input[dim]
        return first

    def _distances(self, device: torch.device) -> tuple[Tensor, int]:
        """Distance in the flat input from a window's first element to each position, and the largest distance."""
        position = torch.arange(math.prod(self.extent), device=device)
        distance, farthest, stride = torch.zeros_like(position), 0, 1
        for dim in reversed(range(len(self.input))):
            step = self.dilation[dim] * stride
            distance += position % self.extent[dim] * step
            farthest += (self.extent[dim] - 1) * step
            position = position // self.extent[dim]
            stride *= self.input[dim]
        return distance, farthest

    def position(self, index: Tensor) -> Tensor:
        """Flat input index (.., *outputs) -> position in the window (elements,), int32.

        It is looked up by distance: dividing each index takes far longer. If a window is wider than the input, two
        positions may share a distance; either decodes to the index.
        """
        distance, farthest = self._distances(index.device)
        positions = torch.zeros(farthest + 1, dtype=torch.int32, device=index.device)
        positions[distance] = torch.arange(len(distance), dtype=torch.int32, device=index.device)
        return positions.index_select(0, (index - self._first(index)).reshape(-1))

    def index(self, position: Tensor) -> Tensor:  # type: ignore[override]
        """Position in the window (.., *outputs), integers -> flat input index, int64."""
        distance, _ = self._distances(position.device)
        return distance.index_select(0, position.view(-1)).view(position.shape) + self._first(position)


@dataclass(frozen=True, slots=True)
class _Positions(Decoder):
    windows: _Windows
    shape: torch.Size

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        codes = unpack_codes(tensors[0], self.windows.bit_width, math.prod(self.shape))
        return self.windows.index(codes.view(self.shape))

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return storage_report.EXACT, 8 * math.prod(self.shape)


class _Pick(NamedTuple):
    rank: int

    def __call__(self, x: Tensor, index: Tensor) -> Tensor:
        return x.flatten(-self.rank).gather(-1, index.flatten(-self.rank)).view(index.shape)


_OF_POOL = Parameters("input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False")


def _max_pool(region: Region, func: Callable, *args: Any, **kwargs: Any) -> Any:
    given = _OF_POOL.read(args, kwargs)
    if given is None:
        return NotImplemented
    input, kernel_size, stride, padding, dilation, ceil_mode, return_indices = given.values()
    dims, returns_index = _MAX_POOLS[func]
    if not (region.can_pack_layer_input(input) and input.requires_grad and input.numel()):
        return NotImplemented
    is_map = input.dim() in (dims + 1, dims + 2)
    sizes = _window_sizes(dims, kernel_size, stride, padding, dilation) if is_map else None
    if sizes is None or (sizes[0][-1] - 1) * sizes[3][-1] >= input.shape[-1] + 2 * sizes[2][-1]:
        return NotImplemented  # torch raises the error
    flat = (1,) if dims == 1 else ()
    kernel, stride, dilation = (flat + sizes[i] for i in (0, 1, 3))
    padding = (0,) * len(flat) + sizes[2]
    geometry = (kernel, stride, padding, dilation, ceil_mode)
    pool, pool_backward = _ATEN_MAX[len(kernel)]
    windows = _Windows(flat + tuple(input.shape[-dims:]), kernel, stride, padding, dilation)
    input = input.unsqueeze(-2) if dims == 1 else input  # a 1-d pooling runs as 2-d over maps of height one
    input_like = input.shape, input.stride(), input.dtype

    def run(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        out, index = pool(x, *geometry)
        track_pooled_codes(x, index, out, len(windows.input))
        codes = pack_codes(windows.position(index), windows.bit_width)
        source = region.find_known(x)
        if source is not None:
            picked = (codes,), _Positions(windows, index.shape)
            derive(region, out, _Pick(len(windows.input)), ((x, source), (index, picked)), is_pointwise=False)
        save(ctx, exact=(codes,))
        ctx.mark_non_differentiable(index)
        return out, index

    def gradients(needs: Needs, grad: Tensor, _: None, codes: Tensor) -> tuple[Any, ...]:
        index = _Positions(windows, grad.shape).decode((codes,))
        return (pool_backward(grad, blank(input_like, grad), *geometry, index),)

    found = region.apply(Formula, run, gradients, input)
    found = tuple([x.squeeze(-2) for x in found]) if dims == 1 else found
    return found if (return_indices if returns_index is None else returns_index) else found[0]


def _window_sizes(dims: int, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[tuple[int, ...]] | None:
    """Kernel, stride, padding and dilation per dimension; None if torch might refuse them."""
    stride = kernel if stride is None or (isinstance(stride, list | tuple) and not stride) else stride
    sizes = []
    for value, least in ((kernel, 1), (stride, 1), (padding, 0), (dilation, 1)):
        values = tuple(value) if isinstance(value, list | tuple) else (value,)
        values = values * dims if len(values) == 1 else values
        if len(values) != dims or not all(type(x) is int and x >= least for x in values):
            return None
        sizes.append(values)
    return sizes if all(2 * p <= k for k, p in zip(sizes[0], sizes[2], strict=True)) else None


_DIMS = (1, 2, 3)
#: Functions with the dimensions that they pool, and whether they return indices; None: the caller chooses.
_MAX_POOLS: dict[Callable, tuple[int, bool | None]] = {
    **{getattr(F, f"max_pool{dims}d"): (dims, None) for dims in _DIMS},
    **{getattr(torch, f"max_pool{dims}d"): (dims, False) for dims in _DIMS},
    **{getattr(F, f"max_pool{dims}d_with_indices"): (dims, True) for dims in _DIMS},
}
#: ATen's functions of two and three dimensions, and their gradients.
_ATEN_MAX = {
    2: (aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward),
    3: (aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward),
}


def _places_in_maps(dims: int, tensors: Sequence[Tensor]) -> int:
    return math.prod(tensors[0].shape[-dims:])


_MAXIMUM = Stored("max-pooling", "position in the window, ceil(log2(window)) bits", EXACT)
OPS = (
    Op(tuple(_MAX_POOLS), _max_pool, _MAXIMUM),
    *(
        Op(
            everywhere(f"adaptive_max_pool{dims}d", f"adaptive_max_pool{dims}d_with_indices"),
            stored=Stored("adaptive max-pooling", "the indices, in the smallest integers that hold them", EXACT),
            saves=Saves.SIZES,
            places=functools.partial(_places_in_maps, dims),
        )
        for dims in _DIMS
    ),
    Op(
        everywhere(*(f"{kind}_pool{dims}d" for kind in ("avg", "adaptive_avg") for dims in _DIMS)),
        stored=Stored("average pooling", NOTHING, EXACT),
        saves=Saves.SIZES,
        kind=Kind.AVERAGE,
    ),
    Op(everywhere("interpolate", "upsample"), stored=Stored("interpolation", NOTHING, EXACT), saves=Saves.SIZES),
    Op(
        everywhere(
            *(f"max_pool{dims}d" for dims in _DIMS),
            *("fractional_max_pool2d", "fractional_max_pool3d", "max_unpool1d", "max_unpool2d", "max_unpool3d"),
        ),
        saves=Saves.SIZES,
    ),
)
