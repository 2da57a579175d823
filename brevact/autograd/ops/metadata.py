"""Calls that a region may skip: they query a tensor's sizes, count in place, or make a view or a constant."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.first_region import before_first_region
from brevact.autograd.ops.op import Op
from brevact.autograd.storages import end_known_values
from brevact.private_names.of_torch import watch_collectives

_SIZES = (
    *("dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "ndimension"),
    *("nelement", "numel", "size", "storage_offset", "stride"),
)
#: For an integer (a norm's count of batches) nothing is saved, and nothing computed from it trains.
_COUNTING: frozenset[Callable[..., Any]] = frozenset(
    (Tensor.add_, Tensor.__iadd__, Tensor.sub_, Tensor.__isub__, Tensor.fill_, Tensor.zero_)
)
#: Addresses: kernels launched without gradients, as in a Function's forward, write there at once.
_ADDRESSES = (Tensor.data_ptr, Tensor.untyped_storage)
#: Tensors and arrays in the same memory, with no version counter or another one.
_ALIASES: tuple[Callable[..., Any], ...] = (
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.__cuda_array_interface__.__get__),
    *(Tensor.storage, Tensor.data.__get__, Tensor.data.__set__),  # type: ignore[attr-defined]
)
_GETITEM = Tensor.__getitem__
OPS = (
    Op(tuple(getattr(Tensor, name) for name in _SIZES), is_metadata=True),
    Op(tuple(_COUNTING), is_metadata=True),
    Op((*_ADDRESSES, *_ALIASES), is_metadata=True, is_unversioned=True),
    Op((_GETITEM,), is_metadata=True),
    Op((torch.tensor,), is_metadata=True),
)

_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_VIEWING = frozenset((int, slice, type(None), type(Ellipsis)))


def stores_nothing(func: Callable, args: tuple) -> bool:
    """Return whether a region may skip a call of an attribute (``x.shape``) or of a function of :data:`OPS`."""
    if func is _GETITEM:
        return _makes_view(args[1])
    return func not in _COUNTING or (type(args[0]) is Tensor and args[0].dtype in _INTEGERS)


def hand_out_memory(func: Callable, args: tuple, caller: FrameType) -> None:
    """Forget values in memory that a function exposes, except to torch and this package, which count versions."""
    is_address = func in _ADDRESSES
    if is_address and caller.f_globals.get("__name__", "").partition(".")[0] in ("torch", "brevact"):
        return
    for x in args:
        if isinstance(x, Tensor):
            end_known_values(x, for_good=not is_address or torch.is_grad_enabled())


def _makes_view(index: Any) -> bool:
    """Return whether an index makes a view, whose graph node records its relation to the tensor."""
    return type(index) in _VIEWING or (type(index) is tuple and all(type(part) in _VIEWING for part in index))


before_first_region(lambda: watch_collectives(end_known_values))  # an in-place all-reduce bumps no version
