"""Matrix products: each activation factor is saved packed, weights and small factors in full precision.

With C = A B and the gradient g of C: dL/dA = g B^^T and dL/dB = A^^T g with the decoded A^, B^, summed over broadcast
dimensions; complex factors are conjugated. A factor is saved only if the other one needs a gradient. Unbiased: each
gradient is linear in the one factor that it reads, also in products of a tensor with itself.

In grouped products (mixtures of experts) rows o[e-1] to o[e] of A meet the matrix B_e of expert e: C_s = A_s B_e. With
the gradient g of C and the decoded A^: dL/dA_s = g_s B_e^T, exact, and dL/dB_e = sum over the rows of e of A^_s^T g_s,
linear in A^, hence unbiased. Both are grouped products again, in the memory order of torch's own backward.

Torch leaves rows after the last offset uninitialized. They are 0 here: an arbitrary number in the bucket of the last
rows would set their scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.call_arguments import BoundCall, is_complex
from brevact.autograd.layer_recompute import remember_output
from brevact.autograd.ops.base import Formula, requires_grad, save
from brevact.autograd.ops.op import UNBIASED, Op, Saves, Stored, everywhere
from brevact.autograd.saved import Keeper, Mapped, Saved
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
        grad, b = self._matrices(grad), b.unsqueeze(-1) if b.dim() == 1 else b
        if len(self.first) <= 2 < grad.dim():
            batch = list(range(grad.dim() - 2))
            b = b.expand(*grad.shape[:-2], *b.shape[-2:])
            return torch.tensordot(grad, b, dims=([*batch, -1], [*batch, -1])).reshape(self.first)
        return (grad @ b.mT).sum_to_size(self.first if len(self.first) > 1 else (1, *self.first)).reshape(self.first)

    def of_second(self, grad: Tensor, a: Tensor) -> Tensor:
        """dL/dB = A^T g, in column-major order if B is, as torch's."""
        if self.by_columns[1] and a.dim() == 2:
            return (grad.mT @ a).mT
        grad, a = self._matrices(grad), a.unsqueeze(-2) if a.dim() == 1 else a
        if len(self.second) <= 2 < grad.dim():
            batch = list(range(grad.dim() - 2))
            a = a.expand(*grad.shape[:-2], *a.shape[-2:])
            return torch.tensordot(a, grad, dims=([*batch, -2], [*batch, -2])).reshape(self.second)
        return (
            (a.mT @ grad).sum_to_size(self.second if len(self.second) > 1 else (*self.second, 1)).reshape(self.second)
        )

    def _matrices(self, grad: Tensor) -> Tensor:
        grad = grad.unsqueeze(-1) if len(self.second) == 1 else grad
        return grad.unsqueeze(-2) if len(self.first) == 1 else grad


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
        found = "".join(label for label in labels if label in self.out or label in other_labels)
        result = torch.einsum(f"{self.out},{other_labels}->{found}", grad, other)
        for i, label in enumerate(labels):
            if label not in found:
                result = result.unsqueeze(i)
        return result.expand([self.sizes[label] for label in labels])


