"""`brevact.compile`: a policy and a budget in one call, and reports of compiled models."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import brevact
from brevact.compiler import graphs
from brevact.injectors import backward_settings_from
from brevact.policy.attach import attachment_of
from brevact.reports.step import StepLoss
from tests.autograd.measuring import kept_bytes, watch_saved
from tests.crosses import some_of

X = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
MIB = 2**20
#: Lossy policies let other compilers than Inductor decompose ops as Inductor does.
DECOMPOSED = "aot_eager_decomp_partition"


def perceptron(blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.Tanh()) for _ in range(blocks))
    return nn.Sequential(*parts)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def kept(run, model: nn.Module | None = None) -> tuple[int, Tensor]:
    """Bytes from forward to backward beside input and weights, and the input's gradient."""
    x, held = X.clone().requires_grad_(), []
    others = {p.untyped_storage().data_ptr() for p in (x, *(model or run).parameters())}
    with watch_saved() as saved:
        held.append(run(x))
    saved.tensors = [each for each in saved.tensors if each.untyped_storage().data_ptr() not in others]
    (gradient,) = torch.autograd.grad(held[0], x, torch.ones_like(held[0]))
    return saved.nbytes, gradient


def compiled(source, **options):
    return brevact.compile(source, backend="aot_eager", fullgraph=True, **options)


def test_a_model_keeps_a_policy_that_it_has():
    model = brevact.quantize_backward(perceptron(), brevact.NearestBackward8bit)
    compiled(model)
    assert "NearestBackward8bit" in str(brevact.backward_policy(model))
    with pytest.raises(ValueError, match="already has a backward policy"):
        compiled(model, policy=brevact.StochBackward2bit)


def test_functions_and_models_keep_codes():
    plain, _ = kept(torch.compile(perceptron(), backend="aot_eager"))
    model = perceptron()
    of_function, _ = kept(compiled(lambda x: model(x), policy=brevact.StochBackward4bit), model)
    of_model, _ = kept(compiled(perceptron(), policy=brevact.StochBackward4bit))
    assert of_function == of_model < plain / 6


def test_models_of_one_class_have_graphs_of_their_own():
    plain, model = perceptron(), perceptron()
    run = torch.compile(model, backend="aot_eager")
    sizes = [kept(torch.compile(plain, backend="aot_eager"))[0], kept(run)[0]]
    brevact.quantize_backward(model, brevact.StochBackward4bit)
    sizes.append(kept(run)[0])
    brevact.restore_backward(model)
    sizes.append(kept(run)[0])
    assert sizes[0] == sizes[1] == sizes[3] > 6 * sizes[2]


