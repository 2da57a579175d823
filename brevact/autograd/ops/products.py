"""Matrix products: each activation factor is saved packed, weights and small factors in full precision.

With C = A B and the gradient g of C: dL/dA = g B^^T and dL/dB = A^^T g with the decoded A^, B^, summed over broadcast
dimensions; complex factors are conjugated. A factor is saved only if the other one needs a gradient. Unbiased: each
gradient is linear in the one factor that it reads, also in products of a tensor with itself.

Grouped products (mixtures of experts) are torch's own; hooks pack their factors.

Elementwise products (squeeze-and-excitation, gates, affine scales): each factor is saved packed if it is needed.

d(ab)/da = g b^ and d(ab)/db = g a^, summed over broadcast dimensions; a factor is saved only if the other one needs a
gradient, and weights and small factors are saved unpacked. Unbiased, since each gradient is linear in the saved factor.

A division by one number per row, a written-out norm or deviation, saves its numerator packed by rows, and the numbers
in full precision: d(a/b)/db = -g a^ / b^2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.call_arguments import is_activation, is_complex
from brevact.autograd.deriving.derived import ELEMENTS_OF_SMALL, derive
from brevact.autograd.deriving.layers import remember_output
from brevact.autograd.ops.base import Formula, Needs, out_of_place, requires_grad, save, with_bits
from brevact.autograd.ops.norm_formulas import dims_of_inverses, dims_of_rows, is_deviation, keep_by_rows
from brevact.autograd.ops.op import EXACT, UNBIASED, Op, Saves, Stored, everywhere
from brevact.autograd.ops.probabilities import keep_factor_of_logs
from brevact.autograd.ops.smooth import WRITTEN_OUT, is_image, keep_square
from brevact.autograd.ops.vector_norms import EMBEDDING_BITS
from brevact.autograd.region.settings import bits_of
from brevact.autograd.saving.saved import Region, Saved, Strides, lay_out, mapped, one_object_each
from brevact.autograd.saving.stand_ins import source_of
from brevact.autograd.saving.storages import is_tracked, storage_address
from brevact.autograd.saving.store import compact, keep_exact
from brevact.private_names.of_torch import grouped_mm, is_any_autocast_enabled
from brevact.quantizers import is_on_host


class _Matmul(NamedTuple):
    first: torch.Size
    second: torch.Size
    #: Whether the first and the second factor are matrices in column-major order.
    by_columns: tuple[bool, bool]

    @staticmethod
    def of(a: Tensor, b: Tensor) -> _Matmul:
        return _Matmul(a.shape, b.shape, (_lies_by_columns(a), _lies_by_columns(b)))

    def of_first(self, grad: Tensor, b: Tensor) -> Tensor:
        """dL/dA = g B^T, in column-major order if A is, as torch's."""
        if self.by_columns[0] and b.dim() == 2:
            return (b @ grad.mT).mT
        if len(self.first) == 2 < grad.dim():
            batch = list(range(grad.dim() - 2))
            b = b.expand(*grad.shape[:-2], *b.shape[-2:])
            return torch.tensordot(grad, b, dims=([*batch, -1], [*batch, -1]))
        return (grad @ b.mT).sum_to_size(self.first)

    def of_second(self, grad: Tensor, a: Tensor) -> Tensor:
        """dL/dB = A^T g, in column-major order if B is, as torch's."""
        if self.by_columns[1] and a.dim() == 2:
            return (grad.mT @ a).mT
        if len(self.second) == 2 < grad.dim():
            batch = list(range(grad.dim() - 2))
            a = a.expand(*grad.shape[:-2], *a.shape[-2:])
            return torch.tensordot(a, grad, dims=([*batch, -2], [*batch, -2]))
        return (a.mT @ grad).sum_to_size(self.second)


def _lies_by_columns(x: Tensor) -> bool:
    return x.dim() == 2 and x.stride() == (1, x.shape[0])


class _Einsum(NamedTuple):
    first: str
    second: str
    out: str
    sizes: dict[str, int]

    def of_first(self, grad: Tensor, b: Tensor) -> Tensor:
        return self._gradient(self.first, grad, self.second, b)

    def of_second(self, grad: Tensor, a: Tensor) -> Tensor:
        return self._gradient(self.second, grad, self.first, a)

    def _gradient(self, labels: str, grad: Tensor, other_labels: str, other: Tensor) -> Tensor:
        """Contract the gradient with the other operand; dimensions summed in one operand alone are broadcast."""
        equation, found = _contraction(labels, other_labels, self.out)
        result = torch.einsum(equation, grad, other)
        for i, label in enumerate(labels):
            if label not in found:
                result = result.unsqueeze(i)
        return result.expand([self.sizes[label] for label in labels]) if found != labels else result


