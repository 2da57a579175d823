"""Dropout of elements and of channels: an exact mask, one bit per random number.

The gradient is g times the factor of kept elements, and 0 elsewhere. Random numbers are those that torch draws. Alpha
dropout replaces dropped elements by SELU's limit and scales all by a = ((1 - p) (1 + alpha'^2 p))^(-1/2), which keeps
mean and variance. Source: Klambauer et al., arXiv:1706.02515, section "New dropout technique".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.derived import derive
from brevact.autograd.expressions import ByMask
from brevact.autograd.ops.base import Formula, save, times_mask
from brevact.autograd.ops.op import EXACT, MASKS, Op, Saves, Stored, everywhere
from brevact.autograd.rectified import stand_in
from brevact.autograd.saved import Keeper, Saved
from brevact.autograd.store import keep_mask
from brevact.private_names.of_torch import no_dispatch_modes

_ALPHA = 1.7580993408473766  # SELU's scale times its alpha, as in torch


@functools.lru_cache(maxsize=256)
def _noise_of_kept(p: float, dtype: torch.dtype, alpha: bool = False) -> float:
    with no_dispatch_modes():  # a selective checkpoint counts ops
        one = torch.ones((), dtype=dtype)
        return float(one.mul_(_alpha_factor(p)) if alpha else one.div_(1 - p))


def _alpha_factor(p: float) -> float:
    return 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))


class _Noise(NamedTuple):
    of_channels: bool = False
    alpha: bool = False


_OF_ELEMENTS = _Noise()


def _apply(region: Keeper, input: Tensor, p: float, kind: _Noise, inplace: bool) -> Tensor:
    def run(ctx: Any, input: Tensor) -> Tensor:
        source, shift = region.find_kept(input), None
        factor = _alpha_factor(p) if kind.alpha else 1.0 / (1.0 - p)
        if kind == _OF_ELEMENTS and input.device.type != "cpu":
            out, mask = torch.native_dropout(input, p, True)
            out = input.copy_(out) if inplace else out
        else:
            sizes = (*input.shape[:2], *(1 for _ in input.shape[2:]))
            noise = input.new_empty(sizes) if kind.of_channels else torch.empty_like(input)
            mask = noise.bernoulli_(1 - p).bool()  # a comparison takes nine times as long
            if kind.alpha:
                shift = noise.add(-1).mul_(_ALPHA * factor).add_(_ALPHA * factor * p)
                noise.mul_(factor)
            else:
                noise.div_(1 - p)
            factor = _noise_of_kept(p, input.dtype, kind.alpha)
            out = input.mul_(noise) if inplace else input * noise
        kept = keep_mask(mask)
        save(ctx, kept)
        stride = None if kind.of_channels else mask.stride()
        ctx.gradients = times_mask(factor, stride, is_exact=region.settings.is_exact)
        if shift is None:
            derive(region, out, ByMask(factor), ((input, source), (mask, kept)), is_dirty=inplace)
        if inplace:
            ctx.mark_dirty(input)
        return out if shift is None else out.add_(shift)

    return region.apply(Formula, run, None, input)


def _by_torch(region: Keeper, func: Callable, input: Tensor, p: float, inplace: bool) -> Any:
    """Run torch's own dropout; a mask replaces the noise that it saves."""
    runner = region.torch_runner(input)
    if runner is None or input.numel() < region.settings.min_numel:
        return NotImplemented
    source, masks = region.find_kept(input), []

    def keep(noise: Tensor) -> Saved:
        masks.append(keep_mask(noise.bool()))
        factor = 1.0 if noise.dtype is torch.bool else _noise_of_kept(p, noise.dtype)
        return stand_in(masks[0], noise.dtype, factor)

    out = runner.run_torch_function(lambda x: func(x, p, True, inplace), input, keep=keep)
    if len(masks) == 1:
        factor = _noise_of_kept(p, input.dtype) if input.device.type == "cpu" else 1.0 / (1.0 - p)
        derive(region, out, ByMask(factor), ((input, source), (input, masks[0])))
    return out


def _handler(kind: _Noise, dims: int = 0, unbatched: int | None = None) -> Callable:
    """Make the handler of a dropout: of maps of ``dims`` dimensions, or of ``unbatched`` without a batch; 0: of any."""

    def handle(
        region: Keeper,
        func: Callable,
        input: Tensor,
        p: float = 0.5,
        training: Any = ...,  # not given; None is torch's error
        inplace: bool = False,
        *,
        train: Any = ...,
    ) -> Any:
        training = train if training is ... else training
        training = not kind.alpha if training is ... else training
        inplace = inplace or func.__name__.endswith("_")
        if not (region.packs_input(input) and input.requires_grad and training and 0.0 < p < 1.0 and input.numel()):
            return NotImplemented  # nothing is dropped, or all is
        if (kind.of_channels and input.dim() < 2) or (dims and input.dim() not in (dims, unbatched)):
            return NotImplemented  # torch warns
        if region.settings.double_backward:
            return _by_torch(region, func, input, p, inplace)
        if not dims or input.dim() == dims:
            return _apply(region, input, p, kind, inplace)
        if inplace:
            return NotImplemented  # torch changes the input's own shape, and back
        return _apply(region, input.unsqueeze(0), p, kind, False).squeeze(0)

    return handle


_MAPS = _Noise(of_channels=True)
#: Kinds of noise, and dimensions of maps with and without a batch, by functions.
_KINDS: dict[tuple[Callable, ...], tuple] = {
    (torch.dropout, torch.dropout_): (_OF_ELEMENTS,),
    (F.dropout1d,): (_MAPS, 3, 2),
    (F.dropout2d,): (_MAPS, 4),
    (F.dropout3d,): (_MAPS, 5, 4),
    (F.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_): (_Noise(alpha=True),),
    (F.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_alpha_dropout_): (_Noise(True, True),),
    (torch.feature_dropout, torch.feature_dropout_): (_MAPS,),
}
_STORED = Stored("dropout of every kind", MASKS, EXACT)
OPS = (
    Op((F.dropout,), _handler(_OF_ELEMENTS), _STORED, twice=True),
    *(Op(functions, _handler(*kind), _STORED) for functions, kind in _KINDS.items()),
    Op(everywhere("dropout", "native_dropout"), saves=Saves.FACTORS),
)
