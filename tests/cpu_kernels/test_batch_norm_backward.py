"""The kernel of batch norm's backward pass gives ATen's formula, up to the rounding of sums in another order."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from brevact.autograd.ops.norm_formulas import batch_norm_backward
from brevact.cpu_kernels import batch_norm as kernels
from brevact.quantizers import Granularity, Layout, Rounding, UniformQuantizer, kernel_ops
from brevact.quantizers.normalizing import NormalizedPlan, plan_of_channels
from tests.cpu_kernels.test_batch_norm import Seen

HALF_STEP = torch.finfo(torch.float32).eps / 2
SHAPES = [
    *((64, 80, 2), (16, 200, 2, 2), (1, 2048, 1, 5), (8, 300, 1, 2, 3), (4, 33, 5, 7)),
    *((3, 5, 40, 33), (16, 96, 8, 8), (2, 3, 64, 64), (5, 2, 1, 2)),
]
MASK = [True] * 3


class Given:
    def __init__(
        self, shape: tuple[int, ...], *, has_weight: bool = True, bad: float | None = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        x, channels = torch.randn(shape), shape[1]
        if bad is not None:
            x[1, 2, 3, 3] = bad
        self.mean, self.invstd = torch.zeros(channels), torch.rand(channels) + 0.5
        quantizer = UniformQuantizer(bit_width=4, rounding=Rounding.NEAREST, **options)
        plan = plan_of_channels(quantizer, Layout.of(x))
        assert plan is not None
        self.packing: NormalizedPlan = plan
        self.buffer = plan.spec.empty(x)
        kernel_ops.quantize_uniform(x, plan.plan, None, self.mean, self.invstd, plan.place, self.buffer)
        self.grad = torch.randn(shape)
        self.weight = torch.randn(channels) if has_weight else None

    @property
    def x(self) -> Tensor:
        return self.packing.dequantize_centred(self.buffer, self.invstd)

    def by_kernel(self, mask: list[bool]) -> tuple[Tensor | None, ...]:
        mean = torch.zeros_like(self.invstd)
        return kernels.batch_norm_backward(self.grad, self.x, self.weight, mean, self.invstd, 1e-5, mask, True)

    def by_any(self, mask: list[bool]) -> tuple[Tensor | None, ...]:
        return batch_norm_backward(self.grad, self.x, self.weight, self.mean, self.invstd, 1e-5, mask, True)

    def by_aten(self, mask: list[bool]) -> tuple[Tensor | None, ...]:
        return torch.ops.aten.native_batch_norm_backward(
            *(self.grad, self.x, self.weight, None, None, self.mean, self.invstd, True, 1e-5, mask)
        )

    def check(self, found: tuple[Tensor | None, ...]) -> None:
        """Allow n + 1 roundings for a sum of n products in any order, and 14 for the ops after it."""
        x = self.x.double()
        parts = x, self.grad.double(), None if self.weight is None else self.weight.double(), self.invstd.double()
        n = x.numel() // x.shape[1]
        sizes = formula(*(None if each is None else each.abs() for each in parts), 1)
        for a, b, size in zip(found, formula(*parts, -1), sizes, strict=True):
            assert a is None or bool(((a - b).abs() <= (n + 15) * HALF_STEP * size).all())


def formula(x: Tensor, grad: Tensor, weight: Tensor | None, invstd: Tensor, sign: int) -> tuple[Tensor, ...]:
    """g_x = w s (g - sum(g) / n - x s^2 sum(g x) / n), g_w = s sum(g x), g_b = sum(g); s: the inverse deviation.

    With a sign of +1 and absolute values, the sizes of their terms.
    """
    dims, wide = [0, *range(2, x.dim())], [1, x.shape[1], *[1] * (x.dim() - 2)]
    n = x.numel() // x.shape[1]
    scale, total, product = invstd.view(wide), grad.sum(dims), (grad * x).sum(dims)
    factor = 1.0 if weight is None else weight.view(wide)
    rest = total.view(wide) / n + x * scale.square() * product.view(wide) / n
    return factor * scale * (grad + sign * rest), product * invstd, total


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_those_of_the_formula(shape: tuple[int, ...], has_weight: bool):
    given = Given(shape, has_weight=has_weight)
    found = given.by_kernel([True, has_weight, has_weight])
    assert (found[1] is not None) == (found[2] is not None) == has_weight
    given.check(found)


@pytest.mark.parametrize("strides", ["expanded", "channels last", "gaps"])
def test_gradients_of_any_strides(strides: str):
    given = Given((8, 40, 6, 4))
    if strides == "expanded":
        given.grad = given.grad[..., :1].expand(given.grad.shape)
    elif strides == "channels last":
        given.grad = given.grad.contiguous(memory_format=torch.channels_last)
    else:
        given.grad = torch.randn(8, 40, 6, 8)[..., ::2]
    given.check(given.by_kernel(MASK))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("is_grad", [False, True])
def test_what_is_not_finite_stays_in_its_channel(bad: float, is_grad: bool):
    given = Given((4, 6, 5, 5), bad=None if is_grad else bad)
    if is_grad:
        given.grad[1, 2, 3, 3] = bad
    found, expected = given.by_kernel(MASK), given.by_aten(MASK)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())
    assert not found[1][2].isfinite()


def test_an_infinite_deviation_makes_the_input_zero():
    given = Given((4, 6, 5, 5))
    given.invstd[2] = 0.0
    found = given.by_kernel(MASK)
    assert not given.x[:, 2].any() and not found[0][:, 2].any() and found[1][2] == 0
    given.check(found)


def test_the_number_of_threads_changes_no_bit():
    threads, given, found = torch.get_num_threads(), Given((8, 130, 16, 16)), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(given.by_kernel(MASK))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for each in found for a, b in zip(found[0], each, strict=True))


def _channels_last() -> Given:
    given = Given((8, 40, 6, 4))
    x = given.x.contiguous(memory_format=torch.channels_last)
    plan = plan_of_channels(given.packing.spec.quantizer, Layout.of(x))
    assert plan is not None
    given.packing, given.buffer = plan, plan.spec.empty(x)
    kernel_ops.quantize_uniform(x, plan.plan, None, given.mean, given.invstd, plan.place, given.buffer)
    return given


def _double() -> Given:
    given = Given((8, 40, 6, 4))
    given.grad, given.weight = given.grad.double(), given.weight.double()  # type: ignore[union-attr]
    return given


def _with_gaps() -> Given:
    given = Given((8, 40, 6, 4))
    given.weight = torch.randn(80)[::2]
    return given


def _negative_view() -> Given:
    given = Given((8, 40, 6, 4))
    given.grad = torch._neg_view(given.grad)
    return given


OTHERS = {
    "a negative view": _negative_view,
    "vectors": lambda: Given((64, 80)),
    "maps of one element": lambda: Given((64, 80, 1, 1)),
    "channels last": _channels_last,
    "one channel": lambda: Given((8, 1, 6, 4)),
    "a weight with gaps": _with_gaps,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_others_are_left_to_aten(make):
    given = make()
    assert all(torch.equal(a, b) for a, b in zip(given.by_any(MASK), given.by_aten(MASK), strict=True))


def test_dispatch_modes_see_the_gradient():
    given = Given((8, 40, 6, 4))
    with Seen() as seen:
        given.by_any(MASK)
    assert "native_batch_norm_backward" in seen.names


@pytest.mark.parametrize("shape", [(50000, 2, 1, 2), (4, 2, 512, 512)])
def test_many_terms_are_added_as_exactly_as_few(shape: tuple[int, ...]):
    """Sums in float64: the rounding of the result."""
    given = Given(shape)
    given.grad.fill_(0.1)
    total = given.grad.double().sum((0, 2, 3))
    assert bool(((given.by_kernel(MASK)[2] - total).abs() <= 2 * HALF_STEP * total).all())


def test_gradients_of_another_type_are_left_to_aten():
    assert _double().by_kernel(MASK) is NotImplemented


@pytest.mark.parametrize("options", [{"bucket_size": 5000}, *({"granularity": each} for each in Granularity)], ids=str)
def test_groups_of_any_size(options: dict[str, Any]):
    given = Given((16, 12, 8, 8), **options)
    given.check(given.by_any(MASK))


def test_gradients_in_a_batch_are_left_to_aten():
    given = Given((8, 40, 6, 4))

    def gradient(way, grad: Tensor) -> Tensor:
        given.grad = grad
        return way(MASK)[0]

    grads = torch.randn(3, *given.grad.shape)
    found, expected = (torch.vmap(functools.partial(gradient, way))(grads) for way in (given.by_any, given.by_aten))
    assert torch.equal(found, expected)


def _of_input(given: Given, mask: list[bool], *, overwrites: bool = False) -> tuple[Tensor | None, ...]:
    """Gradients from an input with large means."""
    x = given.x + 1000.0 * given.mean.view(-1, *[1] * (given.x.dim() - 2))
    arguments = given.grad, x, given.weight, 1000.0 * given.mean, given.invstd, 1e-5, mask, overwrites
    found: tuple[Tensor | None, ...] = kernels.batch_norm_backward(*arguments)
    assert found[0] is None or (found[0] is x) == overwrites
    return found


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_from_an_input_are_those_of_the_formula(shape: tuple[int, ...], has_weight: bool):
    given = Given(shape, has_weight=has_weight)
    mask = [True, has_weight, has_weight]
    found = _of_input(given, mask)
    given.check(found)
    for a, b in zip(found, _of_input(given, mask, overwrites=True), strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


def test_the_means_of_an_input_are_subtracted_first():
    """For small deviations from a large mean the products with the gradient would cancel."""
    given = Given((8, 40, 6, 4))
    given.mean = torch.randn(40)
    offset = 1000.0 * given.mean.view(-1, 1, 1)
    rounded = (given.x + offset) - offset  # each exact: the rounded deviations
    wanted = torch.ops.aten.native_batch_norm_backward(
        *(given.grad.double(), rounded.double(), given.weight.double(), None, None),
        *(torch.zeros(40, dtype=torch.float64), given.invstd.double(), True, 1e-5, MASK),
    )
    for a, b in zip(_of_input(given, MASK), wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=200 * HALF_STEP * b.abs().max().item())


@pytest.mark.parametrize("mask", [MASK, [False, True, True], [True, False, False]])
def test_what_needs_no_gradient_gets_none(mask: list[bool]):
    given = Given((8, 40, 6, 4))
    for found in (given.by_kernel(mask), _of_input(given, mask)):
        assert [each is not None for each in found] == mask
        given.check(found)
