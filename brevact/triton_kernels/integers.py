"""Launches of fake quantization to integers: one read of the elements forward, one of the gradient backward."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from brevact.geometry import DEFAULT_BLOCK, Geometry
from brevact.integers import IntegerPlan
from brevact.triton_kernels.fake_quantization import (
    decode_integers_kernel,
    fake_quantize_backward_kernel,
    fake_quantize_kernel,
)
from brevact.triton_kernels.launch import Program, over_blocks, seed_on

_SIXTEEN = (torch.bfloat16, torch.float16)
_LARGEST_CODE = 8
"""Bits."""
_MOST_NESTED = 2**31 - 2**15
"""Elements in which the kernels count the places of scales in several rows."""


def fake_quantize(
    x: Tensor,
    plan: IntegerPlan,
    scale: Tensor,
    zero_point: Tensor,
    residual_of: Any,
    seed: int | Tensor | None,
    out: Tensor,
    values: Tensor | None,
    codes: Tensor | None,
    mask: Tensor | None,
    residual: Tensor | None,
    missing: Tensor | None,
) -> None:
    if not _reads(x, plan, scale, zero_point, out, values) or (codes is not None and plan.bit_width > _LARGEST_CODE):
        return NotImplemented
    packs = residual is not None and seed is not None
    levels, steps = residual_of.rows(x.device) if packs else (None, None)
    itemsize = max(x.itemsize, 4) if packs else x.itemsize  # residuals of more elements a thread would spill
    numbers = scale.numel() > 1, zero_point.numel() > 1
    width = residual_of.bit_width if packs else 1
    program = _program(fake_quantize_kernel, plan, x.dtype, x.is_cuda, numbers, itemsize, width)
    key = seed_on(x.device, seed) if packs else None
    program.run(x, scale, zero_point, levels, steps, key, out, values, codes, mask, residual, missing)


def fake_quantize_backward(
    grad: Tensor,
    plan: IntegerPlan,
    scale: Tensor,
    zero_point: Tensor,
    residual_of: Any,
    codes: Tensor | None,
    mask: Tensor | None,
    values: Tensor | None,
    residual: Tensor | None,
    target: Tensor,
    terms: Tensor | None,
    sums: Tensor | None,
    parts: Tensor | None,
) -> None:
    """Torch adds the terms of sums: its order of a sum on a device is its own."""
    if not _reads(grad, plan, scale, zero_point, values, target, terms, sums):
        return NotImplemented
    if codes is not None and plan.bit_width > _LARGEST_CODE:
        return NotImplemented
    if sums is not None and terms is None:
        padded = -(-plan.numel // DEFAULT_BLOCK) * DEFAULT_BLOCK  # each row starts aligned
        terms = grad.new_empty(len(sums), padded)[:, : plan.numel]
    numbers = scale.numel() > 1, zero_point.numel() > 1
    levels, width = (None, 1) if residual is None else (residual_of.rows(grad.device)[0], residual_of.bit_width)
    itemsize = grad.itemsize
    program = _program(fake_quantize_backward_kernel, plan, grad.dtype, grad.is_cuda, numbers, itemsize, width)
    program.run(*(grad, scale, zero_point, levels, codes, mask, values, residual, target), *_four(terms), *_four(parts))
    if sums is not None and terms is not None:
        for place in range(0 if codes is not None or values is not None else 2, len(sums)):
            sums[place] = terms[place].sum()


def decode_integers(codes: Tensor, plan: IntegerPlan, scale: Tensor, zero_point: Tensor, target: Tensor) -> None:
    if plan.bit_width > _LARGEST_CODE or not _reads(target, plan, scale, zero_point):
        return NotImplemented
    numbers = scale.numel() > 1, zero_point.numel() > 1
    program = _program(decode_integers_kernel, plan, target.dtype, target.is_cuda, numbers, target.itemsize)
    program.run(codes, scale, zero_point, target)


def _reads(x: Tensor, plan: IntegerPlan, scale: Tensor, zero_point: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels read and write these tensors, as on the CPU: of 16 bits several scales are of that type."""
    if any(each is not None and each.dtype is not x.dtype for each in others):
        return False
    if plan.rows > 1 and plan.inner * plan.groups * plan.repeats >= _MOST_NESTED:
        return False
    if x.dtype is torch.float32:
        return scale.dtype is zero_point.dtype is torch.float32
    return x.dtype in _SIXTEEN and all(each.numel() == 1 or each.dtype is x.dtype for each in (scale, zero_point))


@functools.lru_cache(maxsize=4096)
def _program(
    kernel: Any, plan: IntegerPlan, dtype: torch.dtype, on_gpu: bool, numbers: tuple[bool, bool], itemsize: int,
    width: int = 1,
) -> Program:  # fmt: skip
    """The program for elements of so many bytes; `numbers`: several scales, zero points; `width`: of a residual."""
    aligned = plan.rows == 1 and plan.inner % (DEFAULT_BLOCK // 8) == 0
    if any(numbers) and not aligned:
        itemsize = 4 if dtype is torch.float32 else 8  # the groups of more elements a thread could spill
    values = {
        **plan._asdict(),
        "lowest": float(plan.lowest),
        "highest": float(plan.highest),
        "WIDTH": width,
        "ROUNDING": int(plan.rounding),
        "RECTIFIES": plan.rectifies,
        "CLIPS": plan.clips,
        "HAS_SPARE": plan.has_spare,
        "SCALES": numbers[0],
        "ZEROS": numbers[1],
        "NUMBERS_ROUND": on_gpu and dtype is not torch.float32,
        "NESTED": plan.rows > 1,
        "ALIGNED": aligned,
    }
    geometry = Geometry(plan.numel, plan.bit_width, DEFAULT_BLOCK, plan.inner, plan.groups, True)
    return over_blocks(kernel, geometry, itemsize, **values)


def _four(rows: Tensor | None) -> tuple[Tensor | None, ...]:
    """Rows, None for those that there are not: those of a zero point that does not learn."""
    return tuple(rows[place] if rows is not None and place < len(rows) else None for place in range(4))
