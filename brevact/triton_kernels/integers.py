"""Launches of fake quantization to integers: one read of the elements forward, one of the gradient backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brevact.integers import IntegerPlan
from brevact.triton_kernels import fake_quantization
from brevact.triton_kernels.fake_quantization import (
    decode_integers_kernel,
    fake_quantize_backward_kernel,
    fake_quantize_kernel,
)
from brevact.triton_kernels.launch import Launch, seed_on, tiling

_BLOCK = fake_quantization.BLOCK.value
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
    """The kernel writes codes of at most 8 bits."""
    if not _reads(x, plan, scale, zero_point, out, values) or (codes is not None and plan.bit_width > _LARGEST_CODE):
        return NotImplemented
    packs = residual is not None and seed is not None
    levels, steps = residual_of.rows(x.device) if packs else (None, None)
    itemsize = max(x.itemsize, 4) if packs else x.itemsize  # residuals of more elements a thread would spill
    constants, programs, threads = _tiles(x, plan, scale, zero_point, itemsize)
    constants |= _integers(plan, residual_of.bit_width if packs else 1)
    arguments = (
        *(x.detach(), scale, zero_point, levels, steps, seed_on(x.device, seed) if packs else None),
        *(out, values, codes, mask, residual, missing, float(plan.lowest), float(plan.highest)),
        *(plan.numel, plan.inner, plan.groups, plan.repeats, plan.rows),
    )
    Launch(fake_quantize_kernel, programs, arguments, constants, threads).run()


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
        padded = -(-plan.numel // _BLOCK) * _BLOCK  # each row starts aligned
        terms = grad.new_empty(len(sums), padded)[:, : plan.numel]
    constants, programs, threads = _tiles(grad, plan, scale, zero_point, grad.itemsize)
    constants |= _integers(plan, 1 if residual is None else residual_of.bit_width)
    arguments = (
        *(grad.detach(), scale, zero_point, None if residual is None else residual_of.rows(grad.device)[0]),
        *(codes, mask, values, residual, target, *_four(terms), *_four(parts)),
        *(float(plan.lowest), float(plan.highest), plan.numel, plan.inner, plan.groups, plan.repeats, plan.rows),
    )
    Launch(fake_quantize_backward_kernel, programs, arguments, constants, threads).run()
    if sums is not None and terms is not None:
        for place in range(0 if codes is not None or values is not None else 2, len(sums)):
            sums[place] = terms[place].sum()


def decode_integers(codes: Tensor, plan: IntegerPlan, scale: Tensor, zero_point: Tensor, target: Tensor) -> None:
    """The kernel reads codes of at most 8 bits."""
    if plan.bit_width > _LARGEST_CODE or not _reads(target, plan, scale, zero_point):
        return NotImplemented
    constants, programs, threads = _tiles(target, plan, scale, zero_point, target.itemsize)
    constants |= {"BIT_WIDTH": plan.bit_width, "HAS_SPARE": plan.has_spare}
    sizes = (float(plan.lowest), plan.numel, plan.inner, plan.groups, plan.repeats, plan.rows)
    arguments = (codes, scale, zero_point, target, *sizes)
    Launch(decode_integers_kernel, programs, arguments, constants, threads).run()


def _reads(x: Tensor, plan: IntegerPlan, scale: Tensor, zero_point: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels read and write these tensors, as on the CPU: of 16 bits several scales are of that type."""
    if any(each is not None and each.dtype is not x.dtype for each in others):
        return False
    if plan.rows > 1 and plan.inner * plan.groups * plan.repeats >= _MOST_NESTED:
        return False
    if x.dtype is torch.float32:
        return scale.dtype is zero_point.dtype is torch.float32
    return x.dtype in _SIXTEEN and all(each.numel() == 1 or each.dtype is x.dtype for each in (scale, zero_point))


def _integers(plan: IntegerPlan, width: int) -> dict[str, int | bool]:
    """Constants of the kernels that quantize; the width is that of a residual."""
    return {
        "BIT_WIDTH": plan.bit_width,
        "WIDTH": width,
        "ROUNDING": int(plan.rounding),
        "RECTIFIES": plan.rectifies,
        "CLIPS": plan.clips,
        "HAS_SPARE": plan.has_spare,
    }


def _tiles(
    x: Tensor, plan: IntegerPlan, scale: Tensor, zero_point: Tensor, itemsize: int
) -> tuple[dict[str, int | bool], tuple[int], int]:
    """Constants of tiles and of groups, programs and threads, for elements of so many bytes."""
    several, aligned = (
        (scale.numel() > 1, zero_point.numel() > 1),
        plan.rows == 1 and plan.inner % (_BLOCK // 8) == 0,
    )
    if any(several) and not aligned:
        itemsize = 4 if x.dtype is torch.float32 else 8  # the groups of more elements a thread could spill
    tiles = tiling(plan.numel, _BLOCK, itemsize)
    constants = {
        "SCALES": several[0],
        "ZEROS": several[1],
        "NUMBERS_ROUND": x.is_cuda and x.dtype is not torch.float32,
        "NESTED": plan.rows > 1,
        "ALIGNED": aligned,
        "ROWS": tiles.rows,
    }
    return constants, (tiles.programs,), tiles.threads


def _four(rows: Tensor | None) -> tuple[Tensor | None, ...]:
    """Rows, None for those that there are not: those of a zero point that does not learn."""
    return tuple(rows[place] if rows is not None and place < len(rows) else None for place in range(4))
