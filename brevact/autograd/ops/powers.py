"""Powers with a constant exponent above 2: the quantized derivative is saved, so that the gradient stays unbiased.

y = x^p, dL/dx = g * p x^(p-1). A square saves x itself, by rows; below 1 the derivative is unbounded: it stays exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.base import Saving, load, save
from brevact.autograd.ops.norm.written_out import are_rows, keep_by_rows
from brevact.autograd.ops.op import Op, Saves, Stored, everywhere
from brevact.autograd.ops.smooth import STORED as SMOOTH
from brevact.autograd.ops.smooth import smooth_handler
from brevact.autograd.storages import is_offered
from brevact.quantizers import is_traced


class _PowerSlope(NamedTuple):
    exponent: float

    def __call__(self, one: Tensor, x: Tensor) -> Tensor:
        return torch.pow(x, self.exponent - 1) * self.exponent


class _Square(Saving):
    returns_new = True

    @staticmethod
    def forward(ctx: Any, region: Keeper, square: Callable, input: Tensor, *exponent: float) -> Tensor:
        save(ctx, keep_by_rows(region, input, (-1,)))
        return square(input, *exponent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = load(ctx)
        return None, None, kept.multiply(grad).mul_(2.0), *(None for _ in ctx.needs_input_grad[3:])


def keep_square(region: Any, func: Callable, input: Any, *exponent: float) -> Any:
    """Save a square's input by rows, whose mean may be a variance. Small tensors are left to torch."""
    if not (region.packs_input(input) and input.requires_grad and input.numel() >= region.settings.min_numel):
        return NotImplemented
    if (input.is_leaf and not is_traced(input)) or not are_rows(input.shape, (-1,)):
        return NotImplemented
    if not is_traced(input) and _may_be_held(region, input):
        runner = region.hooks if input.dtype is torch.float32 else region.torch_runner(input)  # autocast copies others
        if runner is not None:
            kept = keep_by_rows(region, input, (-1,))
            return runner.run_torch_function(lambda x: func(x, *exponent), input, kept=kept, offers=True)
    return region.apply(_Square, func, input, *exponent)


def _may_be_held(region: Keeper, x: Tensor) -> bool:
    """Return whether a tensor may later be needed exactly: an exponential or a softplus, by which programs divide."""
    known = region.find_known(x)
    return is_offered(x) or (known is not None and known[1].quality.is_curved)


def _pow(region: Keeper, func: Callable, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 2 or isinstance(args[1], bool) or not isinstance(args[1], int | float):
        return NotImplemented
    input, exponent = args
    if exponent == 2:
        return keep_square(region, func, input, exponent)
    return _smooth_power(region, torch.pow, input, exponent) if exponent > 2 else NotImplemented


_smooth_power = smooth_handler(lambda input, exponent: _PowerSlope(exponent))


def _is_steep(region: Keeper, args: tuple) -> bool:
    """Return whether a power is steep or singular in its saved tensor: x^2 saves a factor of its gradient, 2x."""
    return not (len(args) > 1 and isinstance(args[1], int | float) and args[1] in (0, 1, 2))


WRITTEN_OUT = Stored(
    "RMS norm written out (`x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)`, `x` over a root, a norm or a "
    "deviation)",
    "the input, packed by rows of one scale, once",
    "bias Var/N of one packed copy",
)
OPS = (
    Op((torch.pow, Tensor.pow, Tensor.__pow__), _pow, SMOOTH._replace(op="x^p with p > 2"), is_bit_exact=False),
    Op((torch.square, Tensor.square), keep_square, WRITTEN_OUT, is_bit_exact=False),
    Op(everywhere("square"), saves=Saves.FACTORS),
    Op((*everywhere("pow"), Tensor.__pow__, Tensor.__ipow__, Tensor.__rpow__), must_not_round=_is_steep),
)