def test_blocks_that_are_compiled_alone_share_graphs():
    model = brevact.quantize_backward(perceptron(12), brevact.StochBackward4bit)
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)  # which raises after 8 graphs of a function
    torch._dynamo.utils.counters.clear()
    kept(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("backend", some_of(["aot_eager", "inductor"], quick=2))
def test_blocks_within_a_budget_share_graphs(backend):
    model = nn.Sequential(*(brevact.compile(block, budget=0.5, backend=backend) for block in perceptron(12)))
    torch._dynamo.utils.counters.clear()
    kept(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.exhaustive
def test_inductor_draws_dropout_again_in_backward():
    x = X.clone().requires_grad_()
    with watch_saved() as saved:
        y = brevact.compile(lambda x: F.dropout(2 * x, 0.2))(x)
    y.sum().backward()
    assert saved.nbytes < X.numel() / 8
    assert torch.equal(x.grad == 0, y == 0)


@pytest.mark.exhaustive
def test_inductor_packs_masks_by_bytes():
    """A mask of bool takes Inductor's kernels on a CPU ten times as long as one that is cast to bytes by floats."""
    weight, found = torch.randn(128, 512, requires_grad=True), []
    for policy in (brevact.StochBackward4bit, None):
        step = torch.compile(loss) if policy is None else brevact.compile(loss, policy)
        with watch_saved() as saved:
            y = step(X, weight)
        found.append((torch.autograd.grad(y, weight)[0], saved.nbytes))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] <= found[1][1] - 512 * 512 * (1 - 2 / 8)


@pytest.mark.exhaustive
def test_inductor_saves_weights_and_images_without_copies():
    model, x = nn.Conv2d(8, 64, 3), torch.randn(4, 8, 16, 16, requires_grad=True)
    inputs = x, model.weight
    expected = torch.autograd.grad(torch.compile(model)(x).square().sum(), inputs)
    with watch_saved() as saved:
        y = brevact.compile(model, brevact.StochBackward4bit)(x)
    assert {each.data_ptr() for each in inputs} == {each.data_ptr() for each in saved.tensors}
    assert all(map(torch.equal, torch.autograd.grad(y.square().sum(), inputs), expected))


def loss(x: Tensor, weight: Tensor) -> Tensor:
    return F.hardtanh(x @ weight).sum()


def test_a_part_saves_less_and_computes_again():
    exact = kept(perceptron())[1]
    parts = 1.0, 0.7, 0.4, 0.15
    found = [kept(compiled(perceptron(), policy=brevact.StochBackward8bit, budget=part)) for part in parts]
    sizes = [nbytes for nbytes, _ in found]
    assert sizes == sorted(sizes, reverse=True) and sizes[2] < sizes[0] / 1.5 and sizes[3] < sizes[1] / 2
    for _, gradient in found:  # 8 bits: each of some ten tensors has errors of at most 1 / 255 of its range
        assert float((gradient - exact).norm() / exact.norm()) < 10 / 255


@functools.cache
def plain_bytes(blocks: int) -> int:
    return kept(torch.compile(perceptron(blocks), backend=DECOMPOSED))[0]


@pytest.mark.parametrize("budget", some_of(["10x", "0.3MiB", "15x", "30x", "100x"], quick=5))
def test_bytes_and_ratios_are_used(budget):
    """At 8 bits, the largest tensor of this model takes 1 to 23 % of these."""
    nbytes, _ = kept(compiled(perceptron(10), budget=budget))
    limit = plain_bytes(10) / float(budget[:-1]) if budget.endswith("x") else float(budget[:-3]) * MIB
    assert 0.85 * limit <= nbytes <= limit


OTHERS = {
    "normalized": brevact.L4Backward,
    "16 bits": brevact.StochBackward8bit.let(bit_width=16),
    "Weibull": brevact.WeibullBackward3bit,
}


@pytest.mark.parametrize("name", some_of(OTHERS, quick=3))
def test_formats_and_bits_within_a_budget(name):
    """Bits above 8 are lowered where computing layers again does not suffice; formats without 8 bits become uniform."""
    policy = OTHERS[name]
    assert kept(compiled(perceptron(), policy=policy, budget="60x"))[0] <= plain_bytes(3) / 60


@pytest.mark.parametrize(
    "source", some_of([brevact.StochBackward8bit.let(bit_width=16), brevact.LosslessBackward], quick=2)
)
def test_budgets_do_not_draw_dropout_again(source):
    found = []
    for budget in (None, 0.3, 0, "20x" if source is not brevact.LosslessBackward else 0.05):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Dropout(0.2), nn.Linear(512, 128)) for _ in range(2))
        found.append(kept(compiled(nn.Sequential(*layers), policy=source, budget=budget))[1])
    for gradient in found[1:]:  # masks drawn again have an error of 0.5
        assert float((gradient - found[0]).norm() / found[0].norm()) < 1e-3


def test_bytes_have_less_noise_than_the_policys_bits_in_as_many():
    exact = kept(perceptron())[1]
    nbytes, naive = kept(compiled(perceptron(), policy=brevact.StochBackward4bit))
    torch._dynamo.reset()
    found, chosen = kept(compiled(perceptron(), policy=brevact.StochBackward4bit, budget=f"{nbytes / MIB:.3f}MiB"))
    assert found <= 1.001 * nbytes
    assert float((chosen - exact).norm()) < float((naive - exact).norm()) / 4  # by two bits at least


def test_memory_report_names_layers_that_a_budget_computes_again():
    report = brevact.memory_report(compiled(perceptron(), budget=0.3), X)
    again = [row for row in report.ops if row.why == "recomputed"]
    assert again and all(row.how == "derived" and row.tensor_bytes and not row.saved_bytes for row in again)
    assert {row.layer for row in again} <= {f"{block}.{layer}" for block in range(3) for layer in (0, 2)}


@pytest.mark.parametrize(
    "budget", [-0.1, 1.5, True, "fast", "noise=0.1", [1], "0x", "512 MiB", "20x time=1.2", "20x 1MiB"]
)
def test_a_wrong_budget_is_named(budget):
    with pytest.raises(ValueError, match=r"budget=.* accepted"):
        brevact.compile(perceptron(), budget=budget)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="function: got 3"):
        brevact.compile(3)
    with pytest.raises(ValueError, match='backend="eager" has no partitioner'):
        brevact.compile(perceptron(), backend="eager")