@one_object_each
def _contraction(labels: str, other_labels: str, out: str) -> tuple[str, str]:
    found = "".join(label for label in labels if label in out or label in other_labels)
    return f"{out},{other_labels}->{found}", found


def _apply(
    region: Region,
    multiply: Callable[..., Tensor],
    rule: _Matmul | _Einsum,
    a: Tensor,
    b: Tensor,
    added: Tensor | None = None,
    alpha: float = 1,
    beta: float = 1,
) -> Tensor:
    """Return ``beta * added + alpha * product(a, b)``."""
    dtypes, added_like = (a.dtype, b.dtype), None if added is None else (added.shape, added.dtype)

    def run(ctx: Any, added: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        out = without_autocast_cache(multiply, a, b, added)
        needs_a, needs_b = ctx.needs_input_grad[4:6]
        kept_b = keep_operand(_beside(region, a), b) if needs_a else None
        save(ctx, kept_b, keep_operand(_beside(region, b), a) if needs_b else None)
        ctx.gradients = functools.partial(gradients, out.dtype)
        return out

    def gradients(
        dtype: torch.dtype, needs: Needs, grad: Tensor, kept_b: Any, kept_a: Any
    ) -> tuple[Tensor | None, ...]:
        grad_a = grad_b = grad_added = None
        scaled = grad if alpha == 1 else grad * alpha
        if kept_a is not None:  # the activation, if the other factor is a weight: it is freed first
            grad_b = rule.of_second(scaled, kept_a.decode_as(dtype).conj()).to(dtypes[1])
        if kept_b is not None:
            grad_a = rule.of_first(scaled, kept_b.decode_as(dtype).conj()).to(dtypes[0])
        if needs[0] and added_like is not None:
            grad_added = (grad if beta == 1 else grad * beta).sum_to_size(added_like[0]).to(added_like[1])
        return grad_added, grad_a, grad_b

    return region.apply(Formula, run, None, added, a, b)


def _beside(region: Region, x: Tensor) -> Region:
    """Return the region, or one that packs the other factor as finely as ``x``, if that is a matrix of embeddings."""
    known = region.find_known(x) if x.dim() == 2 and is_tracked(x) else None
    bits = 0 if known is None else bits_of(known[1].quality.quantizer)
    return with_bits(region, bits) if bits >= EMBEDDING_BITS > bits_of(region.settings.quantizer) else region


def _can_pack(region: Region, a: Any, b: Any, added: Any = None) -> bool:
    tensors = (a, b) if added is None else (a, b, added)
    if not all(map(region.is_activation, tensors)) and not (
        all(map(is_complex, tensors)) and len({x.dtype for x in tensors}) == 1
    ):
        return False
    if not requires_grad(a, b, added) or max(a.numel(), b.numel()) < region.settings.min_numel:
        return False
    return a.device == b.device and not region.are_weights(a, b)


def _multiply(region: Region, func: Callable, input: Tensor, *others: Any, **named: Any) -> Any:
    """Handle products of matrices; torch functions name the second one differently."""
    if len(others) + len(named) != 1 or not named.keys() <= {"other", "mat2"}:
        return NotImplemented
    (other,) = others or named.values()
    if not _can_pack(region, input, other) or min(input.dim(), other.dim()) < 2:
        return NotImplemented

    out = _apply(region, lambda a, b, _: func(a, b), _Matmul.of(input, other), input, other)
    _remember(region, input, other, None, out)
    return out


def _with_weight(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.matmul(x, weight)
    return torch.addmm(bias, x, weight) if x.dim() == 2 else torch.matmul(x, weight).add_(bias)


def _remember(region: Region, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if region.recompute and b.dim() == 2 and region.is_weight(b) and (bias is None or region.is_weight(bias)):
        remember_output(region, _with_weight, a, b, bias, out, cost=b.shape[0])


def _multiply_add(
    region: Region,
    func: Callable,
    input: Any,
    first: Any = None,
    second: Any = None,
    *,
    beta: float = 1,
    alpha: float = 1,
    **kwargs: Any,
) -> Any:
    if kwargs or isinstance(alpha, complex) or isinstance(beta, complex):
        return NotImplemented
    if not isinstance(input, Tensor) or not _can_pack(region, first, second, input):
        return NotImplemented

    def multiply(a: Tensor, b: Tensor, added: Tensor) -> Tensor:
        return func(added, a, b, beta=beta, alpha=alpha)

    out = _apply(region, multiply, _Matmul.of(first, second), first, second, input, alpha, beta)
    if alpha == beta == 1 and input.dim() == 1:
        _remember(region, first, second, input, out)
    return out


def _einsum(region: Region, func: Callable, equation: Any, *operands: Any) -> Any:
    """Handle equations of two operands; with one nothing is saved, with more the hooks run."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if len(operands) != 2 or not isinstance(equation, str) or not _can_pack(region, *operands):
        return NotImplemented
    rule = _parse(equation.replace(" ", ""), *(x.shape for x in operands))
    return NotImplemented if rule is None else _apply(region, lambda a, b, _: func(equation, a, b), rule, *operands)


@one_object_each
def _parse(equation: str, *shapes: torch.Size) -> _Einsum | None:
    """Parse an equation of two operands; None for repeated indices, ellipses, broadcast sizes and mistakes."""
    left, arrow, out = equation.partition("->")
    labels = left.split(",")
    if len(labels) != 2 or not all(not part or part.isalpha() for part in (*labels, out)):
        return None
    if not arrow:
        out = "".join(sorted(label for label in set("".join(labels)) if "".join(labels).count(label) == 1))
    if any(len(set(part)) < len(part) for part in (*labels, out)) or not set(out) <= set("".join(labels)):
        return None
    sizes: dict[str, int] = {}
    for part, shape in zip(labels, shapes, strict=True):
        if len(part) != len(shape) or any(
            sizes.setdefault(x, size) != size for x, size in zip(part, shape, strict=True)
        ):
            return None
    return _Einsum(labels[0], labels[1], out, sizes)


_TWO = ("matmul", "mm", "bmm")
_ADDED = ("addmm", "addbmm", "baddbmm")
STORED = Stored("matmul, bmm, einsum", "each factor once, packed; a weight unpacked", UNBIASED)


def _grouped(region: Region, func: Callable, input: Any, mat2: Any, offs: Any = None, **kwargs: Any) -> Any:
    """Run torch's product of groups of rows with a matrix each, and set rows after the last group to 0.

    Torch leaves these uninitialized: an arbitrary number in the bucket of the last rows would set their scale.
    """
    if not (region.can_pack_layer(input, mat2) and input.dim() == 2 and isinstance(offs, Tensor) and offs.numel()):
        return NotImplemented
    out = region.hooks.run_torch(functools.partial(func, offs=offs, **kwargs), input, mat2)
    with torch.no_grad():
        if not is_on_host(out):
            rows = torch.arange(len(out), device=out.device)
            out.masked_fill_((rows >= offs[-1]).unsqueeze(1), 0)
        elif (end := int(offs[-1])) < len(out):
            out[end:].zero_()
    return out


OPS = (
    Op(
        (*(getattr(home, name) for home in (torch, Tensor) for name in _TWO), torch.linalg.matmul, Tensor.__matmul__),
        _multiply,
        STORED,
        is_bit_exact=False,
    ),
    Op(
        tuple(getattr(home, name) for home in (torch, Tensor) for name in _ADDED),
        _multiply_add,
        STORED,
        is_bit_exact=False,
    ),
    Op((torch.einsum,), _einsum, STORED, saves=Saves.FACTORS, is_bit_exact=False),
    Op(everywhere(*_TWO, *_ADDED, "mv", "dot", "addmv"), saves=Saves.FACTORS),
    Op(
        everywhere("vdot", "inner", "outer", "ger", "addr", "kron", "cross", "vecdot", "tensordot", "chain_matmul"),
        saves=Saves.FACTORS,
    ),
    Op(everywhere("multi_dot"), saves=Saves.FACTORS),
    Op(
        (*everywhere("grouped_mm"), grouped_mm),
        _grouped,
        STORED._replace(op="grouped matrix products (mixtures of experts)"),
        saves=Saves.FACTORS,
    ),
)


class _View(NamedTuple):
    order: tuple[int, ...]
    shape: torch.Size

    def __call__(self, x: Tensor) -> Tensor:
        return x.permute(self.order).expand(self.shape)


def keep_operand(region: Region, x: Tensor) -> Saved:
    """Save an operand in memory order: views (a transposed key, a projection's heads, an expansion) are packed once."""
    if (x.is_leaf and x.requires_grad) or region.is_weight(x):
        return region.keep_activation(x)
    if x.is_contiguous():
        return region.keep(x)
    expanded, order, inverse = _memory_order(x.shape, x.stride())
    if not expanded and order == inverse == tuple(range(x.dim())):
        return region.keep(x)
    base = x
    for i in expanded:  # one of its equal slices, with the stride of a dimension of size 1
        base = base.select(i, 0).unsqueeze(i)
    return mapped(region.keep(base.permute(order)), _View(inverse, x.shape))


@one_object_each
def _memory_order(shape: torch.Size, strides: Strides) -> tuple[Strides, Strides, Strides]:
    """Return the expanded dimensions, the order of dimensions in memory, and its inverse."""
    apart = [i for i, size in enumerate(shape) if size > 1 and strides[i]]
    order = list(range(len(shape)))
    for i, source in zip(apart, sorted(apart, key=lambda i: -strides[i]), strict=True):
        order[i] = source
    expanded = tuple(i for i, size in enumerate(shape) if size > 1 and not strides[i])
    return expanded, tuple(order), tuple(order.index(i) for i in range(len(shape)))


def without_autocast_cache(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call torch inside a Function; other ops must not get autocast's weight copies, which have no graph here."""
    if not (is_any_autocast_enabled() and torch.is_autocast_cache_enabled()):
        return call(*args, **kwargs)
    torch.set_autocast_cache_enabled(False)
    try:
        return call(*args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(True)


#: A tensor's sizes, strides and type.
_Like = tuple[torch.Size, Strides, torch.dtype]


def _apply_elementwise(region: Region, multiply: Callable, a: Tensor, b: Tensor, inplace: bool) -> Tensor:
    is_same = a.shape == b.shape
    of_a, of_b = (a.shape, a.stride(), a.dtype), (b.shape, b.stride(), b.dtype)

    def run(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        needs_a, needs_b = ctx.needs_input_grad[3:]
        scales_b: tuple[int, ...] = ()
        scales_a = scales_b
        if not is_same and a.dim() == b.dim():
            scales_b, scales_a = dims_of_inverses(b, a), dims_of_inverses(a, b)
        kept_b = _keep_factor(region, b, a, scales_b, is_scale=bool(scales_a)) if needs_a else None
        kept_a = _keep_factor(region, a, b, scales_a, is_scale=bool(scales_b)) if needs_b else None
        if inplace:
            kept_b, kept_a = _unaliased(kept_b, a), _unaliased(kept_a, a)
        save(ctx, kept_b, kept_a)
        operands = [(a, kept_a), (b, kept_b)]
        if inplace:  # once they are overwritten, no saved form of them is found
            operands = [(x, kept or region.find_kept(x)) for x, kept in operands]
        out = multiply(a, b)
        derive(region, out, torch.mul, operands, is_pointwise=is_same, is_dirty=inplace, is_new=not inplace)
        if inplace:
            ctx.mark_dirty(a)
        return out

    def gradients(needs: Needs, grad: Tensor, kept_b: Any, kept_a: Any) -> tuple[Tensor | None, ...]:
        return _product(kept_b, of_b, grad, of_a), _product(kept_a, of_a, grad, of_b)

    return region.apply(Formula, run, gradients, a, b)


def _keep_factor(region: Region, x: Tensor, other: Tensor, dims: tuple[int, ...], *, is_scale: bool) -> Saved:
    """Save a factor by the rows along ``dims`` that the other one scales, or unpacked if it scales the other's rows."""
    if is_scale or (x.shape == other.shape and is_image(x)):
        return keep_exact(x)
    if x.numel() * ELEMENTS_OF_SMALL <= other.numel() and is_tracked(other) and region.find_known(other) is not None:
        return _keep_small_factor(region, x)
    if dims and not region.is_weight(x) and not (x.is_leaf and x.requires_grad):
        return keep_by_rows(region, x, dims)
    return keep_factor_of_logs(region, x, other) or _beside(region, other).keep_activation(x)


def _keep_small_factor(region: Region, x: Tensor) -> Saved:
    """Save a factor unpacked, without the rest of a larger storage; a weight stays in memory anyway."""
    part = compact(x)
    return keep_exact(x if part is not x and region.is_weight(x) else part)


def _unaliased(kept: Saved | None, overwritten: Tensor) -> Saved | None:
    if kept is None:
        return None
    tensors, decoder = kept
    address = storage_address(overwritten)
    return tuple(x.clone() if storage_address(x) == address else x for x in tensors), decoder


def _product(kept: Any, of_kept: _Like, grad: Tensor, like: _Like) -> Tensor | None:
    if kept is None:
        return None
    (shape, stride, _), (of_other, _, dtype) = of_kept, like
    if shape == grad.shape:
        product = kept.decoder.multiply(kept.tensors, grad)
        if not stride == grad.stride() == product.stride() or 0 in stride:
            product = lay_out(product, grad, stride)
    else:
        product = grad * kept.decode()
    product = product if product.shape == of_other else product.sum_to_size(of_other)
    return product if product.dtype is dtype else product.to(dtype)


def _multiply_elements(region: Region, func: Callable, input: Tensor, other: Any, **kwargs: Any) -> Any:
    inplace = out_of_place(func) is not func
    if kwargs or not (region.is_activation(input) and region.is_activation(other) and _can_pack(region, input, other)):
        return NotImplemented  # a number has no gradient and nothing is stored
    is_exact = region.settings.is_exact or region.settings.is_lossless  # as torch, which adds two gradients, one by one
    if not (inplace or is_exact) and (input is other or _are_one_part(input, other)):
        square = keep_square(region, lambda x: func(x, x), input)
        if square is not NotImplemented:
            return square
    return _apply_elementwise(region, func, input, other, inplace)


def _are_one_part(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are both the real or both the imaginary part of one tensor."""
    whole = a._base if a._is_view() and a.requires_grad and b.requires_grad else None
    return whole is not None and whole is b._base and whole.is_complex() and source_of(a) == source_of(b)


def _divide(region: Region, func: Callable, input: Any, other: Any, **kwargs: Any) -> Any:
    """Handle division by one number per row, a deviation or one of few; torch, too, saves the numerator for it."""
    if kwargs or not (isinstance(other, Tensor) and other.requires_grad and region.can_pack_input(input)):
        return NotImplemented
    if not (region.is_activation(other) and input.dtype == other.dtype and input.device == other.device):
        return NotImplemented
    if input.numel() < region.settings.min_numel or (input.is_leaf and input.requires_grad):
        return NotImplemented
    dims = dims_of_rows(input.shape, other.shape)
    if not dims or region.settings.is_exact or (other.numel() >= region.settings.min_numel and not is_deviation(other)):
        return NotImplemented

    def run(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        save(ctx, keep_by_rows(region, a, dims), exact=(b,))
        return func(a, b)

    def gradients(needs: Needs, grad: Tensor, kept: Any, b: Tensor) -> tuple[Any, ...]:
        return grad / b if needs[0] else None, (-grad * ((kept.decode() / b) / b)).sum_to_size(b.shape)

    return region.apply(Formula, run, gradients, input, other)


def _divides_by_activation(place: int, region: Region, args: tuple) -> bool:
    """Return whether the denominator, the argument at ``place``, is an activation: an error of 1/b^2 is not noise."""
    x: Any = args[place] if place < len(args) else None
    return (is_activation(x) or is_complex(x)) and x.numel() >= region.settings.min_numel and not region.is_weight(x)


_OF_ELEMENTS = Stored(
    "products of activations",
    "each factor once, packed, that of a log-softmax less a multiple of probabilities; a weight, that of another "
    "logarithm, and images of up to 3 channels unpacked",
    "unbiased; that of a log-softmax by factors that differ by class, bias Var of one packed copy",
)
_DIVISION = Stored("division by an activation", "as in PyTorch", EXACT)
_INVERSIONS = (Tensor.__rtruediv__, Tensor.__rdiv__)  # one function
_DIVISIONS = (*everywhere("div", "divide", "true_divide"), Tensor.__truediv__, Tensor.__itruediv__)
ELEMENTWISE = (
    Op(
        (
            *(torch.div, torch.divide, torch.true_divide),
            *(Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.__truediv__),
        ),
        _divide,
        WRITTEN_OUT,
    ),
    Op(everywhere("mul", "multiply"), _multiply_elements, _OF_ELEMENTS),
    Op(everywhere("mul", "multiply", "addcmul", "lerp", "ldexp"), saves=Saves.FACTORS),
    Op(
        tuple(func for func in _DIVISIONS if func not in _INVERSIONS),
        stored=_DIVISION,
        must_not_round=functools.partial(_divides_by_activation, 1),
    ),
    Op(_INVERSIONS, stored=_DIVISION, must_not_round=functools.partial(_divides_by_activation, 0)),
)
