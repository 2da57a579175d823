from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact import StochBackward2bit
from brevact.autograd import current_region, region
from tests.autograd.leaves import every_leaf, wide
from tests.autograd.measuring import settings, watch_saved


def stored_bits(model: nn.Module, x: Tensor) -> float:
    return 32 / brevact.memory_report(model, x).ratio


@every_leaf
def test_a_full_precision_first_layer_does_not_stop_packing(leaf):
    model = brevact.quantize_backward(wide(), {"0": None, "*": leaf})
    assert stored_bits(model, torch.randn(64, 256)) < 10  # one of six tensors is the input at 32 bits


@every_leaf
def test_a_stem_outside_the_region_does_not_stop_packing(leaf):
    net, x = wide(), torch.randn(64, 256)
    stem = net[0](x)
    with watch_saved() as saved, brevact.backward_quant(leaf):
        net[1:](stem)
    assert sum(t.dtype is torch.uint8 for t in saved.tensors) == 5
    assert not [t for t in saved.tensors if t.is_floating_point() and t.shape == (64, 256)]


@pytest.mark.parametrize("rules", [{"*": StochBackward2bit}, {"embed": None, "*": StochBackward2bit}])
def test_embeddings_are_activations(rules):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(1000, 256), wide()

        def forward(self, ids: Tensor) -> Tensor:
            return self.body(self.embed(ids) + 1)

    model = brevact.quantize_backward(Model(), rules)
    assert stored_bits(model, torch.randint(0, 1000, (4, 32))) < 3


@pytest.mark.parametrize(
    "make", [lambda t, ids: t[ids], lambda t, ids: t[ids] + t[:64], lambda t, ids: t.index_select(0, ids)]
)
def test_rows_of_a_table_that_trains_are_activations(make):
    table, ids = nn.Parameter(torch.randn(1000, 64)), torch.randint(0, 1000, (64,))
    with watch_saved() as saved, region(settings()):
        F.gelu(F.silu(make(table, ids)))
    assert [t.dtype for t in saved.tensors if t.is_floating_point() and t.numel() == 64 * 64] == []


BACKWARDS = list(range(63, -1, -1))


@pytest.mark.parametrize(
    ("index", "grad"),
    [
        *((index, grad) for index in (slice(None), BACKWARDS, torch.ones(64, dtype=torch.bool)) for grad in (0, 1)),
        (torch.tensor(BACKWARDS), 0),
    ],
)
def test_weights_that_are_indexed_stay_weights(index, grad):
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(64, 64), requires_grad=bool(grad))
    model.forward = lambda x: x * model.weight[index]
    brevact.quantize_backward(model, settings(bit_width=1))
    x = torch.randn(64, 64, requires_grad=True)
    model(x * 1).sum().backward()
    assert torch.equal(x.grad, model.weight[index])


@every_leaf
def test_what_layers_make_of_learned_inputs_is_an_activation(leaf):
    class Model(nn.Module):
        def __init__(self, make: object) -> None:
            super().__init__()
            self.latent, self.body, self.make = nn.Parameter(torch.randn(64, 256)), wide(), make

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.make(self.latent)) + x

    ids = torch.arange(64)
    makes = (
        lambda p: p,
        lambda p: p[:1].expand(128, 256),
        lambda p: p + p.new_zeros(64, 256).index_add_(0, ids, p),
    )
    for make in makes:
        model = brevact.quantize_backward(Model(make), leaf)
        with watch_saved() as saved:
            model(torch.zeros(1))
        assert sum(t.dtype is torch.uint8 for t in saved.tensors) >= 5