@pytest.mark.parametrize("option", ["other", "backend", "mode", "policy"])
def test_wrong_options_leave_a_model_without_a_policy(option):
    model = perceptron(1)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"unknown|other"):
        brevact.compile(model, **{option: "unknown"})
    assert attachment_of(model) is None


def test_backends_without_a_partitioner_are_refused():
    model = brevact.quantize_backward(perceptron(1))
    for backend in ("eager", "eager_noexcept", lambda graph, inputs: graph.forward):
        with pytest.raises(Exception, match=r"no partitioner.*restore_backward"):
            torch.compile(model, backend=backend)(X)
    with torch.no_grad():  # which packs nothing
        torch.compile(model, backend="eager")(X)
    assert torch._dynamo.explain(model)(X).graph_count == 1


def test_parts_of_a_graph_pack_what_they_hand_on():
    """DDP compiles a graph in parts, whose inputs and results are activations."""
    model = brevact.quantize_backward(perceptron(4), brevact.StochBackward4bit)
    whole, _ = kept(torch.compile(model, backend="aot_eager"), model)
    torch._dynamo.reset()
    parts, _ = kept(torch.compile(model, backend=DDPOptimizer(300_000, aot_eager, 300_000).compile_fn), model)
    assert whole < parts < whole + 3 * X.nbytes / 6


@pytest.mark.parametrize("layer", [nn.GELU(), nn.Linear(128, 128)])
def test_budgets_of_blocks_count_the_activations_that_they_read(layer):
    def nbytes(budget: str) -> int:
        x = X.clone().requires_grad_() * 1
        with watch_saved() as saved:
            compiled(layer, budget=budget)(x)
        torch._dynamo.reset()
        return sum(each.nbytes for each in saved.tensors if each.dtype is torch.uint8)

    assert 0 < nbytes("1x") <= X.nbytes / 3.5
    assert 0 < nbytes("8x") <= X.nbytes / 8
    with pytest.raises(Exception, match=r"a graph saves .* bytes at least"):
        nbytes("1KiB")


@pytest.mark.exhaustive
def test_reports_of_graphs_from_a_cache_are_those_of_graphs():
    def report() -> brevact.MemoryReport:
        torch._dynamo.reset()
        model = brevact.compile(perceptron(1), brevact.StochBackward4bit, dynamic=True)
        model(X).sum().backward()  # which puts the graphs into the cache
        return brevact.memory_report(model, X[:256].clone())

    with fresh_cache():
        first, second = report(), report()
    assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    assert first.ops == second.ops and "aten.addmm" in {row.op for row in second.ops}


def test_memory_report_has_a_row_for_each_saved_tensor():
    model = compiled(perceptron(1), policy=brevact.StochBackward4bit)
    report = brevact.memory_report(model, X)
    assert {row.layer for row in report.rows} <= {"", "0", "0.0", "0.1", "0.2", "0.3"}
    assert {(row.how, row.bit_width) for row in report.ops if row.saved_bytes < row.tensor_bytes} == {("packed", 4)}
    nbytes, _ = kept(model)
    assert report.saved_bytes == nbytes + X.nbytes
    assert "packed" in report.explain()


def test_memory_report_of_a_compiled_model_without_a_policy_compiles_the_default():
    report = brevact.memory_report(torch.compile(perceptron(), backend="aot_eager"), X)
    expected = brevact.memory_report(compiled(perceptron()), X)
    assert report.would_save and (report.rows, report.ops) == (expected.rows, expected.ops)


class Blocks(nn.Module):
    """Blocks that pass an activation on to eager code and to each other, with norms, dropout and a graph break."""

    def __init__(self, wrap: Callable[[nn.Module], Any], *, breaks: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(wrap(Residual(breaks)) for _ in range(2))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x).tanh())
        return x


class Residual(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.norm, self.layers, self.breaks = nn.LayerNorm(128), perceptron(1)[0], breaks
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.drop(self.layers(x * x.sigmoid()))


def in_place(block: nn.Module) -> nn.Module:
    block.compile(backend="aot_eager")
    return block


def eager(block: nn.Module) -> nn.Module:
    return block


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x)) % 128)