def _apply(
    region: Keeper,
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
        kept_b = keep_operand(region, b) if needs_a else None
        save(ctx, kept_b, keep_operand(region, a) if needs_b else None)
        ctx.gradients = functools.partial(gradients, out.dtype)
        return out

    def gradients(
        dtype: torch.dtype, needs: tuple[bool, ...], grad: Tensor, kept_b: Any, kept_a: Any
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


def _can_pack(region: Keeper, a: Any, b: Any, added: Any = None) -> bool:
    tensors = (a, b) if added is None else (a, b, added)
    if not all(map(region.is_activation, tensors)) and not (
        all(map(is_complex, tensors)) and len({x.dtype for x in tensors}) == 1
    ):
        return False
    if not requires_grad(a, b, added) or max(a.numel(), b.numel()) < region.settings.min_numel:
        return False
    return a.device == b.device and not region.are_weights(a, b)


def _multiply(region: Keeper, func: Callable, input: Tensor, *others: Any, **named: Any) -> Any:
    """Handle products of two tensors; torch functions name the second one differently."""
    if len(others) + len(named) != 1 or not named.keys() <= {"other", "mat2", "vec", "tensor"}:
        return NotImplemented
    (other,) = others or named.values()
    if not _can_pack(region, input, other):
        return NotImplemented

    out = _apply(region, lambda a, b, _: func(a, b), _Matmul.of(input, other), input, other)
    _remember(region, input, other, None, out)
    return out


def _with_weight(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.matmul(x, weight)
    return torch.addmm(bias, x, weight) if x.dim() == 2 else torch.matmul(x, weight).add_(bias)


def _remember(region: Keeper, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if region.recompute and b.dim() == 2 and region.is_weight(b) and (bias is None or region.is_weight(bias)):
        remember_output(region, _with_weight, a, b, bias, out, cost=b.shape[0])


def _multiply_reversed(region: Keeper, func: Callable, input: Tensor, other: Any) -> Any:
    if not _can_pack(region, other, input):
        return NotImplemented
    return _apply(region, lambda a, b, _: func(b, a), _Matmul.of(other, input), other, input)


def _multiply_add(
    region: Keeper,
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


def _einsum(region: Keeper, func: Callable, equation: Any, *operands: Any) -> Any:
    """Handle equations of two operands; with one nothing is saved, with more the hooks run."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if len(operands) != 2 or not isinstance(equation, str) or not _can_pack(region, *operands):
        return NotImplemented
    rule = _parse(equation.replace(" ", ""), *(x.shape for x in operands))
    return NotImplemented if rule is None else _apply(region, lambda a, b, _: func(equation, a, b), rule, *operands)


def _parse(equation: str, *shapes: Sequence[int]) -> _Einsum | None:
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


_TWO = ("matmul", "mm", "bmm", "mv", "dot")
_ADDED = ("addmm", "addbmm", "baddbmm", "addmv")
STORED = Stored("matmul, bmm, einsum", "each factor once, packed; a weight unpacked", UNBIASED)


def _are_columns(x: Tensor) -> bool:
    return x.stride(-2) == 1 and x.stride(-1) == max(1, x.shape[-2])


def _without_rest(out: Tensor, offs: Tensor) -> Tensor:
    if is_on_host(out):
        if (end := int(offs[-1])) < len(out):
            out[end:].zero_()
        return out
    rows = torch.arange(len(out), device=out.device)
    return out.masked_fill_((rows >= offs[-1]).unsqueeze(1), 0)


def _grouped(
    region: Keeper, func: Callable, input: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Handle groups of rows, each with a matrix; torch runs the other forms of grouped products."""
    if not region.packs_layer(input, mat2):
        return NotImplemented
    if input.dim() != 2 or mat2.dim() != 3 or not isinstance(offs, Tensor) or not offs.numel():
        return NotImplemented
    if bias is not None or out_dtype not in (None, input.dtype) or input.numel() < region.settings.min_numel:
        return NotImplemented
    columns_of_a, columns_of_b = _are_columns(input), _are_columns(mat2)

    def run(ctx: Any, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        needs_a, needs_b = ctx.needs_input_grad[3:5]
        kept = keep_operand(region, a) if needs_b else None, keep_operand(region, b) if needs_a else None
        save(ctx, *kept, exact=(offs,))
        return _without_rest(func(a, b, offs=offs), offs)

    def gradients(needs: tuple[bool, ...], grad: Tensor, kept_a: Any, kept_b: Any, offs: Tensor) -> tuple[Any, ...]:
        grad_a = grad_b = None
        if kept_b is not None:
            b = kept_b.decode()
            grad_a = grouped_mm(b, grad.mT, offs=offs).mT if columns_of_a else grouped_mm(grad, b.mT, offs=offs)
        if kept_a is not None:
            a = kept_a.decode()
            grad_b = grouped_mm(grad.mT, a, offs=offs).mT if columns_of_b else grouped_mm(a.mT, grad, offs=offs)
        return grad_a, grad_b, None

    return region.apply(Formula, run, gradients, input, mat2, offs)


_FUNCTIONS = *everywhere("grouped_mm"), grouped_mm


OPS = (
    Op(
        (*(getattr(home, name) for home in (torch, Tensor) for name in _TWO), torch.linalg.matmul, Tensor.__matmul__),
        _multiply,
        STORED,
        is_bit_exact=False,
    ),
    Op((Tensor.__rmatmul__,), _multiply_reversed, STORED, is_bit_exact=False),
    Op(
        tuple(getattr(home, name) for home in (torch, Tensor) for name in _ADDED),
        _multiply_add,
        STORED,
        is_bit_exact=False,
    ),
    Op((torch.einsum,), _einsum, STORED, saves=Saves.FACTORS, is_bit_exact=False),
    Op(everywhere(*_TWO, *_ADDED), saves=Saves.FACTORS),
    Op(
        everywhere("vdot", "inner", "outer", "ger", "addr", "kron", "cross", "vecdot", "tensordot", "chain_matmul"),
        saves=Saves.FACTORS,
    ),
    Op(everywhere("multi_dot"), saves=Saves.FACTORS),
    Op(_FUNCTIONS, _grouped, STORED._replace(op="grouped matrix products (mixtures of experts)")),
    Op(_FUNCTIONS, saves=Saves.FACTORS),
)


def _view(x: Tensor, order: tuple[int, ...], shape: torch.Size) -> Tensor:
    return x.permute(order).expand(shape)


def keep_operand(region: Keeper, x: Tensor) -> Saved:
    """Save an operand in memory order: views (a transposed key, a projection's heads, an expansion) are packed once."""
    if (x.is_leaf and x.requires_grad) or region.is_weight(x):
        return region.keep_activation(x)
    if x.is_contiguous():
        return region.keep(x)
    strides = x.stride()
    apart = [i for i, size in enumerate(x.shape) if size > 1 and strides[i]]
    order = list(range(x.dim()))
    for i, source in zip(apart, sorted(apart, key=lambda i: -strides[i]), strict=True):
        order[i] = source
    base = x
    for i, size in enumerate(x.shape):
        if size > 1 and not strides[i]:  # expanded: one of its equal slices, with the stride of a dimension of size 1
            base = base.select(i, 0).unsqueeze(i)
    if base is x and order == list(range(x.dim())):
        return region.keep(x)
    tensors, decoder = region.keep(base.permute(order))
    inverse = tuple(order.index(i) for i in range(x.dim()))
    return tensors, Mapped(decoder, BoundCall(_view, (Tensor, inverse, x.shape)))


def without_autocast_cache(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call torch inside a Function; other ops must not get autocast's weight copies, which have no graph here."""
    if not (is_any_autocast_enabled() and torch.is_autocast_cache_enabled()):
        return call(*args, **kwargs)
    torch.set_autocast_cache_enabled(False)
    try:
        return call(*args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(True)
