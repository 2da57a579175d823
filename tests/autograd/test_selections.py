"""Functions that choose elements: ties, bounds and extremes are shared as torch shares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.autograd.exactness import INDEX, MAP, MASK, OTHER, assert_exact, run_exactly

#: Ops without a counterpart that need exact saved elements.
CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "median": torch.median,
    "max": torch.max,
    "amin": lambda x: x.amin((0, -1), True),
    "maximum": lambda x: torch.maximum(x, OTHER),
    "smallest of two": lambda x: torch.min(x, x[:1] * 0.5),
    "index_select by another type": lambda x: x.index_select(-1, INDEX[0, 0, 0].int()),
    "index from the end": lambda x: x[:, INDEX[0, 0, 0] % 4 - 4],
    "index with uint8": lambda x: x[MASK.byte()],
    "index_put from the end": lambda x: x.index_put((INDEX[0, 0, 0] % 3 - 3,), x[0]),
    "segment maxima": lambda x: torch.segment_reduce(x.flatten(), "max", lengths=torch.full((432,), 4), unsafe=True),
    "segment products": lambda x: torch.segment_reduce(x.flatten(), "prod", lengths=torch.full((432,), 4), unsafe=True),
    "copysign": lambda x: torch.copysign(x, OTHER),
    "fmod": lambda x: torch.fmod(OTHER, x),
    "remainder": lambda x: x.detach().remainder(x),
    "%": lambda x: OTHER % x,
    "%=": lambda x: OTHER.clone().__imod__(x),
    "division rounded": lambda x: torch.div(OTHER, x, rounding_mode="floor") + x,
    "other names": lambda x: x.clamp(-0.9, 0.9).arctanh(),
    "other names in place": lambda x: x.clamp(-0.9, 0.9).arccos_(),
    "an operator by itself": lambda x: torch.ops.aten.log(x.abs() + 0.01),
    "an overload of it": lambda x: torch.ops.aten.log.default(x.abs() + 0.01),
    "lu_factor_ex": lambda x: torch.linalg.lu_factor_ex(x)[0],
    "matrix_power": lambda x: torch.linalg.matrix_power(x, -2),
    "condition number": lambda x: torch.linalg.cond(x),
    "tensorinv": lambda x: torch.linalg.tensorinv(x[0, 0], ind=1),
    "tensorsolve": lambda x: torch.linalg.tensorsolve(x[0, 0], OTHER[0, 0, 0]),
    "householder_product": lambda x: torch.linalg.householder_product(x, OTHER[..., 0].expand(3, 4, 12)),
    "ormqr": lambda x: torch.ormqr(x, OTHER[..., 0], OTHER),
    "svd_lowrank": lambda x: seeded(torch.svd_lowrank, x[0, 0], 3)[1],
    "pca_lowrank": lambda x: seeded(torch.pca_lowrank, x[0, 0], 3)[1],
    "lobpcg": lambda x: torch.lobpcg(x[0, 0] + x[0, 0].mT + 30 * torch.eye(12), 2, X=OTHER[0, 0, :, :2])[0],
    "dropout2d of three dimensions": lambda x: seeded(F.dropout2d, x[0], 0.5),
    "clamp by tensors": lambda x: torch.clamp(x, OTHER - 0.5, OTHER + 0.5),
    "scatter_reduce": lambda x: x.scatter_reduce(3, INDEX, x[..., :5] * 2, "amax"),
    "lp_pool": lambda x: F.lp_pool2d(x, 2, 2),
    "local_response_norm": lambda x: F.local_response_norm(x, 3, alpha=1.0),
    "addcdiv": lambda x: torch.addcdiv(x, OTHER, x),
    "logcumsumexp": lambda x: x.logcumsumexp(2),
    "Bessel function, scaled": torch.special.i1e,
    "entropy": lambda x: torch.special.entr(x.abs()),
    "polygamma": lambda x: torch.polygamma(1, x.abs() + 0.1),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x + x.mT),
    "rrelu with a generator": lambda x: torch.rrelu(x, 0.1, 0.3, True, generator=torch.Generator().manual_seed(0)),
}
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):  # PyTorch 2.11 has no gradient of it
    CHOICES["aminmax"] = lambda x: torch.stack(torch.aminmax(x, dim=1))


def seeded(function: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(0)
    return function(*args)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8", "ignore:dropout2d")
@pytest.mark.parametrize("function", CHOICES.values(), ids=CHOICES)
def test_ops_that_compare_what_they_save_are_exact(function):
    assert_exact(function, torch.randn(MAP))


@pytest.mark.parametrize("bounds", [(-0.5, 0.75), (None, 0.75), (-0.5, None)])
def test_clamp_gives_torchs_gradient_at_its_bounds(bounds):  # which differs between versions
    x = torch.tensor([-1.0, -0.5, 0.0, 0.75, 1.0, float("nan"), float("inf")])
    (expected,), (grad,) = (run_exactly(lambda x: x.clamp(*bounds), [x], bit_width)[1] for bit_width in (None, 1))
    assert torch.equal(grad, expected)
