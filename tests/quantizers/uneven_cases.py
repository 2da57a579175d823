"""Tensors with uneven buckets of every kind beside ordinary ones, and the quantizers whose kernels must take them."""

from __future__ import annotations

import torch
from torch import Tensor

from brevact.quantizers import Rounding
from tests.crosses import taking_turns

_INF, _NAN, _MAX = float("inf"), float("nan"), torch.finfo(torch.float32).max
#: Values that stand out of a bucket of ordinary ones, some in each.
FAR = (
    *((50.0,), (-50.0, -50.0), (1000.0,), (12345.678,), (50.0, -50.0), (3e-40, 1e-45)),
    *((-1e4,), (1e7,), (-1e8,), (-1e9,), (1e10, 1e10), (1e12,), (-1e15,), (1e20,), (-1e30,)),
    *((_INF,), (-_INF, -_INF), (_NAN,), (_INF, -_INF), (_INF, _NAN), (-_INF, -1e4), (_NAN, 1e4)),
    *((-_MAX,), (_MAX, -_MAX), (0.75 * _MAX, -0.75 * _MAX), (-_MAX, -_INF)),
)


def uneven_values(bucket_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A 1-D tensor of buckets, each followed by an ordinary one; the last is ragged."""
    torch.manual_seed(bucket_size)
    n = bucket_size
    normal, place, half = torch.randn(n), torch.arange(n), n // 2 + 1
    one_hot, scales = (place == n - 1).float(), 10 ** torch.linspace(0, 3, n)
    student = torch.distributions.StudentT(2.0)
    rows = [torch.where(place < n - len(far), normal, torch.tensor((far * n)[:n])) for far in FAR]
    rows += [row.roll(n // 3).relu() for row in rows[:2]]
    rows += [torch.where(place % 3 > 0, row, -1e4) for row in (normal, *(torch.full((n,), c) for c in (0.0, 1.0, 0.3)))]
    rows += [1013 + 10 * normal, torch.where(place == 5, -9999.0, 1013 + 10 * normal)]
    rows += [-normal.exp(), (3 * normal).exp()]
    rows += [student.sample((n,)), 1e-30 * student.sample((n,)), normal * scales, normal * scales.flip(0), normal**7]
    rows += [one_hot, -one_hot, 1 - one_hot, one_hot * 1e9 + 0.3, torch.where(place < half, -0.0, 1.0 - 2.0 * one_hot)]
    rows += [normal * 1e-40, normal * 1e-44, (normal * 1e-44).masked_fill(place == 2, 1.0), normal * 1e38]
    rows += [torch.full((n,), end) for end in (-_INF, _INF, _NAN)] + [torch.where(place == 1, 2.0, -_INF)]
    rows += [torch.where(place < half, normal * 0.01, normal), torch.where(place == 0, 2.0**-126, 1.0)]
    rows += [(normal * 0.05 + 1).masked_fill(place % 4 == 1, 0.0), (normal > 0.5) * 1.0, normal.round()]
    rows = rows[:: max(n // 256, 1)]  # of a few kinds where buckets are large
    ordinary = torch.randn(len(rows), n)
    ordinary[1::3].relu_()
    x = torch.stack([torch.stack(rows), ordinary], 1).view(-1)
    ragged = torch.randn(n // 2 + 1).masked_fill(torch.arange(n // 2 + 1) == 2, 1e4)
    return torch.cat([x, ragged]).to(dtype)


#: (bit_width, bucket_size, rounding, dtype), for `pytest.mark.parametrize`.
UNEVEN_CASES = taking_turns(
    (2, 3, 4, 5, 6, 7, 8),
    (512, 8, 64, 100, 1024, 16, 256, 4096),
    (Rounding.DITHERED, Rounding.STOCHASTIC, Rounding.NEAREST),
    (torch.float32, torch.bfloat16, torch.float16),
)
