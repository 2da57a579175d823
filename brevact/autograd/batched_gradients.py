"""Run backward row by row on batched gradients (``is_grads_batched=True``, ``vmap`` over ``torch.autograd.grad``).

Kernels read memory, where a batch has a dimension that its shape does not show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brevact.private_names import of_torch
from brevact.private_names.of_torch import is_batched, is_functorch_batched, level_of

#: Batch levels that torch allows for ``is_grads_batched``; it does not expose those of a tensor.
_LEGACY_LEVELS = range(1, 65)


def are_batched(grads: tuple[Tensor | None, ...]) -> bool:
    for grad in grads:
        if grad is not None and (is_batched(grad) or is_functorch_batched(grad)):
            return True
    return False


def run_by_rows(backward: Callable[..., Any], ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Call ``backward`` for each row of the innermost batch of ``grads``; return its results batched."""
    given = [grad for grad in grads if grad is not None]
    if any(map(is_functorch_batched, given)):
        level = max(map(level_of, given))
        add, remove, outside = of_torch.add_batch_dim, of_torch.remove_batch_dim, of_torch.outside_of_transform
    else:
        add, remove = of_torch.add_legacy_batch_dim, of_torch.remove_legacy_batch_dim
        outside = of_torch.outside_of_legacy_vmap
        level = next(level for level in _LEGACY_LEVELS if any(len(remove(grad, level, 0, 0)) for grad in given))
    batches = [() if grad is None else remove(grad, level, 0, 0) for grad in grads]  # (0, ...) if not at this level
    with outside():
        rows = [
            backward(ctx, *(batch[i] if len(batch) else grad for batch, grad in zip(batches, grads, strict=True)))
            for i in range(max(map(len, batches)))
        ]
        results = zip(*(row if isinstance(row, tuple) else (row,) for row in rows), strict=True)
        stacked = [None if of_row[0] is None else torch.stack(of_row) for of_row in results]
    return tuple(None if batch is None else add(batch, 0, level) for batch in stacked)
