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
from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.base import SavedValue, Saving, load, save
from brevact.autograd.ops.op import EXACT, MASKS, Op, Saves, Stored, everywhere
from brevact.autograd.rectified import stand_in
from brevact.autograd.saved import Saved
from brevact.autograd.store import keep_mask
from brevact.autograd.strides import lay_out
from brevact.private_names.of_torch import no_dispatch_modes
from brevact.quantizers import is_traced

_ALPHA = 1.7580993408473766  # SELU's scale times its alpha, as in torch


@functools.lru_cache(maxsize=256)
def _noise_of_kept(p: float, dtype: torch.dtype, alpha: bool = False) -> float:
    """Return torch's factor of kept elements, rounded to the noise's dtype, which is the input's."""
    with no_dispatch_modes():  # a selective checkpoint counts ops
        one = torch.ones((), dtype=dtype)
        return float(one.mul_(_alpha_factor(p)) if alpha else one.div_(1 - p))


def _alpha_factor(p: float) -> float:
    return 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))


def _masked(kept: SavedValue, grad: Tensor, ctx: Any) -> Tensor:
    """Return the gradient where the mask is set, else 0; if lossless, a non-finite gradient becomes NaN there."""
    return grad * kept.decode() if ctx.is_exact else kept.multiply(grad)