compiles = functools.partial(torch.compile, backend="aot_eager")
compiled_loss, cross_entropy = compiles(loss_of), compiles(F.cross_entropy)
PARTS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "in place": (lambda: Blocks(in_place), loss_of),
    "wrapped": (lambda: Blocks(compiles), loss_of),
    "broken": (lambda: Blocks(in_place, breaks=True), loss_of),
    "in checkpoints": (lambda: Blocks(in_place, checkpoints=True), loss_of),
    "whole": (lambda: compiles(Blocks(eager, breaks=True)), loss_of),
    "of other sizes": (lambda: Blocks(functools.partial(compiles, dynamic=True)), loss_of),
    "loss": (lambda: Blocks(eager), compiled_loss),
    "loss in a loss": (lambda: Blocks(eager), lambda model, x: compiled_loss(model, x) * 2),
    "pure loss": (lambda: Blocks(in_place), lambda model, x: cross_entropy(model(x), x.argmax(1))),
}


@pytest.mark.parametrize("name", some_of(PARTS, quick={"in place", "in checkpoints", "of other sizes"}))
def test_reports_of_models_with_compiled_parts_have_what_is_kept(name):
    make, loss = PARTS[name]
    model, x = brevact.quantize_backward(make(), brevact.StochBackward4bit), X[:200].clone()
    loss(model, X).backward()
    found = brevact.memory_report(model, x, loss)
    assert found.saved_bytes == kept_bytes(model, lambda: StepLoss(loss)(model, x))
    plain = Blocks(eager, checkpoints=name == "in checkpoints")
    assert found.plain_bytes == kept_bytes(plain, lambda: loss_of(plain, x))
    assert plain.checkpoints or "blocks.1.layers.0" in {row.layer.replace("_orig_mod.", "") for row in found.rows}


@pytest.mark.parametrize("name", some_of(["in place", "loss in a loss", "loss"], quick=3))
def test_plain_steps_of_models_with_compiled_parts_pack_nothing(name):
    make, loss = PARTS[name]
    model = brevact.quantize_backward(make(), brevact.NearestBackward2bit)
    report = brevact.gradient_report(model, [X[:256], X[256:]], loss, draws=2)
    assert report.noise < 1e-6 < report.bias and "compiled graphs" in str(report)
    step = brevact.step_report(model, X, loss, rounds=2)
    assert step.plain_peak > 1.2 * step.packed_peak


def test_step_report_and_gradient_report_take_compiled_models():
    model = compiled(perceptron(1), policy=brevact.StochBackward4bit)
    data = [(X[:256], torch.arange(256) % 128), (X[256:], torch.arange(256) % 100)]

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    assert brevact.step_report(model, data[0], loss).time_ratio > 0
    report = brevact.gradient_report(model, data, loss)
    tensors = brevact.memory_report(model, data[0], loss)
    packed = sum(row.saved_bytes for row in tensors.ops if row.how == "packed")
    assert sum(row.saved_bytes for row in report.rows) == packed < report.saved_bytes == tensors.saved_bytes
    assert report.noise > 0
    assert {row.layer for row in report.rows} <= {"", "0", "0.0", "0.1", "0.2", "0.3"}
    assert "compiled graphs" in str(report)


def test_the_key_of_caches_depends_on_policy_and_budget(monkeypatch):
    keys = set()
    for source in (brevact.StochBackward2bit, brevact.StochBackward4bit):
        monkeypatch.setattr(graphs._current, "texts", frozenset((backward_settings_from(source).text,)))
        keys |= {graphs.Partitioner(budget).uuid() for budget in (None, ("part", 0.5), ("ratio", 20.0))}
    assert len(keys) == 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("budget", [None, 0.4, "20x"])
def test_inductor_saves_as_other_compilers_do(budget):
    expected, _ = kept(compiled(perceptron(), budget=budget))
    torch._dynamo.reset()
    nbytes, gradient = kept(brevact.compile(perceptron(), budget=budget, fullgraph=True))
    exact = kept(perceptron())[1]
    assert nbytes <= 1.1 * expected  # Inductor's own passes change which views there are
    assert float((gradient - exact).norm() / exact.norm()) < 0.5


def test_full_collections_wait_for_the_end_of_a_compilation():
    before, found = gc.get_threshold(), []

    def backend(graph, inputs):
        found.append(gc.get_threshold())
        return graphs.lookup_backend("aot_eager")(graph, inputs)

    brevact.compile(perceptron(), backend=backend)(X)
    assert found == [(*before[:2], 1 << 30)] and gc.get_threshold() == before


def test_ops_that_only_other_devices_decompose_run_on_the_cpu():
    weight = torch.randn(256, 256, requires_grad=True)
    step = brevact.compile(lambda x: (x @ weight @ torch.eye(256)).square().mean(), backend="aot_eager")
    step(torch.randn(64, 256)).backward()
    assert weight.grad is not None
