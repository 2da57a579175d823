"""Norms that are written out: their input is saved by rows, each with its own scale.

``x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)``, the RMS norm of Llama and similar models, or ``x`` over a
root: the square and the product, or the quotient, save x, and their gradients multiply its error by powers of a row's
inverse deviation. Rows are divided by their own root mean square before they are packed, which takes two more bytes per
row, once for both ops.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from brevact.autograd.norm_decoders import Alignment
from brevact.autograd.normalizing import NormInput
from brevact.autograd.saved import Keeper, Saved, one_object_each

#: Elements of the shortest rows that get their own scale.
SHORTEST_ROW = 64
#: Bounds of a row's norm as a divisor: inverses, and inverses of these, are normal bfloat16 numbers.
_SMALLEST_NORM, _LARGEST_NORM = 1e-30, torch.finfo(torch.float32).max
#: Nodes whose results are inverse deviations: roots, reciprocals, and powers, which may be either.
_INVERSES = ("RsqrtBackward", "ReciprocalBackward", "PowBackward")
#: Nodes whose results are deviations or norms, ours included; and nodes that add to a result, bound or convert it.
_DEVIATIONS = (*("SqrtBackward", "StdBackward", "LinalgVectorNormBackward", "NormBackward", "PowBackward"),)
_ON_THE_WAY = ("AddBackward", "ClampBackward", "ClampMinBackward", "MaximumBackward", "ToCopyBackward")


class RowScale(NamedTuple):
    """Rows along dimensions, counted from the last, with the inverse of their root mean square."""

    dims: tuple[int, ...]

    @property
    def alignment(self) -> Alignment:
        return Alignment(of_last_dims=True)

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        return "rows", self.dims


def keep_by_rows(region: Keeper, x: Tensor, dims: tuple[int, ...]) -> Saved:
    """Save an activation by rows along ``dims``, counted from the last: if packed, with a bfloat16 scale per row."""
    length = math.prod(x.shape[dim] for dim in dims)
    inverse = math.sqrt(length) / _finite_norm(x.detach(), dims).clamp(_SMALLEST_NORM, _LARGEST_NORM)
    return region.keep(x, norm=NormInput(RowScale(dims), None, inverse.bfloat16(), x.dtype, alone=True))


def _finite_norm(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """2-norm of each row's finite elements; where a check is free, without a copy if all elements are finite."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if type(x) is Tensor and x.is_cpu:
        norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=dtype)
        if norm.isfinite().all():
            return norm
    return torch.linalg.vector_norm(x.nan_to_num(0.0, 0.0, 0.0), dim=dims, keepdim=True, dtype=dtype)


def are_rows(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) > 0 and math.prod(shape[dim] for dim in dims) >= SHORTEST_ROW


def dims_of_inverses(x: Tensor, factor: Tensor) -> tuple[int, ...]:
    """Dimensions, from the last, of the rows of ``x`` if ``factor`` has their inverse deviations, else ()."""
    node = factor.grad_fn
    return dims_of_rows(x, factor) if node is not None and node.name().startswith(_INVERSES) else ()


def is_deviation(x: Tensor) -> bool:
    """Return whether a tensor is the result of a root, a norm or a deviation, perhaps with an addend or a bound."""
    node = x.grad_fn
    while node is not None and node.name().startswith(_ON_THE_WAY):
        node = node.next_functions[0][0]
    return node is not None and (hasattr(node, "is_deviation") or node.name().startswith(_DEVIATIONS))


def dims_of_rows(x: Tensor, factor: Tensor) -> tuple[int, ...]:
    """Dimensions, from the last, of the rows of ``x`` if ``factor`` has one number per row, else ()."""
    return _dims_of_rows(x.shape, factor.shape)


@one_object_each
def _dims_of_rows(shape: torch.Size, of_factor: torch.Size) -> tuple[int, ...]:
    if len(of_factor) != len(shape):
        return ()
    dims = tuple(dim for dim in range(-len(shape), 0) if of_factor[dim] == 1 and shape[dim] > 1)
    is_factor = all(of_factor[dim] == shape[dim] for dim in range(-len(shape), 0) if dim not in dims)
    return dims if dims and is_factor and are_rows(shape, dims) else ()
