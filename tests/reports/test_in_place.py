"""Reports, fits and adaptive widths run the model itself, and leave all of it as it was."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import brevitas.nn as qnn
import numpy as np
import pytest
import torch
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat
from torch import Tensor, nn
from torch.ao.quantization import default_fused_per_channel_wt_fake_quant
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import brevact
from brevact import StochBackward4bit
from brevact.reports.in_place import in_place

FOUR = StochBackward4bit.let(min_numel=0)
exhaustive = pytest.mark.exhaustive


def conv_net(change: Callable[[nn.Conv2d], Any] = lambda conv: None) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Dropout(0.2), nn.Conv2d(8, 4, 3))
    change(model[0])
    return model


class Routed(nn.Module):
    """Keeps the loss of its router, with its graph, and counts of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Conv2d(3, 2, 1), nn.ModuleList(nn.Conv2d(3, 4, 3) for _ in range(2))
        self.auxiliary: Tensor | None = None
        self.seen, self.counts = [], {"batches": 0}

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).mean((2, 3)).softmax(1)
        self.auxiliary = (weights.mean(0) ** 2).sum()
        self.seen.append(len(x))
        self.counts["batches"] += 1
        outs = torch.stack([expert(x) for expert in self.experts], 1)
        return (weights[:, :, None, None, None] * outs).sum(1)


