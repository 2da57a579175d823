"""Powers with a constant exponent above 2: the quantized derivative is stored, so that the gradient stays unbiased.

y = x^p, dL/dx = g * p x^(p-1) with the stored derivative. A square saves x itself, which other ops share;
powers below 1 have a derivative without bound and stay exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brevact.autograd.functions.base import Saving, load, save

if TYPE_CHECKING:
    from brevact.autograd.regions import Region


class _Power(Saving):
    @staticmethod
    def forward(ctx: Any, region: Region, power: Callable, input: Tensor, exponent: float) -> Tensor:
        save(ctx, region.keep(power(input, exponent - 1) * exponent, share=False))
        return power(input, exponent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = load(ctx)
        return None, None, kept.multiply(grad), None


def _pow(region: Region, func: Callable, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 2 or isinstance(args[1], bool) or not isinstance(args[1], int | float):
        return NotImplemented
    input, exponent = args
    if not (exponent > 2 and region.packs_input(input) and input.requires_grad):
        return NotImplemented
    return region.apply(_Power, torch.pow, input, exponent)


HANDLERS = dict.fromkeys((torch.pow, Tensor.pow, Tensor.__pow__), _pow)
