"""Ops that move elements: indices, masks and sampling points are saved exactly, elements only where they matter.

Gradients by the elements do not depend on them: torch saves a gather's or a reflected or replicated border's input for
its sizes alone. A sampling grid is saved exactly: packed points would lie between other elements. dL/dgrid is linear in
the packed input: unbiased.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.deriving.derived import Kind
from brevact.autograd.ops.base import Formula, Needs, blank, requires_grad, run_inside, save
from brevact.autograd.ops.op import EXACT, MASKS, NOTHING, UNBIASED, Op, Saves, Stored, everywhere, places_in_first
from brevact.autograd.saving.saved import Region
from brevact.private_names.of_torch import nn_pad

aten = torch.ops.aten


def _grid_sampler(
    region: Region,
    func: Callable,
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Any:
    if not (region.is_activation(input) and region.is_activation(grid) and requires_grad(input, grid)):
        return NotImplemented
    if input.dim() not in (4, 5) or input.numel() == 0:
        return NotImplemented
    options = (interpolation_mode, padding_mode, align_corners)
    input_like, grid_dtype = (input.shape, input.stride(), input.dtype), grid.dtype

    def run(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
        save(ctx, region.keep_activation(x) if ctx.needs_input_grad[4] else None, exact=(g,))
        return func(x, g, *options)

    def gradients(needs: Needs, grad: Tensor, kept: Any, g: Tensor) -> tuple[Any, ...]:
        x = blank(input_like, grad) if kept is None else kept.decode()
        backward = aten.grid_sampler_2d_backward if x.dim() == 4 else aten.grid_sampler_3d_backward
        found = backward(grad, x.to(grad.dtype), g.to(grad.dtype), *options, list(needs))
        like = zip(found, (input_like[2], grid_dtype), needs, strict=True)
        return tuple(each.to(dtype) if needed else None for each, dtype, needed in like)

    return region.apply(Formula, run, gradients, input, grid)


_STORED = Stored("embedding, gather and other lookups", "the indices, in the smallest integers that hold them", EXACT)
_GRID = Stored("sampling on a grid", "the grid; the input, packed, where the grid trains", UNBIASED)
_GRID_SAMPLERS = (torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d)
_INDEXED = ("index_select", "gather", "take", "take_along_dim", "index_put", "index_add", "scatter")


def _places_in_bags(tensors: Sequence[Tensor]) -> int:
    """Return the number of the table's rows, or of saved indices and offsets if that is larger."""
    return max(places_in_first(tensors), *(x.numel() + 1 for x in tensors if not x.is_floating_point()))


_LOOKUPS = ("gather", "take_along_dim", "index_add", "index_copy")
_STORED_MASK = Stored("masked_select", MASKS, EXACT)

OPS = (
    Op(everywhere(*_LOOKUPS), stored=_STORED, saves=Saves.SIZES, places=places_in_first),
    Op(everywhere("take"), stored=_STORED, saves=Saves.SIZES, places=lambda tensors: tensors[0].numel()),
    Op(everywhere("masked_select"), stored=_STORED_MASK, saves=Saves.SIZES),
    Op((F.grid_sample,), run_inside(F.grid_sample), _GRID),
    Op(_GRID_SAMPLERS, _grid_sampler, _GRID),
    Op((Tensor.__getitem__, *(getattr(home, name) for name in _INDEXED for home in (torch, Tensor))), looks_up=True),
    Op(everywhere("embedding"), stored=_STORED, saves=Saves.PLACES, is_layer=True, places=places_in_first),
    Op(everywhere("embedding_bag"), saves=Saves.FACTORS, is_layer=True, places=_places_in_bags),
    Op(
        (F.pad, nn_pad),  # Dynamo sees the former as the latter
        stored=Stored("padding", NOTHING, EXACT),
        saves=Saves.SIZES,
        kind=Kind.MOVE,
    ),
    Op(
        everywhere("index_select index_fill index_put scatter scatter_add getitem setitem"),
        saves=Saves.PLACES,
        places=places_in_first,
    ),
    Op(everywhere("constant_pad_nd", "put", "masked_fill", "masked_scatter"), saves=Saves.PLACES),
)