class Averaged(nn.Module):
    """Moves a target towards its layer in each forward pass, and draws random numbers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.target = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).requires_grad_(False)
        self.generator = torch.Generator().manual_seed(3)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, now in zip(self.target.parameters(), self.layer.parameters(), strict=True):
                mean.lerp_(now, 0.1)
        self.register_buffer("last", x.detach().mean())
        noise = torch.rand(1, generator=self.generator) + random.random() + np.random.rand()
        return self.layer(x) + self.target(x) + 0 * noise.float()


def collecting() -> nn.Module:
    quantizers = {"input_quant": Int8ActPerTensorFloat, "weight_quant": Int8WeightPerTensorFloat}
    return nn.Sequential(qnn.QuantConv2d(3, 8, 3, **quantizers), nn.ReLU(), qnn.QuantConv2d(8, 4, 3, **quantizers))


def scripted(make: Callable[..., nn.Module]) -> nn.Module:
    """A net with a norm made by torch.jit."""
    norm = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(nn.Conv2d(3, 8, 3), make(norm), nn.Conv2d(8, 4, 3))


def lstm() -> nn.Module:
    return nn.Sequential(nn.Flatten(2), nn.LSTM(64, 16, batch_first=True), First(), nn.Linear(16, 4))


class First(nn.Module):
    def forward(self, x: tuple[Tensor, Any]) -> Tensor:
        return x[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": conv_net,
    "pruned": lambda: conv_net(lambda conv: prune.l1_unstructured(conv, "weight", 0.5)),
    "weight norm, legacy": lambda: conv_net(weight_norm),
    "weight norm": lambda: conv_net(parametrizations.weight_norm),
    "spectral norm, legacy": lambda: conv_net(spectral_norm),
    "spectral norm": lambda: conv_net(parametrizations.spectral_norm),
    "keeps an auxiliary loss": Routed,
    "moves a target": Averaged,
    "collects statistics": collecting,
    "lstm": lstm,
    "scripted": lambda: scripted(torch.jit.script),
    "traced": lambda: scripted(lambda norm: torch.jit.trace(norm, torch.randn(4, 8, 6, 6))),
    "observes channels": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), default_fused_per_channel_wt_fake_quant()),
}
BATCHES = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def measure_memory(model: nn.Module) -> None:
    brevact.memory_report(model, BATCHES[0])


def measure_gradients(model: nn.Module) -> None:
    brevact.gradient_report(model, BATCHES, loss, policy=FOUR, draws=2, layer_draws=2)


def fit(model: nn.Module) -> None:
    brevact.fit(model, BATCHES, loss, ratio=1.5)


def measure_step(model: nn.Module) -> None:
    brevact.step_report(model, BATCHES[0], loss, rounds=2)


def adapt(model: nn.Module) -> None:
    brevact.quantize_backward(model, FOUR)
    try:
        brevact.Adaptive(model, BATCHES[0], loss, bit_width=4, every=1).step(BATCHES[1])
    finally:
        brevact.restore_backward(model)


MEASURES = {each.__name__: each for each in (measure_memory, measure_gradients, measure_step, fit, adapt)}


def picture(model: nn.Module) -> list[Any]:
    """All that is to be as before: values in copies, objects as they are."""
    found: list[Any] = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()]
    for name, module in model.named_modules(remove_duplicate=False):
        found += [name, module.training, [*vars(module)], [*module._forward_pre_hooks], [*module._forward_hooks]]
        for key, value in vars(module).items():
            if isinstance(value, list):
                found.append([x if isinstance(x, int) else id(x) for x in value])
            elif isinstance(value, dict):
                found += [[*value], [x for x in value.values() if isinstance(x, int)]]
            elif isinstance(value, torch.Generator):
                found.append(value.get_state())
            else:
                found += [key, id(value)]
    for x in (*model.parameters(), *model.buffers()):
        grad = None if x.grad is None else (id(x.grad), x.grad.clone())
        found += [id(x), x.detach().clone(), x.requires_grad, grad]
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def trained(name: str) -> nn.Module:
    """A model with gradients that are there: it has taken a step, unless its first one is to be restored."""
    torch.manual_seed(0)
    model = MODELS[name]()
    if name == "observes channels":
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return model
    loss(model, BATCHES[0]).backward()
    return model


#: All models by the quickest measure, one by all, and the others by one more, in turn.
CROSS = [
    pytest.param(name, measure, marks=[] if is_quick else exhaustive)
    for place, name in enumerate(MODELS)
    for number, measure in enumerate(MEASURES)
    if (is_quick := measure == "measure_memory" or name == "collects statistics")
    or number == 1 + place % (len(MEASURES) - 1)
]


@pytest.mark.parametrize(("name", "measure"), CROSS)
def test_a_measured_model_is_as_it_was(name, measure):
    model = trained(name)
    before = picture(model)
    try:
        MEASURES[measure](model)
    except ValueError as error:  # of nets that draw numbers of their own, or whose budget is not possible
        assert name == "moves a target" or "ratio" in str(error)
    assert all(map(same, picture(model), before))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("measure", MEASURES)
def test_a_model_is_as_it_was_after_an_error(measure, error):
    model, passes = trained("plain").eval(), []

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(x)
            if len(passes) == 2 - (measure == "measure_memory"):  # whose second pass may fail: the report says so
                raise error("stopped")
            return x

    model.append(Failing())
    before = picture(model)
    with pytest.raises(error):
        MEASURES[measure](model)
    assert all(map(same, picture(model), before))
    loss(model, BATCHES[0]).backward()  # nothing of the pass that failed is left


def test_a_policy_and_its_settings_are_as_they_were():
    model = brevact.quantize_backward(trained("plain"), {nn.Conv2d: FOUR, "*": None})
    text, before = str(model), picture(model)
    brevact.gradient_report(model, BATCHES, loss, draws=2, layer_draws=2)
    brevact.gradient_report(model, BATCHES, loss, policy=brevact.DEFAULT, draws=2, layers=None)
    assert str(model) == text and all(map(same, picture(model), before))


def test_hooks_on_parameters_do_not_run_and_stay():
    model, seen = trained("plain"), []
    weight = model[0].weight
    weight.register_hook(lambda grad: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda x: seen.append("accumulated"))
    measure_gradients(model)
    assert not seen
    loss(model, BATCHES[0]).backward()
    assert seen == ["gradient", "accumulated"]


def test_figures_are_those_of_a_copy_that_trains():
    """A second report finds the first one's figures: no pass has left a trace."""
    model = trained("plain")
    first, second = (brevact.gradient_report(model, BATCHES, loss, policy=FOUR, draws=2) for _ in range(2))
    assert first == second


def test_wrappers_of_several_devices_are_refused():
    with pytest.raises(ValueError, match=r"model: a DataParallel runs .* model\.module"):
        brevact.memory_report(nn.DataParallel(nn.Linear(4, 4)), torch.randn(2, 4))


