"""`memory_report`: measured bytes, each storage once, and a model that stays as it was."""

from __future__ import annotations

import copy
import csv
import gc
import threading
from typing import Any

import brevitas.nn as qnn
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import brevact
from brevact import NearestBackward2bit, StochBackward2bit
from brevact.autograd.region.module_hooks import regions_of
from brevact.autograd.saving import storage_report, storages
from brevact.reports.memory import LayerMemory, MemoryReport
from tests.autograd.measuring import watch_saved


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(x) * scale


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Dropout(0.5), nn.Flatten()
    )


def test_totals_are_the_distinct_storages_that_autograd_keeps():
    model, x = network(), torch.randn(8, 3, 16, 16)
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    report_plain = brevact.memory_report(model, x)
    brevact.quantize_backward(model, StochBackward2bit)
    report = brevact.memory_report(model, x)
    for expected in (report.saved_bytes, report.plain_bytes):
        with watch_saved() as saved:
            model(x)
        saved.tensors = [t for t in saved.tensors if t.untyped_storage().data_ptr() not in weights]
        assert saved.nbytes == expected
        if expected == report.saved_bytes:
            brevact.restore_backward(model)
    assert report_plain.plain_bytes == report.plain_bytes
    assert report.ratio == report.plain_bytes / report.saved_bytes > 8


def test_saved_bytes_are_the_sum_of_nbytes():
    model, x = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False)), torch.randn(8, 3, 16, 16)
    brevact.quantize_backward(model, NearestBackward2bit)
    assert brevact.memory_report(model, x).saved_bytes == brevact.quantizer(NearestBackward2bit).quantize(x).nbytes


def test_a_model_without_a_quantizer_is_measured_with_the_default():
    model, x = network(), torch.randn(8, 3, 16, 16)
    report = brevact.memory_report(model, x)
    assert not any(regions_of(module) for module in model.modules())
    expected = brevact.memory_report(brevact.quantize_backward(copy.deepcopy(model)), x)
    assert (report.rows, report.ops, expected.note) == (expected.rows, expected.ops, "")
    assert "no backward quantizer" in report.note and report.note in str(report)
    exact = brevact.memory_report(brevact.quantize_backward(copy.deepcopy(model), {"*": None}), x)
    assert exact.saved_bytes == exact.plain_bytes == report.plain_bytes > 4 * report.saved_bytes and not exact.note


def test_a_model_without_memory_has_the_bytes_of_one_that_has():
    for make, x in (
        (network, torch.randn(8, 3, 16, 16)),
        (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(4, 32, 64)),
    ):
        expected = brevact.memory_report(make(), x)
        for loss in (None, lambda model, batch: model(batch).sum()):
            report = brevact.memory_report(make().to("meta"), x.to("meta"), loss)
            assert (report.plain_bytes, report.saved_bytes) == (expected.plain_bytes, expected.saved_bytes)


def test_a_region_in_a_models_own_code_is_measured_as_it_is():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            with brevact.backward_quant(StochBackward2bit):
                x = self.first(x).exp()
            return self.last(x)

    report = brevact.memory_report(Model(), torch.randn(64, 64))
    assert {row.how for row in report.ops if row.layer == "last"} == {"full precision"} and not report.note


def test_a_model_that_the_default_does_not_serve_is_measured_as_it_is():
    class Penalized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            out = super().forward(x).exp()
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return out.sum() + grad.square().sum()

    for model, message in (
        (torch.jit.script(nn.Linear(64, 64)), "takes no forward hooks"),
        (Penalized(64, 64), "double backward"),
    ):
        report = brevact.memory_report(model, torch.randn(64, 64))
        assert report.saved_bytes == report.plain_bytes > 0
        assert message in report.note and report.note in str(report)


def test_a_shared_storage_counts_once():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    model, x = Model(), torch.randn(64, 64)
    report = brevact.memory_report(model, x)
    assert report.plain_bytes == x.nbytes and [row.layer for row in report.rows] == ["a"]
    brevact.quantize_backward(model, StochBackward2bit)
    report = brevact.memory_report(model, x)
    assert report.saved_bytes == brevact.quantizer(StochBackward2bit).quantize(x).nbytes


