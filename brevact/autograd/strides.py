"""Give gradients the strides that torch's own backward kernels give them: they decide the order of later sums."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

Strides = tuple[int, ...]


def lay_out(x: Tensor, grad: Tensor, stride: Strides, *, saved_first: bool = False) -> Tensor:
    """Return ``x``, an elementwise function of ``grad`` and a saved tensor, with the strides that torch gives it.

    Torch orders a result's dimensions by its first operand's strides, and by the next one's on a tie. The first one is
    the gradient, or (``saved_first``) the saved tensor, with strides ``stride``.
    """
    other = grad.stride()
    if other == stride == x.stride() and 0 not in stride:
        return x
    return with_strides(x, strides_of_result(grad.shape, *((stride, other) if saved_first else (other, stride))))


def with_strides(x: Tensor, stride: Strides | None) -> Tensor:
    """Return ``x`` with these strides, itself or a dense copy; unchanged for None."""
    if stride is None or x.stride() == stride:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


@functools.lru_cache(maxsize=4096)
def strides_of_result(shape: tuple[int, ...], *strides: Strides) -> Strides:
    """Return the strides, in elements, that an elementwise torch op gives its result, from its operands' strides.

    >>> strides_of_result((2, 3), (1, 2), (3, 1))
    (1, 2)
    >>> strides_of_result((2, 3), (0, 1), (1, 2))
    (1, 2)
    """
    operands = [torch.empty_strided(shape, stride, device="meta") for stride in strides]
    result: Tensor = functools.reduce(torch.add, operands) if len(operands) > 1 else operands[0].neg()
    return result.stride()