@pytest.mark.parametrize(
    "make",
    [
        lambda w, mask: w.sign() * w.abs().mean(),
        lambda w, mask: w + (w.round() - w).detach(),
        lambda w, mask: torch.where(mask, w, 0.0),
        lambda w, mask: w.clamp(-1, 1).mul(torch.where(w >= 0, 1.0, -1.0)),
        lambda w, mask: torch.tanh(w) / torch.tanh(w).abs().max(),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
@every_leaf
def test_weights_computed_from_weights_are_not_packed(make, grad, leaf):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.mask = nn.Parameter(torch.randn(64, 96)), torch.rand(64, 96) > 0.5

        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(grad):
                weight = make(self.weight, self.mask)
            return x @ weight

    model, x = Model(), torch.randn(32, 64, requires_grad=True)
    expected = torch.autograd.grad(model(x * 1).sum(), x)[0]
    brevact.quantize_backward(model, leaf, min_numel=0)
    assert torch.equal(torch.autograd.grad(model(x * 1).sum(), x)[0], expected)


@every_leaf
def test_frozen_weights_of_einsum_stay_exact_under_autocast(leaf):
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(96, 64), requires_grad=False)
    model.forward = lambda x: torch.einsum("bi,oi->bo", x, model.weight)
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu"):
        expected = torch.autograd.grad(model(x * 1).float().sum(), x)[0]
        brevact.quantize_backward(model, leaf, min_numel=0)
        assert torch.equal(torch.autograd.grad(model(x * 1).float().sum(), x)[0], expected)


class ScaledOutOfSight(torch.autograd.Function):
    """A Function that no region sees: a batch times a parameter."""

    @staticmethod
    def forward(ctx, scale: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * scale

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * ctx.saved_tensors[0]).sum(0), None


def test_what_is_larger_than_all_the_weights_it_came_from_is_packed():
    """The batch has no gradient: by its graph, the product comes from a parameter alone."""
    scale, x = nn.Parameter(torch.rand(64)), torch.randn(256, 64)
    with watch_saved() as saved, region(settings()):
        y = ScaledOutOfSight.apply(scale, x)
        y.sin()
    assert saved.tensors and not saved.holds(y)


def test_a_tensor_that_is_written_over_has_the_values_of_others():
    """Nothing is left of its own where the result fills its storage, and it is no operand itself."""
    weight, x = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64)
    with region(settings()), torch.no_grad():
        region_now = current_region()

        def is_weight(write: Callable[[Tensor], object], y: Tensor) -> bool:
            write(y)
            return region_now.is_weight(y)

        assert is_weight(lambda y: y.copy_(weight), x.clone())
        assert is_weight(lambda y: torch.exp(weight, out=y), x.clone())
        assert is_weight(lambda y: torch.clamp(y, -1, 1, out=y), weight.clone())
        assert not is_weight(lambda y: torch.mul(y, weight, out=y), x.clone())
        assert not is_weight(lambda y: y[:1].copy_(weight[:1]), x.clone())
        assert not is_weight(lambda y: torch.mul(weight[:1], 2, out=y[:1]), x.clone())
        assert not is_weight(lambda y: y.copy_(x), weight.clone())


class Product(torch.autograd.Function):
    """A linear layer of somebody's own: of a batch without gradient, and a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.T, out=out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        x, _ = ctx.saved_tensors
        return None, grad.T @ x, None


class OutsideOfTorch(Product):
    """The same by a kernel, which writes into memory of torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = torch.empty(len(x), len(weight))
        out.numpy()[:] = x.numpy() @ weight.detach().numpy().T
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return Product.backward(ctx, grad)[:2]


class Rounded(torch.autograd.Function):
    """A fake quantizer of somebody's own: of a weight, and a scale without gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return how(weight, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch": Product.apply,
    "into out": lambda x, w: Product.apply(x, w, torch.empty(len(x), len(w))),
    "kernel": OutsideOfTorch.apply,
    "view": lambda x, w: Product.apply(x, w).T,
}
ROUNDINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch": lambda w, scale: (w / scale).round() * scale,
    "into memory like it": lambda w, scale: torch.empty_like(w).copy_((w / scale).round() * scale),
    "itself": lambda w, scale: w,
    "view": lambda w, scale: w.view_as(w),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_what_a_function_makes_of_a_weight_and_a_batch_is_an_activation(product):
    """Where it has more elements than the weight."""
    weight, x = nn.Parameter(torch.randn(128, 64)), torch.randn(65, 64)
    with watch_saved() as saved, brevact.backward_quant(StochBackward2bit):
        product(x, weight).sin().cos()
    assert [t.dtype for t in saved.tensors if t.shape != weight.shape and t is not x].count(torch.uint8) == 2


@pytest.mark.parametrize("how", ROUNDINGS.values(), ids=ROUNDINGS)
def test_what_a_function_makes_of_weights_alone_is_one(how):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(128, 128))
            self.register_buffer("scale", torch.full((128, 1), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(Rounded.apply(self.weight * 1.0, self.scale, how), x)

    x = torch.randn(128, 64, requires_grad=True)
    with watch_saved() as saved:
        brevact.quantize_backward(Model(), StochBackward2bit)(x)
    assert not [t for t in saved.tensors if t.dtype is torch.uint8 and t.numel() >= 128 * 128 / 4]