def test_a_report_leaves_nothing_that_later_steps_would_share():
    """Not even until garbage is collected: each step draws noise of its own."""
    model, x = brevact.quantize_backward(nn.Linear(64, 64), StochBackward2bit), torch.randn(64, 64)
    gc.disable()
    try:
        brevact.memory_report(model, x)
        grads = [torch.autograd.grad(model(x).sum(), model.weight)[0] for _ in range(2)]
    finally:
        gc.enable()
    assert not torch.equal(*grads)


@pytest.mark.parametrize(
    "batch", [lambda x: x, lambda x: (x, 2.0), lambda x: [x, 2.0], lambda x: {"x": x, "scale": 2.0}]
)
def test_batches_are_tensors_arguments_or_keywords(batch):
    assert brevact.memory_report(TwoInputs(), batch(torch.randn(64, 64))).plain_bytes == 64 * 64 * 4


def test_report_prints_writes_and_draws(tmp_path):
    rows = tuple(LayerMemory(f"layer{i}", "Conv2d", 2**20 * (i + 1), 2**16 * (i + 1)) for i in range(60))
    report = MemoryReport(rows)
    text = str(report)
    assert text.count("\n") == 60 + 3 and "layer0   Conv2d     1.000 MiB    0.062 MiB   16.0" in text
    assert text.splitlines()[-1].split() == ["total", "1830.000", "MiB", "114.375", "MiB", "16.0"]
    report.to_csv(tmp_path / "memory.csv")
    with open(tmp_path / "memory.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert sum(int(row["saved_bytes"]) for row in read) == report.saved_bytes and len(read) == 60
    report.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"
    assert MemoryReport(()).ratio == float("inf") and str(MemoryReport(()))


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(self.norm(self.linear(x).relu()), 2, 1, 1)[..., :64]
        return self.head(x.cumprod(1)[:, -1:] * x[:, :1].sqrt())


def test_ops_say_how_each_tensor_is_stored_and_why():
    model = brevact.quantize_backward(Ways(), {"head": None, "*": StochBackward2bit})
    x = torch.rand(4, 128, 64)
    report = brevact.memory_report(model, x)
    found = {(row.layer, row.op, row.how, row.why) for row in report.ops}
    assert found == {
        ("linear", "linear", "packed", ""),
        ("", "relu", "mask", ""),
        ("norm", "layer_norm", "packed", ""),
        ("norm", "layer_norm", "exact", storage_report.NEEDED),
        ("", "max_pool1d", "exact", storage_report.NEEDED),
        ("", "cumprod", "exact", storage_report.NOT_NOISE),
        ("", "sqrt", "exact", storage_report.NOT_NOISE),
        ("", "mul", "full precision", storage_report.SMALL),
        ("head", "linear", "full precision", storage_report.NO_QUANTIZER),
    }
    assert sum(row.saved_bytes for row in report.ops) == report.saved_bytes
    packed = next(row for row in report.ops if row.how == "packed")
    assert (packed.tensor_bytes, packed.saved_bytes) == (
        x.nbytes,
        brevact.quantizer(StochBackward2bit).quantize(x).nbytes,
    )
    for row in report.ops:
        assert row.op in str(report) and row.how in str(report) and row.why in str(report)
        assert row.layer in report.explain()


IMAGES = torch.zeros(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (network(), (IMAGES, torch.zeros(2).long()), r"too many positional.*pass the inputs alone: .*batch\[0\]"),
        (network(), [IMAGES, torch.zeros(2).long()], r"Sequential\.forward\(input\).* A list holds"),
        (TwoInputs(), {"y": torch.zeros(2)}, r"\{'y': <float32 Tensor of shape \(2,\)>\} does not fit TwoInputs\.forw"),
        (TwoInputs(), (), r"missing a required argument: 'x'"),
        (TwoInputs(), DataLoader(TensorDataset(torch.zeros(8, 64))), r"DataLoader; .*inputs, targets = next\(iter\(lo"),
        (TwoInputs(), iter([torch.zeros(2, 64)]), r"list_iterator; .*inputs, targets = next\(iter\(loader\)\)"),
        (TwoInputs(), TensorDataset(torch.zeros(8, 64)), "of type TensorDataset; accepted"),
        (TwoInputs(), None, "got None of type NoneType; accepted"),
        (TwoInputs(), "text", r"got 'text' of type str; accepted is what the model is called with"),
        (TwoInputs(), 3, r"got 3 of type int"),
        (TwoInputs(), float("nan"), r"got nan of type float"),
        (TwoInputs(), True, r"got True of type bool"),
        (TwoInputs(), network(), r"got <Sequential module> of type Sequential"),
        (torch.zeros(2, 64), TwoInputs(), r"model: got <float32 Tensor.*swapped: write memory_report\(model, batch\)"),
        (TwoInputs, torch.zeros(2, 64), r"model: got <class TwoInputs>.*make one of this class first: TwoInputs\("),
        (None, torch.zeros(2, 64), r"model: got None of type NoneType; accepted is a torch\.nn\.Module"),
    ],
)
def test_what_is_no_batch_of_the_model_is_refused(model, batch, message):
    with pytest.raises(TypeError, match=message):
        brevact.memory_report(model, batch)


