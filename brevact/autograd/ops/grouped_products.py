"""Grouped matrix products of mixture-of-experts layers: rows are saved packed, weights and offsets in full precision.

Rows o[e-1] to o[e] of A meet the matrix B_e of expert e: C_s = A_s B_e. With the gradient g of C and the decoded A^:
dL/dA_s = g_s B_e^T, exact, and dL/dB_e = sum over the rows of e of A^_s^T g_s, linear in A^, hence unbiased. Both are
grouped products again, in the memory order of torch's own backward.

Torch leaves rows after the last offset uninitialized. They are 0 here: an arbitrary number in the bucket of the last
rows would set their scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.base import Saving, load, save
from brevact.autograd.ops.op import Op, Saves, everywhere
from brevact.autograd.ops.operands import keep_operand
from brevact.autograd.ops.products import STORED
from brevact.private_names.of_torch import grouped_mm
from brevact.quantizers import is_traced


class _Grouped(Saving):
    @staticmethod
    def forward(ctx: Any, region: Keeper, multiply: Callable, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        needs_a, needs_b = ctx.needs_input_grad[2:4]
        save(
            ctx,
            keep_operand(region, a) if needs_b else None,
            keep_operand(region, b) if needs_a else None,
            exact=(offs,),
        )
        ctx.are_columns = _are_columns(a), _are_columns(b)
        return _without_rest(multiply(a, b, offs=offs), offs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept_a, kept_b, offs = load(ctx)
        columns_of_a, columns_of_b = ctx.are_columns
        grad_a = grad_b = None
        if kept_b is not None:
            b = kept_b.decode()
            if columns_of_a:
                grad_a = grouped_mm(b, grad.mT, offs=offs).mT
            else:
                grad_a = grouped_mm(grad, b.mT, offs=offs)
        if kept_a is not None:
            a = kept_a.decode()
            if columns_of_b:
                grad_b = grouped_mm(grad.mT, a, offs=offs).mT
            else:
                grad_b = grouped_mm(a.mT, grad, offs=offs)
        return None, None, grad_a, grad_b, None


def _are_columns(x: Tensor) -> bool:
    return x.stride(-2) == 1 and x.stride(-1) == max(1, x.shape[-2])


def _without_rest(out: Tensor, offs: Tensor) -> Tensor:
    """Set the rows after the last offset to 0."""
    if out.device.type == "cpu" and not is_traced(out):
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
    return region.apply(_Grouped, func, input, mat2, offs)


_FUNCTIONS = *everywhere("grouped_mm"), grouped_mm
OPS = (
    Op(_FUNCTIONS, _grouped, STORED._replace(op="grouped matrix products (mixtures of experts)")),
    Op(_FUNCTIONS, saves=Saves.FACTORS, is_product=True),
)
