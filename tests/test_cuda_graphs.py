"""Captured steps: each call is one step, and leaves what the step itself would leave."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8ActPerTensorFloat
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact.quantizers.backends import without_kernels
from tests import cuda_graphs
from tests.crosses import taking_turns

CALLS = 8


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[cuda_graphs.Device]:
    with without_kernels():  # the miniature sees ops of PyTorch alone
        yield cuda_graphs.put_in_place(monkeypatch)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))
    model.unused = nn.Parameter(torch.ones(3))  # an optimizer leaves it out, as it has no gradient
    return model


def batches(count: int = CALLS, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


class Training:
    """A model that trains by one of the usual orders of calls."""

    def __init__(self, order: str, policy: Any = None, **optimizer: Any) -> None:
        self.order, self.model = order, network()
        if policy is not None:
            brevact.quantize_backward(self.model, policy)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, **optimizer}
        )
        self.made = 0

    def step(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        self.made += 1
        for part in self.order.split():
            if part == "backward":
                outputs = self.model(inputs)
                loss = F.cross_entropy(outputs, targets.long())
                loss.backward()
            elif part == "zero":
                self.optimizer.zero_grad()
            elif part == "zeros":
                self.optimizer.zero_grad(set_to_none=False)
            elif part == "clip":
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            elif part == "update":
                self.optimizer.step()
        return {"loss": loss, "outputs": outputs.detach()}

    def values(self) -> list[Tensor | None]:
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return [*(x.clone() for x in self.model.state_dict().values()), *grads]


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def halve(training: Training) -> None:
    for p in training.model.parameters():
        p.grad = None if p.grad is None else p.grad * 0.5


def given(training: Training) -> None:
    for p in training.model.parameters():
        p.grad = torch.ones_like(p)


#: Order of calls in the step, and what the program does between two of its calls.
ORDERS: dict[str, tuple[str, Callable[[int, Training], object]]] = {
    "set to None": ("zero backward clip update", lambda call, t: None),
    "set to zero": ("zeros backward update", lambda call, t: None),
    "behind": ("backward update zero", lambda call, t: None),
    "outside": ("backward", lambda call, t: (t.optimizer.step(), t.optimizer.zero_grad())),
    "outside, clipped": (
        "backward",
        lambda call, t: (nn.utils.clip_grad_norm_(t.model.parameters(), 0.1), t.optimizer.step(), t.model.zero_grad()),
    ),
    "accumulated": ("backward", lambda call, t: call % 3 == 2 and (t.optimizer.step(), t.optimizer.zero_grad())),
    "twice": ("zero backward update", lambda call, t: t.optimizer.zero_grad()),
    "replaced": ("backward", lambda call, t: halve(t)),
    "given": ("backward update zero", lambda call, t: call > 5 and given(t)),
    "never": ("backward update", lambda call, t: None),
}


POLICIES = {"plain": None, "packed": brevact.NearestBackward4bit.let(min_numel=0)}


@pytest.mark.parametrize("order, policy", taking_turns(list(ORDERS), list(POLICIES)))
def test_captured_is_the_step(device, order, policy):
    (parts, between), policy = ORDERS[order], POLICIES[policy]
    plain, ours = Training(parts, policy), Training(parts, policy)
    step = brevact.captured(ours.step)
    for call, batch in enumerate(batches()):
        assert_equal(step(*batch)["loss"].detach(), plain.step(*batch)["loss"].detach())
        assert_equal(ours.values(), plain.values())
        between(call, plain), between(call, ours)
    assert device.graphs == 1 and ours.made == 4 + (order == "given"), "it ran after the capture"


def test_results_of_a_call_are_its_own(device):
    ours, plain = Training("zero backward update"), Training("zero backward update")
    step = brevact.captured(ours.step)
    found, expected = [step(*batch) for batch in batches()], [plain.step(*batch) for batch in batches()]
    for a, b in zip(found, expected, strict=True):
        assert_equal({k: v.detach() for k, v in a.items()}, {k: v.detach() for k, v in b.items()})
    places = {p.grad.data_ptr() for p in ours.model.parameters() if p.grad is not None}
    ours.model.zero_grad()
    step(*batches()[0])
    assert {p.grad.data_ptr() for p in ours.model.parameters() if p.grad is not None} == places


def test_a_schedule_outside_of_the_step_sets_the_rate(device):
    plain, ours = Training("zero backward update", fused=True), Training("zero backward update", fused=True)
    step = brevact.captured(ours.step)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(t.optimizer, 0.5) for t in (plain, ours)]
    for batch in batches():
        plain.step(*batch), step(*batch)
        torch.testing.assert_close(ours.values(), plain.values())  # float32 in place of float64 rates
        [each.step() for each in schedules]
    assert device.graphs == 1 and ours.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]


def to_eval(training: Training) -> None:
    training.model[1].eval()


KINDS: dict[str, Callable[[Training], Any]] = {
    "shape": lambda t: batches(size=12),
    "dtype": lambda t: [(x, y.to(torch.uint8)) for x, y in batches()],
    "strides": lambda t: [(x.t().contiguous().t(), y) for x, y in batches()],
    "eval": to_eval,
    "frozen": lambda t: setattr(t.model[0].weight, "requires_grad", False),
    "moved": lambda t: setattr(t.model[0].weight, "data", t.model[0].weight.data.clone()),
    "replaced": lambda t: setattr(t.model[3], "weight", nn.Parameter(t.model[3].weight.detach() * 2)),
    "policy": lambda t: brevact.quantize_backward(t.model, brevact.NearestBackward4bit) and None,
    "rate": lambda t: t.optimizer.param_groups[0].update(lr=0.01),
    "momentum": lambda t: t.optimizer.param_groups[0].update(momentum=0.5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_call_has_a_graph(device, kind):
    plain, ours = Training("zeros backward update"), Training("zeros backward update")
    step, first = brevact.captured(ours.step), batches()
    for batch in first:
        step(*batch), plain.step(*batch)
    KINDS[kind](plain)
    other = KINDS[kind](ours) or first
    for _ in range(2):
        for batch in other:
            step(*batch), plain.step(*batch)
            assert_equal(ours.values(), plain.values())
        assert device.graphs == 2
    if other is not first:
        step(*first[0]), plain.step(*first[0])
        assert_equal(ours.values(), plain.values())
    assert device.graphs == 2


def test_autocast_and_grad_mode_have_graphs_of_their_own(device):
    model, x = network().eval(), batches(1)[0][0]
    step = brevact.captured(lambda x: model(x).detach())
    for context in (torch.enable_grad(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            expected = model(x).detach()
            for _ in range(5):
                assert_equal(step(x), expected)
    assert device.graphs == 3


def changing(training: Training, device: cuda_graphs.Device) -> Callable[..., Any]:
    counts = iter(range(100))
    return lambda x, y: (training.step(x, y)["loss"], next(counts))


def stepping(training: Training, device: Any) -> Callable[..., Any]:
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)
    return lambda x, y: (training.step(x, y), schedule.step())[0]


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = self.state[p].get("count", 0) + 1
        super().step(closure)


def counting(training: Training, device: Any) -> Callable[..., Any]:
    training.optimizer = Counting(training.model.parameters(), lr=0.1, momentum=0.9)
    return training.step


#: Steps that cannot be captured, and words of the reason.
IMPOSSIBLE: dict[str, tuple[Callable[[Training, cuda_graphs.Device], Callable[..., Any]], str]] = {
    "waits": (lambda t, d: lambda x, y: (t.step(x, y), d.wait())[0], r"waits for the GPU, at .*test_cuda_graphs.py:"),
    "draws": (lambda t, d: lambda x, y: t.step(x + torch.randn(()), y), "draws random numbers on the CPU"),
    "draws in Python": (lambda t, d: lambda x, y: t.step(x * random.random(), y), "draws random numbers on the CPU"),
    "counts": (counting, "an optimizer counts steps on the CPU; give it capturable=True"),
    "schedules": (stepping, r"it changes lr; call scheduler\.step\(\) between its calls"),
    "changes an argument": (lambda t, d: lambda x, y: t.step(x.mul_(2), y), "changes an argument in place"),
    "returns an object": (lambda t, d: lambda x, y: (t.step(x, y)["loss"], t), "it returns .*; accepted are tensors"),
    "returns counts": (changing, "returns numbers or a structure that change"),
    "only forward": (lambda t, d: lambda x, y: F.cross_entropy(t.model(x), y), "make_graphed_callables"),
    "needs gradients": (lambda t, d: lambda x, y: t.step(x.requires_grad_(), y), "requires gradients"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_captured_runs_as_it_is_and_says_why_once(device, name):
    make, words = IMPOSSIBLE[name]
    plain, ours = Training("zero backward update"), Training("zero backward update")
    expected, step = make(plain, device), brevact.captured(make(ours, device))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for seed, (x, y) in enumerate(batches()):
            outcomes = []
            for run in (expected, step):
                torch.manual_seed(seed), random.seed(seed)
                x_of_its_own = x.clone() if name != "needs gradients" else x.clone().requires_grad_()
                outcomes.append(run(x_of_its_own, y))
            assert_equal(ours.values(), plain.values())
    (message,) = [str(each.message) for each in found if "brevact.captured" in str(each.message)]
    assert re.search(words, message), message
    assert device.graphs == (name == "returns counts")


def test_warnings_of_the_step_are_shown(device):
    training = Training("zero backward update")

    def step(x: Tensor, y: Tensor) -> Any:
        warnings.warn("mine", stacklevel=1)
        return training.step(x, y)

    run = brevact.captured(step)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batch in batches():
            run(*batch)
    assert [str(each.message) for each in found] == ["mine"] * 4  # three calls, and the capture


@pytest.mark.parametrize(
    "most, sizes, options, words",
    [
        (9, (8, 12, 16, 20), {"graphs": 2, "warm_up": 2}, r"more than graphs=2 ways, which differ in shapes[^;]*$"),
        (1, (8, 12, 8, 12), {}, r"too little memory for another graph: CUDA out of memory"),
    ],
)
def test_kinds_beyond_the_graphs_and_the_memory_run_as_they_are(device, most, sizes, options, words):
    plain, ours = Training("zero backward update"), Training("zero backward update")
    step, device.most_graphs = brevact.captured(ours.step, **options), most
    with pytest.warns(RuntimeWarning, match=words) as found:
        for size in sizes:
            for batch in batches(5, size):
                step(*batch), plain.step(*batch)
                assert_equal(ours.values(), plain.values())
    assert device.graphs == 2 and len(found) == 1


def test_a_rate_that_the_optimizer_reads_as_a_number_is_named(device):
    training = Training("zero backward update")
    step = brevact.captured(training.step, graphs=2)
    with pytest.warns(RuntimeWarning, match=r"differ in constants of optimizers \(for an lr that changes, give fused"):
        for call, batch in enumerate(batches(4)):
            training.optimizer.param_groups[0]["lr"] = 0.1 / (call + 1)
            step(*batch)


def weights_after(wrap: Callable[[Any], Any], model: nn.Module, loss: Callable[..., Tensor], calls: int = 12) -> Any:
    """Train a model by gradients of a step, and an optimizer outside of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        found = loss(model, x, y)
        found.backward()
        return found.detach()

    step = wrap(step)
    for call, batch in enumerate(batches(calls)):
        try:
            step(*batch)
        except ValueError:
            continue
        model.between(call) if hasattr(model, "between") else None
        optimizer.step(), optimizer.zero_grad()
    return model.state_dict()