@pytest.mark.parametrize("policy", [None, FOUR, brevact.LosslessBackward])
def test_a_graph_that_was_there_before_a_report_is_as_it_was(policy):
    """The graph of a norm keeps running statistics for backward; norms write theirs behind the version counter, too."""
    found = []
    for measures in ([], [measure_memory, measure_gradients]):
        model = trained("plain")
        if policy is not None:
            brevact.quantize_backward(model, policy)
        torch.manual_seed(1)
        value = loss(model, BATCHES[0])
        for measure in measures:
            measure(model)
        found.append(torch.autograd.grad(value, list(model.parameters())))
    assert all(map(torch.equal, *found))


def test_a_scripted_model_is_as_it_was():
    model = torch.jit.script(nn.Sequential(nn.BatchNorm2d(3).eval(), nn.BatchNorm2d(3)))
    modes, before = [x.training for x in model.modules()], {key: x.clone() for key, x in model.state_dict().items()}
    brevact.memory_report(model, BATCHES[0])
    assert [x.training for x in model.modules()] == modes
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


def test_what_a_block_adds_is_gone():
    model = trained("plain")
    before = picture(model)
    with in_place(model):
        model.add_module("more", nn.Linear(2, 2))
        model[0].weight.data.fill_(1.0)
        model[0].weight.requires_grad_(False)
        model[1].running_mean.fill_(3.0)
        model[1].note = "new"
        del model[2].inplace
        F.relu(model[0](BATCHES[0])).sum().backward()
    assert all(map(same, picture(model), before))


class Keeping(nn.Module):
    """Holds state in a tensor that is no buffer and in containers, all changed by a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count, self.passes, self.names = nn.Linear(4, 4), 0, [0], {"a"}
        self.plain = torch.zeros(3, 4).expand(2, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.passes.append(self.count)
        self.names.add(str(self.count))
        self.plain[0].add_(1)
        return self.layer(x)

    def figures(self) -> list[Any]:
        return [self.count, self.plain.tolist(), *self.passes, *sorted(self.names)]


def test_state_in_attributes_is_as_it_was():
    model = Keeping()
    model(torch.randn(2, 4))
    before = model.figures()
    brevact.memory_report(model, torch.randn(8, 4))
    brevact.gradient_report(model, [torch.randn(8, 4)], loss, draws=2, layers=None)
    assert model.figures() == before


def write_graph(model: nn.Module) -> None:
    model.buffer.mul_(0.5).add_(model.layer(torch.ones(4)))


def negate(model: nn.Module) -> None:
    model.buffer.neg_()  # of zeros


def add_hooks(model: nn.Module) -> None:
    model.layer.weight.register_hook(lambda grad: grad / 0)
    model.layer.weight.register_post_accumulate_grad_hook(lambda x: x.data.zero_())


@pytest.mark.parametrize("change", [write_graph, negate, add_hooks])
def test_tensors_are_the_same_bits_in_the_same_memory(change):
    model = nn.Module()
    model.layer = nn.Linear(4, 4)
    model.register_buffer("buffer", torch.zeros(4))
    tensors, places = [*model.parameters(), model.buffer], [x.data_ptr() for x in (*model.parameters(), model.buffer)]
    before = [x.detach().clone() for x in tensors]
    with in_place(model):
        change(model)
    assert all(map(same, before, tensors)) and all(x.is_leaf for x in tensors)
    assert not model.buffer.signbit().any() and [x.data_ptr() for x in tensors] == places
    model.layer(torch.ones(4)).sum().backward()
    assert torch.equal(model.layer.weight.grad, torch.ones(4, 4)) and same(before[0], model.layer.weight.data)


def test_memory_report_measures_a_model_that_writes_a_graph_into_a_buffer():
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            self.mean.mul_(0.9).add_(out.mean(0) * 0.1)
            return out * self.mean

    model = Writing()
    brevact.memory_report(model, torch.randn(8, 4))
    assert model.mean.is_leaf and not model.mean.any()
