"""`torch.func`, forward-mode AD, `torch.jit`, `torch.export`, `torch.fx`: calls that run as without a policy."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import brevact
from brevact import L4ForwardBackward, LosslessBackward, StochBackward2bit
from tests.crosses import taking_turns
from tests.integration.models import X, codes, grads, images_net, mlp, quantized, twins


def test_functional_call_packs():
    plain, model = twins()
    parameters = {name: (p + 1).detach().requires_grad_() for name, p in plain.named_parameters()}
    packed, floats, out = codes(lambda x: torch.func.functional_call(model, parameters, (x,)), X)
    assert torch.equal(out, torch.func.functional_call(plain, parameters, (X,)))
    assert len(packed) == 4 and not [x for x in floats if x.shape == X.shape]
    out.sum().backward()
    assert all(p.grad is not None for p in parameters.values())
    assert all(p.grad is None for p in model.parameters())


TRANSFORMS = {
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(X),
    "vjp": lambda model: torch.func.vjp(model, X),
    "jacrev": lambda model: torch.func.jacrev(model)(X[0]),
    "hessian": lambda model: torch.func.hessian(lambda x: model(x).sum())(X[0]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_reverse_transforms_say_what_to_do(transform):
    model = quantized(mlp())
    with pytest.raises(NotImplementedError, match=r"model\.eval\(\).*brevact\.restore_backward"):
        TRANSFORMS[transform](model)
    TRANSFORMS[transform](model.eval())
    TRANSFORMS[transform](brevact.restore_backward(model.train()))


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.energy = nn.Linear(64, 64), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: self.energy(y).square().sum())(self.first(x))


class Chunked(torch.autograd.Function):
    """A loss with its gradient, of some rows at a time."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        found = [torch.func.grad_and_value(lambda rows: rows.tanh().sum())(chunk) for chunk in x.chunk(2)]
        ctx.save_for_backward(torch.cat([grad for grad, _ in found]))
        return sum(value for _, value in found)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class OfEachRow(nn.Module):
    """A hidden state that is trained in the forward pass, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x - torch.vmap(torch.func.grad(lambda row: self.layer(row).square().sum()))(x)


class Through(nn.Module):
    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("last", [Forces, OfEachRow, lambda: Chunked.apply])
def test_regions_step_aside_for_transforms_inside(last):
    plain, model = twins(lambda: Through(last()), LosslessBackward)
    for each in (plain, model):
        each(X).sum().backward()
    assert all(map(torch.equal, grads(plain), grads(model)))
    packed = quantized(copy.deepcopy(plain), StochBackward2bit)
    packed.zero_grad()
    packed(X).sum().backward()
    assert not torch.equal(packed.first[0].weight.grad, plain.first[0].weight.grad)  # the layers in front pack


@pytest.mark.parametrize("randomness", ["error", "different"])
def test_vmap_gives_the_gradients_of_the_plain_model(randomness):
    results = []
    for model in twins(source=StochBackward2bit):
        out = torch.func.vmap(model, randomness=randomness)(X)
        out.square().sum().backward()
        results.append([out, *grads(model)])
    assert all(map(torch.equal, *results))


def test_vmap_inside_a_model_runs():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return torch.vmap(lambda row: nn.functional.silu(y).mean(0) * row)(x) + torch.vmap(self.norm)(y)

    plain, model = twins(Model, StochBackward2bit)
    packed, _, out = codes(model, X)
    assert torch.equal(out, plain(X)) and packed
    out.sum().backward()


def test_forward_mode_gives_the_tangents_of_the_plain_model():
    results = []
    for model in twins(source=StochBackward2bit):
        tangents = [torch.func.jvp(model, (X,), (X.cos(),))[1], torch.func.jacfwd(model)(X[0])]
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(X, X.cos()))
            products = torch.autograd.grad(out.square().sum(), list(model.parameters()))  # of the Hessian
            results.append([*tangents, *(forward_ad.unpack_dual(x).tangent for x in (out, *products))])
    assert all(map(torch.equal, *results))


def of_export(strict: bool):
    return lambda model, x: torch.export.export(model, (x,), strict=strict).module(check_guards=False)


PROGRAMS = {
    "trace": lambda model, x: torch.jit.trace(model, x),
    "export": of_export(False),
    "export strict": of_export(True),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
}


@pytest.mark.parametrize("program, training", taking_turns(list(PROGRAMS), [False, True]))
def test_programs_compute_what_the_plain_model_does(program, training):
    for make, x in ((mlp, X), (images_net, torch.randn(4, 3, 16, 16))):
        plain, model = twins(make, StochBackward2bit)
        result = PROGRAMS[program](model.train(training), x)(x)
        assert torch.equal(result, PROGRAMS[program](plain.train(training), x)(x))


def test_traced_programs_store_what_torch_stores():
    class InBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            with brevact.backward_quant(StochBackward2bit, min_numel=0):
                return self.net(x)

    for model in (quantized(mlp()), InBlock()):
        packed, floats, out = codes(torch.jit.trace(model, X), X)
        out.sum().backward()
        assert not packed and len(floats) > 4


@pytest.mark.parametrize("training", [False, True])
def test_rounded_norms_are_not_lost_silently(training):
    model = quantized(mlp(), L4ForwardBackward).train(training)
    for transform in (lambda: torch.func.vmap(model)(X), lambda: torch.func.jvp(model, (X,), (X,))):
        with pytest.raises(NotImplementedError, match="restore_backward"):
            transform()
    for function in (model, brevact.backward_quant(L4ForwardBackward)(mlp())):
        with pytest.raises(NotImplementedError, match=r"torch\.export and compiled graphs"):
            torch.jit.trace(function, X)
