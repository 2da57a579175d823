"""Tensors that stand for others while a graph is traced."""

from __future__ import annotations

from torch import Tensor, nn

from brevact.private_names.of_torch import FakeTensor, FunctionalTensor

_PLAIN_TYPES = frozenset((Tensor, nn.Parameter))
_TRACED = (FakeTensor, FunctionalTensor)


def is_traced(x: Tensor) -> bool:
    """Whether `torch.compile` traces with this fake or functional tensor: ops of `ops` must stand for kernels."""
    return type(x) not in _PLAIN_TYPES and isinstance(x, _TRACED)
