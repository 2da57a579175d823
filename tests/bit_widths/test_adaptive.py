"""Widths that follow sensitivities: the budget, less noise, and checkpoints."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact import Adaptive, StochBackward2bit, StochBackward4bit
from brevact.autograd.region.module_hooks import regions_of
from brevact.reports.gradient_noise import exact_gradients, gradient_noise
from brevact.reports.memory import memory_of

Batch = tuple[Tensor, Tensor]


def images(size: int = 16, seed: int = 0, pixels: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape = size, 3, pixels, pixels
    return torch.randn(shape, generator=generator), torch.randint(10, (size,), generator=generator)


class Residual(nn.Module):
    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), activation())
        self.last = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.act = activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.last(self.body(x)))


def net(activation: Callable[[], nn.Module] = nn.ReLU, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    stem = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), activation()
    tail = nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    return nn.Sequential(*stem, *(Residual(activation) for _ in range(3)), *tail)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def stored(model: nn.Module, batch: Batch) -> int:
    return memory_of(model, lambda copied: loss_of(copied, batch)).saved_bytes


def widths_of(model: nn.Module) -> dict[str, int]:
    return {n: hook.settings.quantizer.bit_width for n, m in model.named_modules() for hook in regions_of(m)}


def train(model: nn.Module, adaptive: Adaptive, steps: range, indices: Tensor | None = None) -> list[Tensor]:
    optimizer, found = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), []
    for step in steps:
        batch = images(seed=step % 4)
        if indices is None:
            loss = loss_of(model, batch)
        else:
            with adaptive.batch(indices[step % 4]):
                loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
        adaptive.step(batch)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(  # every pair of two of them
    ("activation", "budget", "samples"),
    [
        (nn.ReLU, {"bit_width": 4.5}, None),
        (nn.ReLU, {"ratio": 11.5}, 64),
        (nn.SiLU, {"bit_width": 4.5}, 64),
        (nn.SiLU, {"ratio": 11.5}, None),
    ],
    ids=str,
)
def test_measured_bytes_are_within_the_budget_at_every_step(activation, budget, samples):
    model, batch = net(activation), images()
    adaptive = Adaptive(model, batch, loss_of, **budget, every=2, samples=samples)
    seen = set()
    for step in range(5):
        train(model, adaptive, range(step, step + 1))
        assert stored(model, batch) == adaptive.saved_bytes <= adaptive.budget_bytes
        assert adaptive.saved_bytes >= 0.9 * adaptive.budget_bytes
        seen.add(tuple(widths_of(model).values()))
    assert max(max(widths) for widths in seen) > 4


def test_the_budget_is_that_of_the_ratio_or_of_the_uniform_width():
    batch = images()
    adaptive = Adaptive(brevact.quantize_backward(net(), StochBackward4bit), batch, loss_of, ratio=9)
    plain = memory_of(net(), lambda copied: loss_of(copied, batch)).plain_bytes
    assert adaptive.budget_bytes == int(plain / 9)
    sizes = [stored(brevact.quantize_backward(net(), StochBackward2bit, bit_width=b), batch) for b in (2, 3)]
    for width, expected in ((2, sizes[0]), (3, sizes[1]), (2.5, sum(sizes) / 2)):
        model = brevact.quantize_backward(net(), StochBackward4bit)
        assert Adaptive(model, batch, loss_of, bit_width=width).budget_bytes == int(expected)


def test_adaptive_widths_have_less_noise_than_a_uniform_width():
    batches = [images(seed=seed, pixels=16) for seed in range(3)]
    trained = net()
    for step in range(30):
        loss = loss_of(trained, images(seed=step, pixels=16))
        torch.autograd.backward(loss)
        with torch.no_grad():
            for p in trained.parameters():
                p.sub_(0.05 * p.grad)
                p.grad = None
    exact = exact_gradients(trained, batches, loss_of)
    noise = {}
    for name in ("uniform", "adaptive"):
        model = brevact.quantize_backward(copy.deepcopy(trained), StochBackward2bit)
        if name == "adaptive":
            Adaptive(model, batches[0], loss_of, bit_width=2)
        noise[name] = gradient_noise(model, batches, loss_of, exact, draws=4).noise.value
    assert noise["adaptive"] < 0.8 * noise["uniform"]


def test_sensitivities_are_the_noise_of_each_layer():
    """The difference of two draws has twice the variance of one; the layers' shares add up to the total noise."""
    batch = images(64)
    model = brevact.quantize_backward(net(), StochBackward4bit, min_numel=0)
    adaptive = Adaptive(model, batch, loss_of, bit_width=4)
    adaptive.load_state_dict(adaptive.state_dict() | {"bit_widths": [4] * len(adaptive.state_dict()["layers"])})
    expected = sum(s / 15**2 for s in adaptive.state_dict()["sensitivities"])
    exact = exact_gradients(model, [batch], loss_of)
    found = gradient_noise(model, [batch], loss_of, exact, draws=16).noise.value * exact.unit.value
    # Each share is a sum over thousands of weights; measured at the widths of another allocation.
    assert found == pytest.approx(expected, rel=0.35)