def test_a_tuple_that_is_one_argument_stays_one():
    packed = nn.utils.rnn.pack_sequence([torch.randn(5, 16), torch.randn(3, 16)])
    assert brevact.memory_report(nn.LSTM(16, 16), packed).plain_bytes > 0
    quantized = qnn.QuantIdentity(return_quant_tensor=True)(torch.randn(8, 64))
    assert isinstance(quantized, tuple)
    assert brevact.memory_report(qnn.QuantLinear(64, 64), quantized).plain_bytes > 0


def test_a_slice_of_a_larger_tensor_counts_its_own_bytes():
    data, size = torch.randn(1000, 64), 10 * 64 * 4
    for batch in (data[:10].clone(), data[:10], (data[:10],), {"x": data[:10]}, [data[5:25:2]]):
        assert brevact.memory_report(TwoInputs(), batch).plain_bytes == size
    assert brevact.memory_report(TwoInputs(), torch.randn(10, 100)[:, :64]).plain_bytes == size
    assert brevact.memory_report(TwoInputs(), torch.randn(1, 64).expand(10, 64)).plain_bytes == 64 * 4  # one row
    model = brevact.quantize_backward(TwoInputs(), StochBackward2bit)  # too few elements: stored as they are
    assert brevact.memory_report(model, data[:10]).saved_bytes == size


def test_one_slice_that_is_passed_twice_counts_once():
    class Both(TwoInputs):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x) + self.layer(y)

    half = torch.randn(20, 64)[:10]
    assert brevact.memory_report(Both(), (half, half)).plain_bytes == 10 * 64 * 4


def test_a_row_without_plain_bytes_says_why():
    model = brevact.quantize_backward(network(), StochBackward2bit, derive_min_bits=0)
    report = brevact.memory_report(model, torch.randn(8, 3, 32, 32))
    notes = {row.layer: row.note for row in report.rows}
    assert notes == {"0": "", "1": "", "2": "", "3": "plain stores the tensor of 2, which counts there", "4": ""}
    assert [row.layer for row in report.rows if row.plain_bytes == 0] == ["3"]
    (line,) = [line for line in str(report).splitlines() if line.startswith("3 ")]
    assert line.endswith("plain stores the tensor of 2, which counts there")


def test_a_row_that_stores_nothing_says_what_derives_it():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 1))
    report = brevact.memory_report(brevact.quantize_backward(model), torch.randn(8, 3, 32, 32))
    rows = {row.layer: row for row in report.rows}
    assert [rows[name].saved_bytes for name in ("2", "3")] == [0, 0] and rows["1"].saved_bytes > 0
    assert rows["2"].note == rows["3"].note == "derived from 1"
    assert {(op.layer, op.how, op.why) for op in report.ops if op.op == "conv2d" and op.layer == "3"} == {
        ("3", "derived", "derived from 1")
    }
    assert "derived from 1" in str(report) and "derived from 1" in report.explain()
    assert report.saved_bytes == sum(op.saved_bytes for op in report.ops)


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


