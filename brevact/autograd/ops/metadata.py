"""Calls that a region need not look at: they ask for a tensor's sizes, count in place, or make a view or a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.ops.op import Op

_SIZES = (
    *("data_ptr", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "ndimension"),
    *("nelement", "numel", "size", "storage_offset", "stride", "untyped_storage"),
)
#: Of an integer (the batches that a norm has seen) nothing is stored, and nothing made of it trains.
_COUNTING: frozenset[Callable[..., Any]] = frozenset(
    (Tensor.add_, Tensor.__iadd__, Tensor.sub_, Tensor.__isub__, Tensor.fill_, Tensor.zero_)
)
_UNVERSIONED = (Tensor.data.__get__, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)  # type: ignore[attr-defined]
_GETITEM = Tensor.__getitem__
OPS = (
    Op(tuple(getattr(Tensor, name) for name in _SIZES), is_metadata=True),
    Op(tuple(_COUNTING), is_metadata=True),
    Op(_UNVERSIONED, is_metadata=True, is_unversioned=True),
    Op((_GETITEM,), is_metadata=True),
    Op((torch.tensor,), is_metadata=True),
)

_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_VIEWING = frozenset((int, slice, type(None), type(Ellipsis)))


def stores_nothing(func: Callable, args: tuple) -> bool:
    """Return whether a region need not look at a call of an attribute (``x.shape``) or of a function of :data:`OPS`."""
    if func is _GETITEM:
        return _makes_view(args[1])
    return func not in _COUNTING or (type(args[0]) is Tensor and args[0].dtype in _INTEGERS)


def _makes_view(index: Any) -> bool:
    """Whether an index makes a view, whose graph node tells its relation to the tensor."""
    return type(index) in _VIEWING or (type(index) is tuple and all(type(part) in _VIEWING for part in index))