@pytest.mark.exhaustive
@pytest.mark.parametrize("samples", [None, 64])
def test_a_resumed_run_has_the_gradients_of_an_uninterrupted_one(samples: int | None):
    indices = None if samples is None else torch.randperm(64).view(4, 16)
    model = brevact.quantize_backward(net(), StochBackward4bit)
    adaptive = Adaptive(model, images(), loss_of, bit_width=3, every=3, samples=samples)
    train(model, adaptive, range(4), indices)
    if samples is not None:  # of this net, those of all samples are too similar to move a bit
        adaptive._norms.values = torch.logspace(-2, 2, samples)
    file = io.BytesIO()
    noise = {"rng": torch.get_rng_state(), "count": brevact.noise_count()}
    torch.save({"adaptive": adaptive.state_dict(), "model": model.state_dict(), **noise}, file)
    expected = train(model, adaptive, range(4, 7), indices)

    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = brevact.quantize_backward(net(seed=1), StochBackward4bit)
    resumed = Adaptive(other, images(seed=9), loss_of, bit_width=3, every=3, samples=samples)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["adaptive"])
    torch.set_rng_state(state["rng"])
    brevact.noise_count(state["count"])
    found = train(other, resumed, range(4, 7), indices)
    # The optimizers' momentum begins anew in both.
    assert all(map(torch.equal, found, expected))
    assert resumed.bit_widths == adaptive.bit_widths


def test_samples_with_larger_gradients_have_more_bits():
    model = brevact.quantize_backward(net(), StochBackward4bit)
    adaptive = Adaptive(model, images(), loss_of, bit_width=3, samples=20)
    inputs, targets = images()

    def widths() -> Tensor:
        packed = []
        with adaptive.batch(torch.arange(16)):
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x)
            with hooks:
                loss = loss_of(model, (inputs, targets))
        weights = torch.ones(16)
        weights[3] = 1e6  # a sample that is far from being learned
        (loss * 0 + (model_outputs[0] * weights[:, None]).square().sum()).backward()
        tails = [x[-16:] for x in packed if x.dtype is torch.uint8 and 1 <= x[-16:].min() and x[-16:].max() <= 8]
        return torch.stack(tails).float().mean(0)

    model_outputs = []
    model.register_forward_hook(lambda module, args, output: model_outputs.insert(0, output))
    before, after = widths(), widths()
    assert after[3] > before[3] and after[3] == after.max()
    known = adaptive.state_dict()["samples"]
    assert (known[:16] > 0).all() and (known[16:] == 0).all() and known.argmax() == 3


def test_models_without_a_policy_get_the_default():
    model = net(nn.SiLU)
    adaptive = Adaptive(model, images(), loss_of, ratio=11)
    assert len(set(widths_of(model).values())) > 1
    assert stored(model, images()) == adaptive.saved_bytes
    assert str(adaptive).count("\n") > 5
    brevact.restore_backward(model)
    assert widths_of(model) == {}


