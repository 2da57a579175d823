"""Snapshot of a tensor whose model is measured in place: values, memory, gradient and hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from brevact.autograd.storages import storage_address

#: Dtypes that compare bits, by item size: as floats, -0 equals 0 and NaN equals nothing.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Tensors up to this many bytes are always copied: scales that collect statistics, counters, indices.
_SMALL = 1 << 16
_HOOKS = ("_post_accumulate_grad_hooks", "_backward_hooks")


class TensorBefore:
    """Snapshot of a leaf tensor."""

    def __init__(self, x: Tensor) -> None:
        self.tensor, self._grad, self._trains = x, x.grad, x.requires_grad
        self._hooks = [(name, None if (each := getattr(x, name)) is None else dict(each)) for name in _HOOKS]
        has_values = not (x.is_meta or x.is_inference())
        self._values = x.detach().clone() if has_values and _is_copied(x) else None
        self._version = x._version if has_values else 0
        self._memory = x.detach() if has_values and x.layout is torch.strided else None
        self._nbytes = 0 if self._memory is None else _nbytes_of(x)

    def hide_gradient(self) -> None:
        """Remove the gradient, so that nothing accumulates into it, and the gradient hooks."""
        if self._grad is not None:
            self.tensor.grad = None
        for name, hooks in self._hooks:
            if hooks:
                getattr(self.tensor, name).clear()

    def restore(self) -> bool:
        """Restore the tensor; return False if its values were not copied and its version counter changed."""
        x, values = self.tensor, self._values
        _leave_graph(x)
        if self._memory is not None and _place_of(x) != _place_of(self._memory):
            x.data = self._memory
        if self._memory is not None and _nbytes_of(x) != self._nbytes:  # observers of torch.ao resize theirs
            x.untyped_storage().resize_(self._nbytes)
        if values is not None:
            # The version counter misses writes through `x.data` and by batch norms.
            same = _has_bits_of(x, values)
            if same is False or (same is None and x._version != self._version):
                _copy(x, values)
        if x.is_leaf and x.requires_grad is not self._trains:
            x.requires_grad_(self._trains)
        if x.grad is not self._grad:
            x.grad = self._grad
        for name, before in self._hooks:
            hooks = getattr(x, name)
            if hooks is not None:
                hooks.clear()
                hooks.update(before or {})
        return values is not None or self._memory is None or x._version == self._version


def _is_copied(x: Tensor) -> bool:
    """Return whether forward passes may write into a tensor, or its copy is small."""
    is_state = x.is_floating_point() and not isinstance(x, nn.Parameter)
    return is_state or x.numel() * x.itemsize <= _SMALL


def _leave_graph(x: Tensor) -> None:
    """Detach a buffer into which a forward pass has written a tensor with a graph."""
    if not x.is_leaf and not x._is_view():
        x.detach_()


def _place_of(x: Tensor) -> tuple[Any, ...]:
    """Return a key for the memory and layout of a strided tensor."""
    if x.layout is not torch.strided:
        return (x.layout,)
    return storage_address(x), x.storage_offset(), x.shape, x.stride(), x.dtype


def _nbytes_of(x: Tensor) -> int:
    return x.untyped_storage().nbytes() if storage_address(x) else 0


@torch.no_grad()
def _has_bits_of(x: Tensor, values: Tensor) -> bool | None:
    """Return whether a tensor has these values, bit for bit; None for tensors that cannot be compared."""
    if x.layout is not torch.strided or x.is_quantized:
        return None
    if x.shape != values.shape or x.dtype is not values.dtype:
        return False
    try:
        if x.is_complex():
            x, values = torch.view_as_real(x), torch.view_as_real(values)
        kind = _INTEGERS[x.itemsize]
        return torch.equal(x.view(kind), values.view(kind))
    except (RuntimeError, KeyError):  # of subclasses, conjugates
        return None


def _copy(x: Tensor, values: Tensor) -> None:
    """Write values without bumping the version counter: graphs that saved the tensor find the values that they saw."""
    x, values = x.data, values.detach()
    if x.layout is torch.strided and not x.is_quantized:  # an expanded dimension holds one element
        for dim, stride in enumerate(x.stride()):
            if stride == 0 and x.shape[dim] > 1:
                x, values = x.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    x.copy_(values)
