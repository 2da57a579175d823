"""Torch functions in regions: one file per op family, whose ``OPS`` are its rows (:class:`~.op.Op`)."""

from __future__ import annotations

from brevact.autograd.ops import (
    attention,
    convolution,
    lookups,
    losses,
    masks,
    norms,
    pooling,
    probabilities,
    products,
    saved_by_torch,
    smooth,
    vector_norms,
)
from brevact.autograd.ops.op import Op
from brevact.qat import torch_fake_quantization

#: All rows, in the order of docs/how.md.
OPS: tuple[Op, ...] = (
    *(*convolution.OPS, *norms.OPS, *smooth.OPS, *masks.OPS, *masks.DROPOUTS, *pooling.OPS),
    *(*products.OPS, *attention.OPS, *probabilities.OPS, *losses.OPS, *vector_norms.OPS),
    *(*lookups.OPS, *products.ELEMENTWISE, *torch_fake_quantization.OPS, *saved_by_torch.OPS),
)