def test_rules_and_layers_without_a_width_stay():
    model = net()
    brevact.quantize_backward(
        model,
        {"3": None, nn.Flatten: brevact.NearestBackward4bit, "4": brevact.WeibullBackward2bit, "*": StochBackward4bit},
    )
    fixed = {n: h.settings for n, m in model.named_modules() for h in regions_of(m) if n[:1] in ("3", "4")}
    Adaptive(model, images(), loss_of, bit_width=3)
    assert fixed == {n: h.settings for n, m in model.named_modules() for h in regions_of(m) if n[:1] in ("3", "4")}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "exactly one of them"),
        ({"ratio": 8, "bit_width": 3}, ValueError, "exactly one of them"),
        ({"ratio": "8"}, TypeError, "ratio: got '8' of type str"),
        ({"ratio": 0.5}, ValueError, "ratio: got 0.5; accepted is a number of at least 1"),
        ({"bit_width": 9}, ValueError, "bit_width: got 9; accepted is a number from 1 to 8"),
        ({"ratio": 8, "every": 0}, ValueError, "every: got 0"),
        ({"ratio": 8, "every": 1.5}, TypeError, "every: got 1.5"),
        ({"ratio": 8, "samples": 0}, ValueError, "samples: got 0"),
        ({"ratio": 1000}, ValueError, r"ratio=1000: that is \d+ bytes .* accepted is ratio=2\d\."),
    ],
    ids=str,
)
def test_adaptive_refuses(arguments: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        Adaptive(brevact.quantize_backward(net(), StochBackward4bit), images(), loss_of, **arguments)


def test_adaptive_refuses_models_without_widths_and_wrong_indices():
    with pytest.raises(ValueError, match="no layer has a width that may change"):
        Adaptive(brevact.quantize_backward(net(), brevact.NearestBackward4bit), images(), loss_of, ratio=4)
    with pytest.raises(TypeError, match="model: got"):
        Adaptive(loss_of, images(), net(), ratio=4)
    adaptive = Adaptive(net(), images(), loss_of, ratio=4, samples=16)
    for indices, error in (
        ([0, 16], ValueError),
        ([0.5], TypeError),
        ("ab", TypeError),
        ([], ValueError),
        (3, TypeError),
        (["a"], TypeError),
    ):
        with pytest.raises(error, match="indices: got"), adaptive.batch(indices):
            pass
    with (
        pytest.raises(ValueError, match=r"got 8, and the outputs of layers have \[16\] rows"),
        adaptive.batch(range(8)),
    ):
        adaptive._model(images()[0])
    with pytest.raises(TypeError, match="loss: got <CrossEntropyLoss"):
        Adaptive(net(), images(), nn.CrossEntropyLoss(), ratio=4)
    with pytest.raises(ValueError, match="no layer packs a tensor of it"):
        Adaptive(nn.Linear(4, 4), torch.randn(2, 4), lambda model, x: model(x).sum(), ratio=4)
    with pytest.raises(ValueError, match="samples=len"), Adaptive(net(), images(), loss_of, ratio=4).batch([0]):
        pass
    state = adaptive.state_dict()
    for wrong, message in (
        ({"steps": 0}, "got the keys"),
        (state | {"layers": []}, "its layers are"),
        (state | {"samples": None}, "samples=None; accepted is 16"),
        (state | {"bit_widths": [1]}, "got 1 bit_widths; accepted are"),
        (state | {"sensitivities": []}, "got 0 sensitivities; accepted are"),
    ):
        with pytest.raises(ValueError, match=message):
            adaptive.load_state_dict(wrong)
    with pytest.raises(TypeError, match="accepted is a state_dict"):
        adaptive.load_state_dict(None)


@pytest.mark.parametrize("width", [100, 137, 174])
def test_the_nearest_possible_ratio_is_possible(width: int):
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8))
    brevact.quantize_backward(model, StochBackward4bit)
    arguments = torch.randn(128, 64), lambda model, x: model(x).square().mean()
    with pytest.raises(ValueError, match="accepted is ratio=") as caught:
        Adaptive(model, *arguments, ratio=1000)
    ratio = float(re.search(r"accepted is ratio=([\d.]+)", str(caught.value))[1])
    assert Adaptive(model, *arguments, ratio=ratio).saved_bytes > 0


@pytest.mark.parametrize("calls", [1, 9, 12])
def test_a_loss_that_fails_leaves_the_policy_as_it_was(calls: int):
    """At the first pass, after bytes are measured, and while sensitivities are."""
    plain, quantized = net(), brevact.quantize_backward(net(), {"0": None, "*": StochBackward4bit})
    before = [{name: regions_of(module) for name, module in model.named_modules()} for model in (plain, quantized)]
    settings = [hook.settings for found in before[1].values() for hook in found]
    for model in (plain, quantized):
        count = itertools.count(1)

        def failing(model: nn.Module, batch: Batch, count=count) -> Tensor:
            if next(count) == calls:
                raise KeyboardInterrupt
            return loss_of(model, batch)

        with pytest.raises(KeyboardInterrupt):
            Adaptive(model, images(), failing, bit_width=3)
    after = [{name: regions_of(module) for name, module in model.named_modules()} for model in (plain, quantized)]
    assert after == before
    assert [hook.settings for found in after[1].values() for hook in found] == settings


def test_steps_whose_gradients_are_not_finite_change_nothing():
    level = [1.0]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model, batch) + (0 * model(batch[0]).sum() + level[0]).sqrt()

    adaptive = Adaptive(brevact.quantize_backward(net(), StochBackward4bit), images(), loss, bit_width=3, every=1)
    before = adaptive.state_dict()
    level[0] = 0.0  # where the gradient of the root is infinite
    adaptive.step(images())
    assert adaptive.state_dict() == before | {"steps": 1}
    with pytest.raises(ValueError, match="the gradient of the batch is not finite"):
        Adaptive(brevact.quantize_backward(net(), StochBackward4bit), images(), loss, bit_width=3)


def test_a_checkpoint_of_a_larger_budget_does_not_exceed_that_of_the_object():
    large, small = (
        Adaptive(brevact.quantize_backward(net(), StochBackward4bit), images(), loss_of, bit_width=width)
        for width in (6, 3)
    )
    small.load_state_dict(large.state_dict())
    assert small.saved_bytes <= small.budget_bytes
    assert stored(small._model, images()) <= small.budget_bytes


def test_samples_are_remembered_where_some_layers_have_no_gradient():
    model = net()
    nn.init.zeros_(model[-1].weight)  # earlier layers get gradients of 0
    adaptive = Adaptive(brevact.quantize_backward(model, StochBackward4bit), images(), loss_of, bit_width=4, samples=16)
    with adaptive.batch(range(16)):
        value = loss_of(model, images())
    value.backward()
    adaptive.step(images())
    assert adaptive.state_dict()["samples"].mean().item() == pytest.approx(1.0)


def test_adaptive_is_pickled_with_its_model() -> None:
    adaptive = Adaptive(net(), images(), loss_of, bit_width=3)
    twin = pickle.loads(pickle.dumps(adaptive))
    assert twin.bit_widths == adaptive.bit_widths
    twin.step(images())