@pytest.mark.parametrize(
    "model",
    [
        network().requires_grad_(False),
        nn.Sequential(Shift(), Detach()),
        nn.ReLU(),
        nn.Sequential(Shift(), nn.Flatten()),
    ],
)
def test_a_model_that_stores_nothing_says_so(model, tmp_path):
    report = brevact.memory_report(brevact.quantize_backward(model, StochBackward2bit), torch.randn(8, 3, 32, 32))
    assert (report.saved_bytes, report.plain_bytes, report.rows) == (0, 0, ())
    assert report.note.startswith("Nothing is stored for backward: ") and report.note in str(report)
    report.to_csv(tmp_path / "memory.csv")
    report.plot(tmp_path / "memory.png")


def test_memory_report_takes_models_with_sparse_buffers():
    class Propagated(nn.Linear):
        def __init__(self) -> None:
            super().__init__(64, 64)
            self.register_buffer("adjacency", torch.eye(128).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.adjacency, super().forward(x))

    model = brevact.quantize_backward(Propagated(), StochBackward2bit)
    report = brevact.memory_report(model, torch.randn(128, 64))
    packed = brevact.quantizer(StochBackward2bit).quantize(torch.randn(128, 64))
    assert report.plain_bytes == 4 * 128 * 64 and report.saved_bytes == packed.nbytes


def test_memory_report_ignores_modules_of_other_threads():
    other, has_begun, may_end = nn.Identity(), threading.Event(), threading.Event()
    other.register_forward_pre_hook(lambda module, args: has_begun.set() or (may_end.wait(60) and None))
    threads = []

    def begin(module: nn.Module, args: Any) -> None:
        has_begun.clear()
        may_end.clear()
        threads.append(threading.Thread(target=other, args=(0,)))
        threads[-1].start()
        has_begun.wait(60)

    def end(module: nn.Module, args: Any) -> None:
        may_end.set()
        threads[-1].join()

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].register_forward_pre_hook(begin)
    model[1].register_forward_pre_hook(end)
    report = brevact.memory_report(model, torch.randn(128, 64))
    assert [row.layer for row in report.ops] == ["0", "1"]


def test_a_step_is_measured_with_its_loss_in_the_region_of_the_model():
    model, x, labels = nn.Linear(64, 512), torch.randn(64, 64), torch.randint(512, (64,))
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    brevact.quantize_backward(model, StochBackward2bit)
    alone, step = brevact.memory_report(model, x), brevact.memory_report(model, (x, labels), loss)
    # The loss keeps the probabilities of its logits; in the region of the model they are packed.
    logits = x.shape[0] * 512
    assert step.plain_bytes >= alone.plain_bytes + 4 * logits
    assert step.saved_bytes < alone.saved_bytes + logits
    with watch_saved() as saved, brevact.backward_quant(model):
        loss(model, (x, labels))
    places = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved.tensors}
    weights = {x.untyped_storage().data_ptr() for x in model.parameters()}
    assert step.saved_bytes == sum(size for place, size in places.items() if place not in weights)
    assert "The loss is not in this" in str(alone) and "The loss" not in str(step)


def convolutions():
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.GELU(), nn.Conv2d(16, 16, 3), nn.GELU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def test_a_model_without_a_policy_has_would_in_its_numbers_names(tmp_path):
    model, x = TwoInputs(), torch.randn(64, 64)
    report = brevact.memory_report(model, x)
    assert report.would_save and "would store" in str(report)
    report.to_csv(tmp_path / "memory.csv")
    assert "would_save_bytes" in (tmp_path / "memory.csv").read_text()
    report = brevact.memory_report(brevact.quantize_backward(model), x)
    assert not report.would_save and "would" not in str(report)


