"""The kernel of batch norm's backward pass gives ATen's formula, up to the rounding of sums in another order."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from brevact.autograd.ops.norm.formulas import centred_batch_norm_backward
from brevact.cpu_kernels import batch_norm_backward as kernels

HALF_STEP = torch.finfo(torch.float32).eps / 2
SHAPES = [
    *((64, 80, 2), (16, 200, 2, 2), (1, 2048, 1, 5), (8, 300, 1, 2, 3), (4, 33, 5, 7)),
    *((3, 5, 40, 33), (16, 96, 8, 8), (2, 3, 64, 64), (5, 2, 1, 2)),
]


def arguments(shape: tuple[int, ...], *, has_weight: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Input less the means, gradient, weight and inverse deviations."""
    torch.manual_seed(0)
    channels = shape[1]
    weight = torch.randn(channels) if has_weight else None
    return torch.randn(shape), torch.randn(shape), weight, torch.rand(channels) + 0.5


def formula(x: Tensor, grad: Tensor, weight: Tensor | None, invstd: Tensor, sign: int) -> tuple[Tensor, ...]:
    """Gradients of input, weight and bias in float64; with a sign of +1 and absolute values, the sizes of their terms.

    g_x = w s (g - sum(g) / n - x s^2 sum(g x) / n), g_w = s sum(g x), g_b = sum(g); s: the inverse deviation.
    """
    dims, wide = [0, *range(2, x.dim())], [1, x.shape[1], *[1] * (x.dim() - 2)]
    n = x.numel() // x.shape[1]
    x, grad, invstd = x.double(), grad.double(), invstd.double()
    scale, total, product = invstd.view(wide), grad.sum(dims), (grad * x).sum(dims)
    factor = 1.0 if weight is None else weight.double().view(wide)
    rest = total.view(wide) / n + x * scale.square() * product.view(wide) / n
    return factor * scale * (grad + sign * rest), product * invstd, total


def check(found: tuple[Tensor | None, ...], given: tuple[Tensor, Tensor, Tensor | None, Tensor]) -> None:
    """A sum of n products in any order is off by n + 1 roundings at most; ten more are for what becomes of it."""
    x = given[0]
    n = x.numel() // x.shape[1]
    sizes = formula(*(None if each is None else each.abs() for each in given), 1)
    for a, b, size in zip(found, formula(*given, -1), sizes, strict=True):
        assert a is None or bool(((a - b).abs() <= (n + 11) * HALF_STEP * size).all())


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_those_of_the_formula(shape: tuple[int, ...], has_weight: bool):
    given = arguments(shape, has_weight=has_weight)
    x = given[0].clone()
    found = kernels.centred_batch_norm_backward(x, *given[1:], 1e-5, [True, has_weight, has_weight])
    assert found[0] is x and (found[1] is not None) == (found[2] is not None) == has_weight
    check(found, given)


@pytest.mark.parametrize("of_grad", ["expanded", "channels last", "gaps"])
def test_gradients_of_any_strides(of_grad: str):
    x, grad, weight, invstd = arguments((8, 40, 6, 4))
    if of_grad == "expanded":
        grad = grad[..., :1].expand(x.shape)
    elif of_grad == "channels last":
        grad = grad.contiguous(memory_format=torch.channels_last)
    else:
        grad = torch.randn(8, 40, 6, 8)[..., ::2]
    check(
        kernels.centred_batch_norm_backward(x.clone(), grad, weight, invstd, 1e-5, [True] * 3),
        (x, grad, weight, invstd),
    )


@pytest.mark.parametrize("mask", [[True] * 3, [False, True, True], [True, False, False]])
def test_what_needs_no_gradient_gets_none(mask: list[bool]):
    given = arguments((8, 40, 6, 4))
    x = given[0].clone()
    found = kernels.centred_batch_norm_backward(x, *given[1:], 1e-5, mask)
    assert [each is not None for each in found] == mask
    assert mask[0] or torch.equal(x, given[0])
    check(found, given)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_channel(bad: float):
    for place in (0, 1):
        given = arguments((4, 6, 5, 5))
        given[place][1, 2, 3, 3] = bad
        found = kernels.centred_batch_norm_backward(given[0].clone(), *given[1:], 1e-5, [True] * 3)
        others = torch.arange(6) != 2
        assert not found[1][2].isfinite() and not found[0][:, 2].isfinite().any()
        assert all(each.isfinite().all() for each in (found[0][:, others], found[1][others], found[2][others]))


def test_the_number_of_threads_changes_no_bit():
    threads, given, found = torch.get_num_threads(), arguments((8, 130, 16, 16)), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            x = given[0].clone()
            found.append(kernels.centred_batch_norm_backward(x, *given[1:], 1e-5, [True] * 3))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for each in found for a, b in zip(found[0], each, strict=True))


OTHERS = {
    "vectors": lambda: arguments((64, 80)),
    "maps of one element": lambda: arguments((64, 80, 1, 1)),
    "channels last": lambda: tuple(
        y.contiguous(memory_format=torch.channels_last) if y.dim() == 4 else y for y in arguments((8, 40, 6, 4))
    ),
    "one channel": lambda: arguments((8, 1, 6, 4)),
    "float64": lambda: tuple(y.double() for y in arguments((8, 40, 6, 4))),
    "a weight with gaps": lambda: (*arguments((8, 40, 6, 4))[:2], torch.randn(80)[::2], torch.rand(40)),
}


@pytest.mark.parametrize("given", OTHERS.values(), ids=OTHERS)
def test_others_are_left_to_aten(given):
    x, grad, weight, invstd = given()
    mask = [True] * 3
    assert kernels.centred_batch_norm_backward(x, grad, weight, invstd, 1e-5, mask) is NotImplemented
    found = centred_batch_norm_backward(x, grad, weight, invstd, 1e-5, mask)
    mean = torch.zeros_like(invstd)
    expected = torch.ops.aten.native_batch_norm_backward(grad, x, weight, None, None, mean, invstd, True, 1e-5, mask)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
