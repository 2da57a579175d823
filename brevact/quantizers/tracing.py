"""Tensors that stand for others while a graph is traced."""

from __future__ import annotations

import functools

from torch import Tensor, nn

_PLAIN_TYPES = frozenset((Tensor, nn.Parameter))


def is_traced(x: Tensor) -> bool:
    """Whether a tensor has no values because a graph is traced, so that the ops of `ops` must stand for the kernels.

    Args:
        x: Any tensor.

    Returns:
        True for the fake and functional tensors of `torch.compile`.
    """
    return type(x) not in _PLAIN_TYPES and isinstance(x, _traced_types())


@functools.cache
def _traced_types() -> tuple[type, ...]:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FakeTensor, FunctionalTensor