class KeepsOnContext(torch.autograd.Function):
    """Squares, as libraries do that hold their tensors as attributes; or saves the tensor, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saves: bool) -> Tensor:
        ctx.tensors = [x, x.view(-1)]
        if saves:
            ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * ctx.tensors[0] * grad, None


class Squares(nn.Module):
    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.saves = saves

    def forward(self, x: Tensor) -> Tensor:
        return KeepsOnContext.apply(x, self.saves)


@pytest.mark.parametrize("saves", [False, True])
def test_a_tensor_that_a_function_holds_on_its_context_counts_once_and_is_named(saves):
    model = nn.Sequential(nn.Linear(64, 64), Squares(saves), nn.GELU(), nn.Linear(64, 64))
    report = brevact.memory_report(brevact.quantize_backward(model), torch.randn(64, 64))
    row = next(row for row in report.rows if row.layer == "1")
    assert row.plain_bytes == row.saved_bytes == 64 * 64 * 4
    found = [op for op in report.ops if op.why == storage_report.ON_CONTEXT]
    if saves:
        assert not found  # the hooks have seen it
    else:
        assert [(op.layer, op.op, op.saved_bytes) for op in found] == [("1", "KeepsOnContext", 64 * 64 * 4)]
        assert "KeepsOnContext" in report.explain() and "no hook sees" in str(report)


def test_a_model_without_a_policy_is_measured_under_the_default_beside_tensors_on_a_context():
    def report(model: nn.Module) -> brevact.MemoryReport:
        return brevact.memory_report(model, torch.randn(64, 64))

    model = nn.Sequential(nn.Linear(64, 64), Squares(False), nn.Linear(64, 64))
    found, expected = report(model), report(brevact.quantize_backward(model))
    assert found.saved_bytes == expected.saved_bytes < found.plain_bytes and found.note


def test_sparse_tensors_on_a_context_count_their_indices_and_values():
    class Adjacent(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.adjacency = torch.eye(64).to_sparse()
            return ctx.adjacency @ x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return ctx.adjacency.mT @ grad

    class Graph(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Adjacent.apply(super().forward(x))

    assert brevact.memory_report(Graph(64, 64), torch.randn(64, 64)).plain_bytes == 64 * 64 * 4 + 64 * (2 * 8 + 4)


def test_weights_on_a_context_do_not_count():
    class OfWeight(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return KeepsOnContext.apply(self.weight, False) @ x.mT

    report = brevact.memory_report(OfWeight(64, 64), torch.randn(64, 64))
    assert all(op.why != storage_report.ON_CONTEXT for op in report.ops)


class SparseProduct(torch.autograd.Function):
    """A graph layer as libraries write it: its sparse matrix is saved beside the features."""

    @staticmethod
    def forward(ctx, matrix: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(matrix, x)
        return torch.sparse.mm(matrix, x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        matrix, _ = ctx.saved_tensors
        return None, torch.sparse.mm(matrix.t(), grad)


class GraphLayer(nn.Module):
    def __init__(self, matrix: Tensor, *, is_buffer: bool) -> None:
        super().__init__()
        self.matrix = matrix
        if is_buffer:
            del self.matrix
            self.register_buffer("matrix", matrix)
        self.layer = nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        return SparseProduct.apply(self.matrix, SparseProduct.apply(self.matrix, self.layer(x)))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_count_their_indices_and_values_once(layout: torch.layout, is_buffer: bool):
    matrix, x = (torch.rand(128, 128) > 0.9).float().to_sparse(layout=layout), torch.randn(128, 16)
    parts = storages.parts_of(matrix)
    assert len(parts) == (2 if layout is torch.sparse_coo else 3)
    model = GraphLayer(matrix, is_buffer=is_buffer)
    features = x.nbytes + 2 * 128 * 64 * 4
    report = brevact.memory_report(model, x)
    of_matrix = 0 if is_buffer else sum(part.untyped_storage().nbytes() for part in parts)
    assert report.plain_bytes == features + of_matrix
    brevact.quantize_backward(model, StochBackward2bit, min_numel=0)
    assert brevact.memory_report(model, x).plain_bytes == report.plain_bytes
