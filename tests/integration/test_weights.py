"""A weight, however computed, is saved in full precision; other saved tensors are packed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8WeightPerTensorFloat
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import brevact
from brevact import StochBackward2bit
from tests.integration.models import codes, grads, mlp, quantized
from tests.saving import by_torch_save

ROWS, WIDTH, OUT = 40, 48, 96  # no activation has as many elements as the weight
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


class Lora(nn.Module):
    """A frozen layer and a low-rank update, merged into its weight or beside it."""

    def __init__(self, merges: bool, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, OUT).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, WIDTH)), nn.Parameter(torch.randn(OUT, rank))
        self.merges = merges

    def forward(self, x: Tensor) -> Tensor:
        if self.merges:
            return F.linear(x, self.base.weight + 0.5 * self.b @ self.a, self.base.bias)
        return self.base(x) + 0.5 * ((x @ self.a.t()) @ self.b.t())


class Transposed(nn.Module):
    """A weight stored the other way round, under a mask that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, OUT))
        self.register_buffer("mask", (torch.rand(OUT, WIDTH) > 0.5).float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t() * self.mask)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(OUT, WIDTH), nn.Linear(WIDTH, OUT, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(x + self.embed(torch.arange(ROWS))))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, OUT)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "lora": lambda: Lora(False),
    "merged lora": lambda: Lora(True),
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "pruned": lambda: prune.l1_unstructured(linear(), "weight", 0.5),
    "fake-quantized": lambda: qnn.QuantLinear(WIDTH, OUT, bias=True, weight_quant=Int8WeightPerTensorFloat),
    "transposed": Transposed,
    "tied": Tied,
    "frozen": lambda: linear().requires_grad_(False),
}


def by_state_dict(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})
    return model


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": by_torch_save,
    "state_dict": by_state_dict,
    "to float64 and back": lambda model: model.double().float(),
    "share_memory": lambda model: model.share_memory(),
    "averaged": lambda model: torch.optim.swa_utils.AveragedModel(model),
}


#: Weights that are made of weights.
MADE = {"merged lora", "weight_norm", "spectral_norm", "orthogonal", "pruned", "fake-quantized", "transposed"}


def stored(model: nn.Module, autocast: bool = False) -> tuple[int, list[int], int]:
    """Number of packed tensors, sizes of unpacked weights but the model's own, number of unpacked activations."""
    x = X.clone().requires_grad_()
    with torch.autocast("cpu", enabled=autocast):
        packed, floats, out = codes(model, x * 1)
    out.float().square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    activations = [x for x in floats if ROWS in x.shape]
    held = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    weights = {x.untyped_storage().data_ptr(): x for x in floats if ROWS not in x.shape}
    weights = {key: x for key, x in weights.items() if key not in held}
    return len(packed), sorted(x.numel() for x in weights.values()), len(activations)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_no_weight_is_packed_and_every_activation_is(name, autocast):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), MODULES[name]())
    none, weights, activations = stored(model, autocast)
    assert none == 0 and activations >= 2 and (name not in MADE or max(weights) >= WIDTH**2)
    packed, kept, left = stored(quantized(model, StochBackward2bit, bucket_size=64), autocast)
    assert (packed, left) == (activations, 0)
    if name == "fake-quantized":  # it is computed again
        assert sum(kept) < sum(weights)
    elif name in MADE:
        assert sum(kept) <= sum(weights)
    else:  # autocast's copies of parameters are made again
        assert kept == ([] if autocast else weights)


@pytest.mark.parametrize("name", sorted({*MODULES} - {"tied", "spectral_norm"}))  # which are not linear; changes
def test_gradients_of_inputs_need_weights_alone(name):
    model = MODULES[name]()
    x = X.clone().requires_grad_()
    expected = torch.autograd.grad(model(x * 1).sum(), x)[0]
    quantized(model, StochBackward2bit)
    assert torch.equal(torch.autograd.grad(model(x * 1).sum(), x)[0], expected)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_models_pack_as_before(change):
    model = quantized(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), Lora(True), nn.LayerNorm(OUT)))
    before = stored(model)
    model.zero_grad(set_to_none=True)
    changed = CHANGES[change](model)
    assert stored(changed) == before and before[0] >= 4
    results = []
    for each in (changed, changed, model):
        torch.manual_seed(3)
        each.zero_grad()
        each(X).sum().backward()
        results.append(grads(each))
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))  # the same model still, or one that trains as it does


def test_ties_hold():
    model = quantized(Tied(), StochBackward2bit)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        assert each.head.weight is each.embed.weight
        each(X).sum().backward()
        torch.optim.SGD(each.parameters(), 0.1).step()
        assert torch.equal(each.head.weight, each.embed.weight)
    assert brevact.restore_backward(model) is model


def test_state_dicts_go_between_models_with_and_without_policy():
    plain, model = mlp(), quantized(mlp())
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    assert list(plain.state_dict()) == list(model.state_dict())
