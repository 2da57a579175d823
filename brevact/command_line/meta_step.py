"""A training step on the meta device, and the bytes that it would allocate: no weights, no values, no GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.private_names.of_torch import DispatchMode, flash_attention, tree_leaves


class Allocated(NamedTuple):
    """Bytes of tensors above those at the start of a step: at the end of its forward pass, and at its peak."""

    kept: int
    peak: int


class _Live(DispatchMode):
    """Counts the bytes of living storages that ops make."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._storages: dict[int, Any] = {x.untyped_storage()._cdata: x for x in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self._storages:
                    self._count(storage, storage._cdata, storage.nbytes())
        return result

    def _count(self, storage: torch.UntypedStorage, key: int, nbytes: int) -> None:
        def end(_: object) -> None:
            self.now -= nbytes
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, end)
        self.now += nbytes
        self.most = max(self.most, self.now)


def bytes_of_step(loss: Callable[[], Tensor], model: torch.nn.Module) -> Allocated:
    """Count the bytes that a step on the meta device allocates; gradients of parameters exist before it."""
    weights = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    gradients = [x.grad for x in weights if x.grad is not None]
    with _Live([*weights, *gradients]) as live:
        result = loss()
        kept = live.now
        result.backward()
    return Allocated(kept, live.most)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    out: Tensor = flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return out


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let attention of meta tensors run as the GPU's flash kernel, and values that losses read be 1."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attend, "AutogradMeta")
    library.impl("item", lambda x: 1, "AutogradMeta")
    library.impl("equal", lambda x, y: True, "Meta")  # whether a loss's gradient is 1
    try:
        yield
    finally:
        del library


@contextmanager
def without_launches() -> Iterator[None]:
    """Let Triton's kernels do nothing."""
    from brevact.private_names.of_triton import kernel_interface

    launch = kernel_interface.__getitem__
    kernel_interface.__getitem__ = lambda kernel, grid: lambda *args, **kwargs: None
    try:
        yield
    finally:
        kernel_interface.__getitem__ = launch