class Scaled(nn.Module):
    """A model whose loss is a method, and that has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.scale = network(), nn.Parameter(torch.tensor(2.0))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()  # a leaf that each step makes
        return F.cross_entropy(self.network(x) * self.scale, y)


class Rebinding(nn.Module):
    """A model with a buffer that its forward pass, or the program between steps, replaces."""

    def __init__(self, is_own: bool) -> None:
        super().__init__()
        self.network, self.is_own = network(), is_own
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.network(x)
        if self.is_own:
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return out - self.mean.square()

    def between(self, call: int) -> None:
        if not self.is_own:
            self.mean = torch.full((3,), float(call))


def of_call(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def test_parameters_that_no_module_shows_get_gradients(device):
    expected = weights_after(lambda step: step, Scaled(), Scaled.loss)
    assert_equal(weights_after(brevact.captured, Scaled(), Scaled.loss), expected)
    assert_equal(weights_after(lambda step: brevact.captured(step, warm_up=2), Scaled(), Scaled.loss), expected)
    assert device.graphs == 2


@pytest.mark.parametrize("is_own", [False, True])
def test_buffers_that_are_replaced_are_not_those_of_a_graph(device, is_own):
    expected = weights_after(lambda step: step, Rebinding(is_own), of_call)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert_equal(weights_after(brevact.captured, Rebinding(is_own), of_call), expected)
    if is_own:  # else a free address may serve again, and few kinds need no warning
        assert any("buffers of modules" in str(each.message) for each in found)


def test_quantizers_that_count_calls_are_captured_behind_them(device):
    def model() -> nn.Module:
        act = qnn.QuantReLU(act_quant=Int8ActPerTensorFloat.let(collect_stats_steps=6))
        return nn.Sequential(network(), act, nn.Linear(3, 3))

    expected = weights_after(lambda step: step, model(), of_call)
    with pytest.warns(RuntimeWarning, match=r"Scaling\.counter, a number of a module, changes") as found:
        assert_equal(weights_after(brevact.captured, model(), of_call), expected)
    assert device.graphs == 1 and len([each for each in found if "captured" in str(each.message)]) == 1


def test_an_error_behind_the_forward_pass_of_the_first_call_leaves_gradients_known(device):
    def make() -> Callable[..., Tensor]:
        calls = iter(range(100))

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            found = of_call(model, x, y)
            if next(calls) == 0:
                raise ValueError("mine")
            return found

        return loss

    expected = weights_after(lambda step: step, network(), make())
    assert_equal(weights_after(brevact.captured, network(), make()), expected)
    assert device.graphs == 1


@pytest.mark.parametrize("at", range(6))
def test_an_error_of_the_step_is_raised_as_it_is(device, at):
    plain, ours = Training("zero backward update"), Training("zero backward update")
    runs, error = [], ValueError("mine")

    def failing(x: Tensor, y: Tensor) -> Any:
        runs.append(x)
        if at <= len(runs) - 1 < at + 2:  # at the capture it runs twice
            raise error
        return ours.step(x, y)

    step = brevact.captured(failing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches():
            try:
                step(*batch)
            except ValueError as found:
                assert found is error
                continue
            plain.step(*batch)
            assert_equal(ours.values(), plain.values())
    assert device.graphs <= 2


def test_a_generator_of_ones_own_is_registered(device):
    generator, model = torch.Generator().manual_seed(3), network()
    step = brevact.captured(
        lambda x: model(x + torch.randn(16, 6, generator=generator)).detach(), generators=[generator]
    )
    x = batches(1)[0][0]
    found = [step(x) for _ in range(7)]
    assert len({tuple(each.flatten().tolist()) for each in found}) == len(found)
    assert device.registered == [generator]


def test_floats_that_compare_unlike_their_bits_are_constants_of_a_graph(device):
    step = brevact.captured(lambda x, number: x.new_full((), number))
    found = [step(torch.ones(3), number) for number in (0.0, -0.0, float("nan")) for _ in range(5)]
    assert_equal(
        torch.stack(found).reciprocal().nan_to_num(0, 1, -1), torch.tensor([1.0, -1.0, 0.0]).repeat_interleave(5)
    )
    assert device.graphs == 3


def test_captured_decorates_methods(device):
    class Trainer(Training):
        step = brevact.captured(Training.step)

    plain, ours = Training("zero backward update"), Trainer("zero backward update")
    for batch in batches():
        plain.step(*batch), ours.step(*batch)
        assert_equal(ours.values(), plain.values())
    assert device.graphs == 1 and ours.step.__name__ == "step"


def test_captured_is_the_function_itself_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    step = Training("backward").step
    assert brevact.captured(step) is step


@pytest.mark.parametrize("wrong, words", [({"step": 3}, "step: got 3"), ({"generators": [3]}, "generators: got 3")])
def test_captured_names_a_wrong_argument(wrong, words):
    with pytest.raises(TypeError, match=words):
        brevact.captured(**{"step": print, **wrong})


def test_make_graphed_callables_takes_a_model_with_a_policy_inside_of_another_module(device):
    plain, ours = (brevact.quantize_backward(network(), brevact.NearestBackward4bit.let(min_numel=0)) for _ in range(2))
    with pytest.raises(AssertionError, match="hooks"):
        torch.cuda.make_graphed_callables(ours, (batches(1)[0][0],))
    ours.load_state_dict(plain.state_dict())
    graphed = torch.cuda.make_graphed_callables(nn.Sequential(ours), (batches(1)[0][0],), allow_unused_input=True)
    plain.load_state_dict(ours.state_dict())
    for x, y in batches():
        for model in (plain, graphed):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
        assert_equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