class _Dropout(Saving):
    @staticmethod
    def forward(ctx: Any, region: Keeper, input: Tensor, p: float, inplace: bool) -> Tensor:
        source = region.find_kept(input)
        ctx.factor = 1.0 / (1.0 - p)
        if input.device.type == "cpu":  # same draws and same rounding as torch's own dropout
            if is_traced(input):  # compilers draw Bernoulli variables from other numbers
                noise = F.dropout(torch.ones_like(input), p, True)
            else:
                ctx.factor = _noise_of_kept(p, input.dtype)
                noise = torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)
            mask = noise.bool()  # a comparison takes nine times as long
            out = input.mul_(noise) if inplace else input * noise
        else:
            out, mask = torch.native_dropout(input, p, True)
            out = input.copy_(out) if inplace else out
        ctx.stride, ctx.is_exact = mask.stride(), region.settings.is_exact
        kept = keep_mask(mask)
        derive(region, out, ByMask(ctx.factor), ((input, source), (mask, kept)), is_dirty=inplace)
        if inplace:
            ctx.mark_dirty(input)
        save(ctx, kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = load(ctx)
        return None, lay_out(_masked(kept, grad, ctx).mul_(ctx.factor), grad, ctx.stride), None, None


def _twice(region: Keeper, input: Tensor, p: float, dropout: Callable[[Tensor], Tensor]) -> Any:
    """Run torch's own dropout, which supports double backward; a mask replaces the noise that it saves."""
    runner = region.torch_runner(input)
    if runner is None or input.numel() < region.settings.min_numel:
        return NotImplemented
    source, masks = region.find_kept(input), []

    def keep(noise: Tensor) -> Saved:
        masks.append(keep_mask(noise.bool()))
        factor = 1.0 if noise.dtype is torch.bool else _noise_of_kept(p, noise.dtype)
        return stand_in(masks[0], noise.dtype, factor)

    out = runner.run_torch_function(dropout, input, keep=keep)
    if len(masks) == 1:
        factor = _noise_of_kept(p, input.dtype) if input.device.type == "cpu" else 1.0 / (1.0 - p)
        derive(region, out, ByMask(factor), ((input, source), (input, masks[0])))
    return out


class _Noise(NamedTuple):
    """Shape of the noise, one number per channel or per element, and whether it is for alpha dropout."""

    of_channels: bool
    alpha: bool


class _ComposedDropout(Saving):
    """Dropouts that torch composes from a Bernoulli draw and products."""

    @staticmethod
    def forward(ctx: Any, region: Keeper, input: Tensor, p: float, kind: _Noise, inplace: bool) -> Tensor:
        if kind.of_channels:
            noise = input.new_empty((*input.shape[:2], *(1 for _ in input.shape[2:])))
        else:
            noise = torch.empty_like(input)
        noise.bernoulli_(1 - p)
        kept, source = keep_mask(noise.bool()), region.find_kept(input)
        save(ctx, kept)
        ctx.is_exact = region.settings.is_exact
        if kind.alpha:
            ctx.factor = factor = _alpha_factor(p)
            shift = noise.add(-1).mul_(_ALPHA * factor).add_(_ALPHA * factor * p)
            noise.mul_(factor)
        else:
            ctx.factor, shift = 1.0 / (1.0 - p), None
            noise.div_(1 - p)
        if not is_traced(input):
            ctx.factor = _noise_of_kept(p, input.dtype, kind.alpha)
        out = input.mul_(noise) if inplace else input.mul(noise)
        if shift is None:
            derive(region, out, ByMask(ctx.factor), ((input, source), (noise, kept)), is_dirty=inplace)
        if inplace:
            ctx.mark_dirty(input)
        return out if shift is None else out.add_(shift)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = load(ctx)
        mask = kept.decode()
        is_of_elements = mask.shape == grad.shape
        grad_input = lay_out(_masked(kept, grad, ctx), grad, mask.stride()) if is_of_elements else grad * mask
        return None, grad_input.mul_(ctx.factor), None, None, None


def _drops(region: Keeper, input: Any, p: float, training: bool) -> bool:
    """Return whether some but not all elements are dropped; otherwise nothing is saved, or torch raises an error."""
    return region.packs_input(input) and input.requires_grad and training and 0.0 < p < 1.0


def _copy_of_known(region: Keeper, func: Callable, input: Tensor, p: float, training: bool, inplace: bool) -> Any:
    """Run a dropout that drops nothing: a compiled one copies its input, and the copy shares the input's saved form."""
    if inplace or not (region.is_activation(input) and is_traced(input) and (p == 0.0 or not training)):
        return NotImplemented
    out = func(input, p, training)
    known = region.find_kept(input)
    if known is not None and out is not input:
        region.register(out, known)
    return out


def _dropout(
    region: Keeper, func: Callable, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not _drops(region, input, p, training):
        return _copy_of_known(region, func, input, p, training, inplace)
    return region.apply(_Dropout, input, p, inplace)


def _dropout_twice(
    region: Keeper, func: Callable, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not _drops(region, input, p, training):
        return NotImplemented
    return _twice(region, input, p, lambda x: func(x, p, training, inplace))


def _compose(region: Keeper, input: Tensor, p: float, training: bool, inplace: bool, *, kind: _Noise) -> Any:
    if not _drops(region, input, p, training) or (kind.of_channels and input.dim() < 2) or input.numel() == 0:
        return NotImplemented
    return region.apply(_ComposedDropout, input, p, kind, inplace)


def _of_maps(dims: int, unbatched: int | None = None) -> Callable:
    """Make the handler of channel dropout for maps of ``dims`` dimensions, or of ``unbatched`` without a batch."""
    kind = _Noise(of_channels=True, alpha=False)

    def handle(
        region: Keeper, func: Callable, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not _drops(region, input, p, training) or input.dim() not in (dims, unbatched) or input.numel() == 0:
            return NotImplemented  # nothing is dropped, or torch warns
        if input.dim() == dims:
            return region.apply(_ComposedDropout, input, p, kind, inplace)
        if inplace:
            return NotImplemented  # torch changes the input's own shape, and back
        return region.apply(_ComposedDropout, input.unsqueeze(0), p, kind, False).squeeze(0)

    return handle


def _alpha(of_channels: bool) -> Callable:
    def handle(
        region: Keeper, func: Callable, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Any:
        return _compose(region, input, p, training, inplace, kind=_Noise(of_channels, True))

    return handle


def _in_torch(run: Callable[[Keeper, Tensor, float, bool, bool], Any]) -> Callable:
    """Make the handler of a dropout in ``torch``, in place if its name ends in an underscore."""

    def handle(region: Keeper, func: Callable, input: Tensor, p: float, train: bool) -> Any:
        return run(region, input, p, train, func.__name__.endswith("_"))

    return handle


_KINDS = {
    "feature_dropout": _Noise(True, False),
    "alpha_dropout": _Noise(False, True),
    "feature_alpha_dropout": _Noise(True, True),
}
_STORED = Stored("dropout of every kind", MASKS, EXACT)
OPS = (
    Op((F.dropout,), _dropout, _STORED, _dropout_twice),
    Op((F.dropout1d,), _of_maps(3, unbatched=2), _STORED),
    Op((F.dropout2d,), _of_maps(4), _STORED),
    Op((F.dropout3d,), _of_maps(5, unbatched=4), _STORED),
    Op((F.alpha_dropout,), _alpha(of_channels=False), _STORED),
    Op((F.feature_alpha_dropout,), _alpha(of_channels=True), _STORED),
    Op(
        (torch.dropout, torch.dropout_),
        _in_torch(lambda region, input, p, train, inplace: _dropout(region, torch.dropout, input, p, train, inplace)),
        _STORED,
    ),
    *(
        Op(
            (getattr(torch, name), getattr(torch, f"{name}_")),
            _in_torch(functools.partial(_compose, kind=kind)),
            _STORED,
        )
        for name, kind in _KINDS.items()
    ),
    Op(everywhere("dropout", "native_dropout"), saves=Saves.FACTORS),
)
