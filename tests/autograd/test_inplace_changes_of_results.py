"""Results of counterparts may be changed in place, as those of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd import region
from tests.autograd.measuring import settings

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
W = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
B = torch.linspace(-1.0, 1.0, 5)
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w, B),
    "linear without bias": lambda x, w: F.linear(x, w),
    "linear of a transposed input": lambda x, w: F.linear(x.transpose(0, 1), w, B),
    "linear of a vector": lambda x, w: F.linear(x[0, 0], w, B),
    "matmul": lambda x, w: x @ (x.mT * 2.0),
    "matmul with a weight": lambda x, w: x @ w.t(),
    "einsum": lambda x, w: torch.einsum("bic,bjc->jib", x, x * 2.0),
    "einsum with a weight": lambda x, w: torch.einsum("bic,oc->obi", x, w),
    "layer norm": lambda x, w: F.layer_norm(x, (8,)),
    "instance norm": lambda x, w: F.instance_norm(x),
    "batch norm": lambda x, w: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x, w: F.group_norm(x, 2),
    "rms norm": lambda x, w: F.rms_norm(x, (8,)),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    "softmax": lambda x, w: x.softmax(-1),
    "gelu": lambda x, w: F.gelu(x),
    "relu": lambda x, w: F.relu(x),
    "max_pool1d": lambda x, w: F.max_pool1d(x, 2),
    "avg_pool1d": lambda x, w: F.avg_pool1d(x, 2),
    "conv1d": lambda x, w: F.conv1d(x, w[:, :6, None]),
    "conv1d of one": lambda x, w: F.conv1d(x[0], w[:, :6, None]),
    "dropout": lambda x, w: F.dropout(x, 0.0),
    "mul": lambda x, w: x * x.sin(),
    "glu": lambda x, w: F.glu(x),
    "embedding": lambda x, w: F.embedding(torch.arange(4).view(2, 2), w),
}


def change(out: Tensor) -> Tensor:
    """Change a part and the whole of a result, and sum it up."""
    out[..., 0].add_(2.0)
    return out.mul_(torch.linspace(-1.0, 1.0, out.numel()).sin().view(out.shape)).sum()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("inside", [True, False])
def test_results_may_be_changed_in_place_where_those_of_torch_may(name, inside):
    """Gradients are those of the same changes of a copy, and nothing raises that torch allows."""
    grads = []
    for chosen, copies in ((None, False), (settings(8), False), (settings(8), True)):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        torch.manual_seed(0)
        try:
            with region(chosen):
                out = OPS[name](x * 1, w)
                total = change(out.clone() if copies else out) if inside else None
            if total is None:
                total = change(out.clone() if copies else out)
            grads.append(torch.autograd.grad(total, (x, w), allow_unused=True))
        except RuntimeError as error:  # torch's gradient reads the result
            assert "modified by an inplace operation" in str(error) and chosen is None
    for found, expected in zip(*grads[-2:], strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)
