"""Tables of int64 about a tensor, as kernels read them, made once for each way to divide one."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels import groups
from brevact.cpu_kernels.floats import KINDS
from brevact.geometry import Geometry, UniformPlan


class GroupTable:
    """Blocks, of at most `geometry.LARGEST_BLOCK` elements, and groups of a tensor, for the kernels of quantizers.

    ``rows``: 0, or the address of int64 indices, where group g is row rows[g] of `inner` elements of another tensor.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        rounding: int,
        scale_dtype: torch.dtype = torch.float32,
        minimum_dtype: torch.dtype = torch.float32,
        rows: int = 0,
        uneven: bool = False,
    ) -> None:
        self.geometry = geometry
        self.blocks = -(-geometry.numel // geometry.block_size)
        self.fused = geometry.one_run and geometry.block_size % geometry.inner == 0
        table = np.empty(12, dtype=np.int64)
        table[groups.NUMEL] = geometry.numel
        table[groups.BIT_WIDTH] = geometry.bit_width
        table[groups.BLOCK] = geometry.block_size
        table[groups.INNER] = geometry.inner
        table[groups.GROUPS] = geometry.groups
        table[groups.FUSED] = self.fused
        table[groups.ROUNDING] = rounding
        table[groups.SCALE_KIND] = KINDS[scale_dtype]
        table[groups.MINIMUM_KIND] = KINDS[minimum_dtype]
        table[groups.KIND] = KINDS[dtype]
        table[groups.ROWS] = rows
        table[groups.UNEVEN] = uneven
        self.table = table  # owns the memory at the address
        self.address = table.ctypes.data


@functools.lru_cache(maxsize=4096)
def grid_table(geometry: Geometry, dtype: torch.dtype, rounding: int) -> GroupTable:
    """Table of a tensor that is quantized to levels; a single group is one run."""
    if geometry.groups == 1:
        geometry = dataclasses.replace(geometry, inner=max(geometry.numel, 1))
    return GroupTable(geometry, dtype, rounding)


def table_of(plan: UniformPlan, dtype: torch.dtype, has_seed: bool = False, rows: int = 0) -> GroupTable:
    """Table of a plan, or of some of its groups at the addresses of `rows`; without a seed it rounds to nearest."""
    at_random = groups.DITHERED if plan.dithered else groups.STOCHASTIC
    rounding = at_random if has_seed else groups.NEAREST
    return GroupTable(plan.geometry, dtype, rounding, plan.scale_dtype, plan.minimum_dtype, rows, plan.uneven)


#: The same table for each tensor of these sizes; not where it names rows, whose memory lives no longer than a call.
uniform_table = functools.lru_cache(maxsize=4096)(table_of)


def affine_rows(offset: Tensor | None, factor: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Both, contiguous, or None for neither: a missing factor is 1, a missing addend -0.0, which changes no zero."""
    if factor is None:
        if offset is None:
            return None
        factor = torch.ones_like(offset)
    elif offset is None:
        offset = torch.full_like(factor, -0.0)
    return offset.contiguous(), factor.contiguous()
