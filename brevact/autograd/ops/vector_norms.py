"""Vector norms, deviations and quotients by them: the normalized tensor is saved packed, the norms in full precision.

With n = |x| along some dimensions and u = x / n (0 where n is 0, as in torch):

    norm                 dL/dx = g u
    std                  dL/dx = g z / (N - c),  z = (x - mean) / std  (0 where std is 0),  c the correction
    var                  dL/dx = 2 g z std / (N - c)
    cosine_similarity    s = sum(u v):  dL/dx = g (v - s u) / |x|,  dL/dy = g (u - s v) / |y|
    normalize            y = x / max(n, eps):  dL/dx = (g - y sum(g y)) / n,  and g / eps where n < eps

Given the norms, one number per vector, each is linear in the packed tensors: unbiased. Only ``normalize`` is quadratic
in its output, saved as one packed copy that the output's readers share: a bias of -Var(y) g, that of softmax and of RMS
norm. Embeddings, outputs of two dimensions, take 8 bits: in contrastive losses gradients are of the size of differences
between near ones. The packed tensor has one scale, however different the norms are: a rounding error of x itself, the
step of a bucket's largest vector, would be divided by the norm of its smallest.

``cosine_similarity`` packs v - s u and u - s v themselves, those that are needed: where the vectors are near each
other, u and v have larger errors than the difference has elements. Of tensors that broadcast, it is torch's own.

Along fewer than :data:`LEAST_LENGTH` elements, the norms are not small next to their operands: torch runs in full
precision. It also runs all other norms, whose gradients choose by elements or are singular in them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.ops.base import Formula, Needs, can_pack, requires_grad, save, with_bits
from brevact.autograd.ops.op import UNBIASED, Op, Stored
from brevact.autograd.saving.saved import Region

#: Bits of embeddings, normalized rows of a matrix: a contrastive loss's gradient is of the size of their differences.
EMBEDDING_BITS = 8
#: Elements of the shortest vector that is large next to its norm.
LEAST_LENGTH = 16


class _Group(NamedTuple):
    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    """Sizes of the result with these dimensions kept."""

    length: int
    """Elements of each vector."""


def _group(x: Tensor, dim: Any) -> _Group | None:
    """Parse a ``dim`` argument; None if torch refuses it or the vectors are too short."""
    dims = tuple(range(x.dim())) if dim is None or dim == () else (dim,) if isinstance(dim, int) else tuple(dim)
    if not all(isinstance(d, int) and -x.dim() <= d < x.dim() for d in dims):
        return None
    dims = tuple(d % x.dim() for d in dims)
    length = math.prod(x.shape[d] for d in dims)
    if len(set(dims)) < len(dims) or length < LEAST_LENGTH:
        return None
    return _Group(dims, tuple(1 if d in dims else size for d, size in enumerate(x.shape)), length)


def _over(x: Tensor, norm: Tensor) -> Tensor:
    return (x / norm).masked_fill_(norm == 0, 0)


#: The order of each norm: its name, and its default.
_ORDERS: dict[Callable, tuple[str, Any]] = {
    **dict.fromkeys((torch.norm, Tensor.norm), ("p", "fro")),
    torch.linalg.vector_norm: ("ord", 2),
    torch.linalg.norm: ("ord", None),
}


def _norm(region: Region, func: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    name, default = _ORDERS[func]
    given = dict(zip((name, "dim", "keepdim"), args, strict=False)) | {
        key: value for key, value in kwargs.items() if key not in ("out", "dtype") or value is not None
    }
    if len(args) > 3 or not given.keys() <= {name, "dim", "keepdim"} or not can_pack(region, input):
        return NotImplemented
    order, dim = given.get(name, default), given.get("dim")
    is_of_vectors = order in ("fro", 2)
    if func is torch.linalg.vector_norm:
        is_of_vectors = order == 2
    elif func is torch.linalg.norm:  # others are of matrices, or with wrong dimensions
        is_of_vectors = order is None or (order == 2 and isinstance(dim, int))
    group = _group(input, dim) if is_of_vectors else None
    if group is None:
        return NotImplemented
    sizes = group.sizes

    def run(ctx: Any, x: Tensor) -> Tensor:
        out: Tensor = func(x, *args, **kwargs)
        save(ctx, region.keep(_over(x, out.reshape(sizes)), share=False))
        ctx.is_deviation = True
        return out

    return region.apply(Formula, run, lambda needs, grad, unit: (unit.decode() * grad.reshape(sizes),), input)


def _deviation(region: Region, func: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    known = {"dim", "unbiased", "correction", "keepdim"}
    names = ("unbiased",) if args and isinstance(args[0], bool) else ("dim", "unbiased", "keepdim")
    if not can_pack(region, input) or not kwargs.keys() <= known or len(args) > len(names):
        return NotImplemented
    named = kwargs | dict(zip(names, args, strict=False))
    correction = named.get("correction")
    correction = (1 if named.get("unbiased", True) else 0) if correction is None else correction
    if named.get("dim") == ():
        return NotImplemented  # torch's gradient has an extra factor there
    group = _group(input, named.get("dim"))
    if group is None or not isinstance(correction, int | float) or correction >= group.length:
        return NotImplemented
    dims, sizes, divisor = group.dims, group.sizes, group.length - float(correction)

    def run(ctx: Any, x: Tensor) -> Tensor:
        out: Tensor = func(x, *args, **kwargs)
        std = (out.sqrt() if func in _VARIANCES else out).reshape(sizes)
        kept = region.keep(_over(x - x.mean(dims, keepdim=True), std), share=False)
        save(ctx, kept, exact=(std,) if func in _VARIANCES else ())
        ctx.is_deviation = True
        return out

    def gradients(needs: Needs, grad: Tensor, unit: Any, *std: Tensor) -> tuple[Tensor]:
        factor = grad.reshape(sizes) / divisor
        return (unit.decode() * (factor * (2 * std[0]) if std else factor),)

    return region.apply(Formula, run, gradients, input)


def _cosine_similarity(region: Region, func: Callable, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Any:
    """sum(u v) with u = x / max(|x|, eps); torch differentiates it as if nothing bounded the norms."""
    if not (region.is_activation(x1) and region.is_activation(x2) and requires_grad(x1, x2) and x1.device == x2.device):
        return NotImplemented
    if x1.shape != x2.shape or x1.dtype != x2.dtype or x1.numel() < max(1, region.settings.min_numel):
        return NotImplemented  # tensors that broadcast are small
    group = _group(x1, dim) if isinstance(dim, int) else None
    if group is None or region.are_weights(x1, x2):
        return NotImplemented
    ((axis,), sizes, _) = group

    def run(ctx: Any, *tensors: Tensor) -> Tensor:
        out = func(*tensors, axis, eps)
        norms = [torch.linalg.vector_norm(x, 2, axis, keepdim=True) for x in tensors]
        units = [x / norm.clamp_min(eps) for x, norm in zip(tensors, norms, strict=True)]
        kept = []
        for own, other, norm, needed in zip(units, units[::-1], norms, ctx.needs_input_grad[3:], strict=True):
            # The last factor is bounded / norm, where that overflows.
            factor = out.unsqueeze(axis) * (eps / norm).clamp_min_(1).masked_fill_(norm == 0, 0)
            kept.append(region.keep(other - factor * own, share=False) if needed else None)
        save(ctx, *kept, exact=tuple(norms))
        return out

    def gradients(needs: Needs, grad: Tensor, *rest: Any) -> tuple[Any, ...]:
        pairs, grad = zip(rest[:2], rest[2:], strict=True), grad.reshape(sizes)
        return tuple(None if kept is None else grad * kept.decode() / norm.clamp_min(eps) for kept, norm in pairs)

    return region.apply(Formula, run, gradients, x1, x2)


def _normalize(
    region: Region, func: Callable, input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None
) -> Any:
    group = _group(input, dim) if p == 2 and out is None and can_pack(region, input) else None
    if group is None:
        return NotImplemented
    dims = group.dims

    def run(ctx: Any, x: Tensor) -> Tensor:
        found: Tensor = func(x, p, dim, eps)
        kept = (with_bits(region, EMBEDDING_BITS) if x.dim() == 2 else region).keep(found.detach())
        region.register(found, kept)
        save(ctx, kept, exact=(torch.linalg.vector_norm(x, 2, dims, keepdim=True),))
        return found

    def gradients(needs: Needs, grad: Tensor, kept: Any, norm: Tensor) -> tuple[Any, ...]:
        y = kept.decode()
        across = (grad * y).sum(dims, keepdim=True).masked_fill_(norm < eps, 0)
        return ((grad - y * across) / norm.clamp_min(eps),)

    return region.apply(Formula, run, gradients, input)


_VARIANCES = torch.var, Tensor.var
_STORED = Stored(
    "2-norms, standard deviation, variance, `cosine_similarity` of 16 elements or more",
    "the normalized input, packed, for similarities of equal shapes the derivative; the norms unpacked",
    UNBIASED,
)
_NORMALIZED = Stored(
    "`F.normalize`",
    "the output, packed, of a matrix at 8 bits or more, as are its factors, shared with readers; the norms unpacked",
    "bias Var of one packed copy",
)
_HANDLERS: dict[tuple[Callable, ...], Callable] = {
    **{(func,): functools.partial(_norm) for func in _ORDERS},  # rules name them apart
    (torch.std, Tensor.std, *_VARIANCES): _deviation,
    (torch.cosine_similarity, F.cosine_similarity): _cosine_similarity,
}
OPS = (
    *(Op(funcs, handler, _STORED, is_bit_exact=False) for funcs, handler in _HANDLERS.items()),
    Op((F.normalize,), _normalize, _NORMALIZED, is_bit_exact=False),
)
