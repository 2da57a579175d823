"""`python -m benchmarks.gpu`: every path with tiny sizes on the CPU, and on a GPU where there is one."""

import csv

import pytest
import torch

from benchmarks.gpu import kernels, report, steps
from benchmarks.gpu import tests as gpu_tests
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.timing import alternating_times
from benchmarks.gpu.training import Training
from benchmarks.gpu.workloads import SMOKE_WORKLOADS, WORKLOADS
from brevact.quantizers import UniformQuantizer


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


#: A process each; the other variants are trained in `test_training_variants_keep_less`.
SOME = (["resnet50"], ["plain", "DEFAULT-compiled"])
ALL = ([model for model in WORKLOADS if model != "resnet18-w4a4"], list(steps.VARIANTS))


@pytest.fixture(scope="module", params=[SOME, pytest.param(ALL, marks=pytest.mark.exhaustive)], ids=["some", "all"])
def smoke_cases(request):
    """Models and variants of a smoke run."""
    return request.param


@pytest.fixture(scope="module")
def smoke_results(smoke_cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    models, variants = smoke_cases
    assert main(["--smoke", "--models", *models, "--variants", *variants, "--out-dir", str(folder)]) == 0
    return folder


@pytest.mark.exhaustive
def test_main_smoke_measures_every_operation(smoke_results):
    rows = read(smoke_results / "gpu_kernels.csv")
    assert [row["operation"] for row in rows] == list(kernels.OPERATIONS)
    assert {(row["dtype"], row["bit_width"], row["error"]) for row in rows} == {("bfloat16", "2", "")}
    assert all(float(row["median_us"]) > 0 and float(row["copy_gb_s"]) > 0 for row in rows)
    assert [row["goal"] for row in rows] == ["0.85", "0.75", "0.85", "0.85"]


def test_main_smoke_measures_every_variant_of_every_model(smoke_results, smoke_cases):
    rows = read(smoke_results / "gpu_steps.csv")
    cases = {(f"{model} (tiny)", variant) for model in smoke_cases[0] for variant in smoke_cases[1]}
    assert {(row["model"], row["variant"]) for row in rows} == cases and len(rows) == len(cases)
    assert {row["error"] for row in rows} == {""}
    assert all(float(row["samples_s"]) > 0 for row in rows)
    for measured_on_cuda in ("activations_mib", "peak_mib", "reserved_mib", "tf32"):
        assert {row[measured_on_cuda] for row in rows} == {""}
    assert {row["backend"] for row in rows} == {"eager", "aot_eager"}
    assert {(row["torch"], row["threads"]) for row in rows} == {(torch.__version__, "1")}


def test_main_writes_rows_of_cases_that_fail(tmp_path, capsys):
    options = ["--smoke", "--parts", "kernels", "--numel", str(2**55), "--out-dir", str(tmp_path)]
    assert main(options) == 1
    rows = read(tmp_path / "gpu_kernels.csv")
    assert [row["operation"] for row in rows] == list(kernels.OPERATIONS)
    assert all("RuntimeError" in row["error"] and row["median_us"] == "" for row in rows)
    assert "kernels, bfloat16, 2 bits: RuntimeError" in capsys.readouterr().out


def test_main_needs_a_gpu_unless_it_is_a_smoke_run(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "needs a CUDA or ROCm device, and PyTorch finds none; --smoke" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--variants", "3bit"], "invalid choice: '3bit'"),
        (["--models", "resnet18"], "invalid choice: 'resnet18'"),
        (["--dtypes", "float64"], "invalid choice: 'float64'"),
        (["--bit-widths", "9"], "invalid choice: 9"),
        (["--numel", "0"], "got 0; accepted is at least 1"),
        (["--rounds", "1"], "got 1; accepted is at least 2"),
        (["--seconds", "-1"], "got -1.0; accepted is at least 0"),
        (["--device", "cpu"], "--device cpu: full sizes are for GPUs; add --smoke"),
    ],
)
def test_main_refuses_options(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_main_refuses_a_file_of_other_columns_before_it_measures(tmp_path, capsys):
    (tmp_path / "gpu_steps.csv").write_text("name,ms\na,1\n")
    with pytest.raises(SystemExit) as stopped:
        main(["--smoke", "--out-dir", str(tmp_path)])
    assert stopped.value.code == 2
    assert "has the columns name, ms" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operations_check_their_results_and_count_their_bytes(dtype):
    x = torch.randn(3 * 512, dtype=getattr(torch, dtype))
    operations = kernels.operations_of(x, bit_width=2)
    packed = 3 * (512 * 2 // 8 + 4 + 2)  # codes, a float32 minimum and a bfloat16 scale a bucket
    expected = (x.nbytes + packed, x.nbytes + packed + 8, packed + x.nbytes, packed + 2 * x.nbytes)
    assert tuple(operation.moved for operation in operations.values()) == expected
    for operation in operations.values():
        operation.check()


def test_check_refuses_other_results():
    x = torch.randn(1024)
    packed = UniformQuantizer(bit_width=2).quantize(x, seed=0)
    kernels.check(packed, packed.tensors)
    with pytest.raises(ValueError, match="differs from that of the plain-torch reference"):
        kernels.check(packed, UniformQuantizer(bit_width=2).quantize(x, seed=1).tensors)
    with pytest.raises(ValueError, match="differs"):
        kernels.check(x, (x[:512] + 1,))


def test_alternating_times_calls_in_turns():
    calls: list[str] = []
    times = alternating_times({name: lambda name=name: calls.append(name) for name in "abc"}, 3, torch.device("cpu"))
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"  # one more round warms up


@pytest.mark.parametrize("model", SMOKE_WORKLOADS)
def test_training_variants_keep_less(model):
    kept = {}
    for variant in ("plain", "checkpoint", "DEFAULT"):
        training = Training(
            SMOKE_WORKLOADS[model], steps.VARIANTS[variant], torch.float32, torch.device("cpu"), True, 16
        )
        training.step()
        kept[variant] = bytes_before_backward(training)
    assert kept["checkpoint"] < kept["plain"]
    assert kept["DEFAULT"] < kept["plain"] / 4


def bytes_before_backward(training):
    """Bytes of the distinct storages that autograd keeps when backward starts, without the weights'."""
    weights = {p.untyped_storage().data_ptr() for p in training.model.parameters()}
    kept: dict[int, int] = {}

    def see(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        alive.append(x)
        return x

    alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
        training._forward()
    return sum(size for address, size in kept.items() if address not in weights)


@pytest.mark.exhaustive
def test_everything_goes_on_where_it_stopped(tmp_path, capsys):
    options = ["--everything", "--smoke", "--models", "unet3d", "--variants", "plain", "DEFAULT", "--jobs", "2"]
    options += ["--parts", "kernels", "steps", "batches", "--out-dir", str(tmp_path)]
    assert main([*options, "--budget", "0"]) == 0
    assert "5 are left; the same command goes on" in capsys.readouterr().out
    assert main([*options, "--parts", "steps"]) == 0
    assert main([*options, "--budget", "1000"]) == 0
    printed = capsys.readouterr().out
    assert "2 cases on" in printed and "3 cases on" in printed and "nothing is left" in printed
    assert [row["variant"] for row in read(tmp_path / "gpu_steps.csv")] == ["plain", "DEFAULT"]
    assert [row["largest_batch"] for row in read(tmp_path / "gpu_batches.csv")] == ["8", "8"]
    assert len(read(tmp_path / "gpu_kernels.csv")) == len(kernels.OPERATIONS)


@pytest.mark.exhaustive
def test_tests_that_passed_are_left_out_of_the_next_call(tmp_path, capsys):
    (tmp_path / "test_some.py").write_text("def test_one():\n    pass\ndef test_two():\n    assert False\n")
    paths = (str(tmp_path / "test_some.py"),)
    assert gpu_tests.run(tmp_path, 100, paths, "not gpu") == (1, 1, 0)
    # Of another size: within a second, Python's cache knows a file by that alone.
    (tmp_path / "test_some.py").write_text("def test_one():\n    assert False\ndef test_two():\n    assert True\n")
    assert gpu_tests.run(tmp_path, 100, paths, "not gpu") == (1, 0, 0)
    assert gpu_tests.run(tmp_path, 1, paths, "not gpu") == (0, 0, 1)


def _step_row(variant, samples_s, memory=("100.0", "300.0", "512.0"), **values):
    activations, peak, reserved = memory
    row = dict.fromkeys(steps.COLUMNS, "") | {"model": "resnet50", "dtype": "float32", "memory_format": "contiguous"}
    measured = {"activations_mib": activations, "peak_mib": peak, "reserved_mib": reserved, "samples_s": samples_s}
    return row | {"variant": variant, "device": "GPU"} | measured | values


def _kernel_row(operation, bit_width, fraction, **values):
    row = dict.fromkeys(kernels.COLUMNS, "") | {"operation": operation, "dtype": "float32", "bit_width": bit_width}
    return row | {"fraction_of_copy": fraction, "goal": 0.85, "device": "GPU"} | values


def test_print_steps_sets_rows_beside_the_plain_step(capsys):
    rows = [_step_row("2bit", "91.0", ("10.0", "200.0", "300.0")), _step_row("plain", "100.0")]
    report.print_steps([*rows, _step_row("checkpoint", "", ("", "", ""), error="out of memory")])
    header, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    columns = [header.index(name) for name in ("variant", "less_than_plain", "speed_of_plain")]
    assert [[line[column] for column in columns] for line in lines[:2]] == [
        ["2bit", "10.00", "0.91"],
        ["plain", "1.00", "1.00"],
    ]
    assert lines[2][-3:] == ["out", "of", "memory"]


def test_print_goals_tells_what_is_reached(capsys):
    found = [_kernel_row("nearest", 2, "0.851"), _kernel_row("nearest", 4, "0.849"), _kernel_row("x", 2, "", error="e")]
    other = {"model": "efficientnetv2-s"}
    trained = [_step_row("plain", "100.0"), _step_row("DEFAULT", "89.0")]
    trained += [_step_row("plain", "100.0", **other), _step_row("DEFAULT", "90.0", **other)]
    report.print_goals(found, trained)
    assert capsys.readouterr().out.splitlines() == [
        "kernels: 1 of 3 reach their goal, 1 failed",
        "resnet50, float32, DEFAULT: 0.89 of the speed of plain, goal 0.9 missed",
        "efficientnetv2-s, float32, DEFAULT: 0.90 of the speed of plain, goal 0.9 reached",
    ]


@pytest.mark.gpu
def test_main_smoke_measures_memory_on_a_gpu(tmp_path):
    options = ["--variants", "plain", "2bit", "--dtypes", "float32", "bfloat16", "--out-dir", str(tmp_path)]
    assert main(["--smoke", "--device", "cuda", *options]) == 0
    rows = read(tmp_path / "gpu_steps.csv")
    for row in rows:
        activations, peak, reserved = (float(row[name]) for name in ("activations_mib", "peak_mib", "reserved_mib"))
        assert 0 < activations < peak <= reserved
    assert {row["device"] for row in rows} == {torch.cuda.get_device_name()}
