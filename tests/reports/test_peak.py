"""Parts of the memory of a step: which bytes are in which, on this system and on others."""

from __future__ import annotations

import cProfile
import dataclasses
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import brevact
from brevact import NearestBackward4bit, heap, loaded
from brevact.large_pages import VARIABLE
from brevact.reports.in_place import in_place
from brevact.reports.peak import PeakMemory, ProcessMemory, peak_tables
from brevact.reports.peak_probe import peak_memory_of
from brevact.reports.process_probe import ProcessProbe
from brevact.reports.step import peak_of, step_of
from tests.forks import forks

MIB = 1 << 20
CPU = torch.device("cpu")
glibc = pytest.mark.skipif(heap.HeapProbe.of_process() is None, reason="needs mallinfo2 of glibc's own malloc")
linux = pytest.mark.skipif(loaded.loaded_bytes() is None, reason="needs /proc")


def square(model, x):
    return model(x).square().sum()


def parts_of(model, x, *, packs: bool = True, loss=square) -> PeakMemory:
    with in_place(model):
        return peak_memory_of(step_of(model, x, loss, packs=packs))


def linear(policy=NearestBackward4bit):
    torch.manual_seed(0)
    return brevact.quantize_backward(nn.Sequential(nn.Linear(2048, 1024, bias=False)), policy)


@pytest.mark.parametrize("packs", [False, True])
def test_each_tensor_of_a_linear_layer_is_in_its_part(packs):
    """When its weight's gradient is computed there are that, the output's gradient, and the input, decoded."""
    x = torch.randn(256, 2048)
    kept = brevact.quantizer(NearestBackward4bit).quantize(x).nbytes
    parts = parts_of(linear(), x, packs=packs)
    assert parts.weight_gradients == 2048 * 1024 * 4
    assert parts.activation_gradients == 256 * 1024 * 4 + 4  # and that of the loss
    assert parts.decoded == packs * x.nbytes
    assert parts.packed == packs * kept  # plain saves the input as it is, which was there before the step
    assert parts.unpacked == 0
    assert parts.other == 4  # the loss


def test_what_is_saved_when_backward_starts_is_what_the_memory_report_says():
    """The widest layer is the last one, so that most is allocated while nothing has been freed."""
    torch.manual_seed(0)
    layers = nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 4096, bias=False)
    model = brevact.quantize_backward(nn.Sequential(*layers), NearestBackward4bit)
    x = torch.randn(512, 256)
    report = brevact.memory_report(model, x, square)
    assert report.packed_parts.packed + report.packed_parts.unpacked == report.saved_bytes
    assert report.packed_parts.packed == sum(row.saved_bytes for row in report.ops if row.how in ("packed", "mask"))
    assert report.plain_parts.packed == report.plain_parts.decoded == 0
    assert report.plain_parts.unpacked == report.plain_bytes - x.nbytes


def conv_net():
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.SiLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)), torch.randn(8, 3, 32, 32)


def transformer():
    return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), torch.randn(4, 32, 64)


def checkpoints():
    model, x = conv_net()
    model.forward = partial(checkpoint_sequential, model, 2, use_reentrant=False)
    return nn.Sequential(model), x


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Runs a test without the garbage collector, which frees tensors whenever it likes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("make", [conv_net, transformer, checkpoints])
@pytest.mark.parametrize(
    "policy", [brevact.DEFAULT, brevact.RECOMPUTE, brevact.LosslessBackward], ids=["DEFAULT", "RECOMPUTE", "lossless"]
)
def test_the_parts_sum_to_the_peak_without_a_probe(make, policy):
    torch.manual_seed(0)
    model, x = make()
    brevact.quantize_backward(model, policy)
    for packs in (False, True):
        parts = parts_of(model, x, packs=packs)
        with in_place(model):
            assert parts.tensors == peak_of(step_of(model, x, square, packs=packs), CPU)
        assert min(dataclasses.astuple(dataclasses.replace(parts, process=None))[:5]) >= 0


def test_without_gradients_of_the_model_there_is_no_part():
    report = brevact.memory_report(nn.Linear(8, 8).requires_grad_(False), torch.randn(4, 8), square)
    assert report.plain_parts is None is report.packed_parts


def test_a_forward_pass_alone_has_no_parts():
    assert brevact.memory_report(linear(), torch.randn(4, 2048)).packed_parts is None


def test_inputs_that_want_gradients_are_leaves():
    x = torch.randn(64, 1024)
    layer = nn.Linear(1024, 8).requires_grad_(False)
    parts = parts_of(layer, x, packs=False, loss=lambda model, x: square(model, x.detach().requires_grad_()))
    assert parts.weight_gradients == x.nbytes


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if sys.getprofile() is not None and sys.getprofile() is not _profiler:
            raise ArithmeticError("in a measured backward pass")
        return grad


def _profiler(frame, event, value):
    return None


def test_a_backward_pass_that_fails_leaves_nothing_behind():
    threads = threading.active_count()
    sys.setprofile(_profiler)
    try:
        with pytest.raises(ArithmeticError):
            parts_of(nn.Linear(8, 8), torch.randn(4, 8), loss=lambda model, x: Fails.apply(model(x)).sum())
        assert sys.getprofile() is _profiler
    finally:
        sys.setprofile(None)
    assert threading.active_count() == threads


THREADS = """
import threading
import torch
from brevact.reports.peak_probe import peak_memory_of
from brevact.reports.step import step_of

def measure():
    square = lambda model, x: model(x).square().sum()
    model, x = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(50)]), torch.randn(256, 32)
    peaks.append(peak_memory_of(step_of(model, x, square, packs=False)).tensors)

peaks = []
threads = [threading.Thread(target=measure) for _ in range(2)]
[each.start() for each in threads]
[each.join() for each in threads]
assert len(peaks) == 2 and peaks[0] == peaks[1] > 0, peaks
"""


@pytest.mark.exhaustive
def test_threads_measure_one_after_the_other():
    """In a process of its own: torch's profiler crashes one in which it runs in two threads."""
    subprocess.run([sys.executable, "-c", THREADS], check=True)


def test_a_profiler_of_python_goes_on():
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        before = sys.getprofile()
        parts_of(nn.Linear(8, 8), torch.randn(4, 8))
        assert sys.getprofile() is before
        heap.is_left_alone({})
    finally:
        profiler.disable()
    assert heap.is_left_alone.__code__ in [entry.code for entry in profiler.getstats()]


#: What the codes below call. Each runs in a fork of a fresh process: what tests have left on the heap of this one,
#: large pages of freed tensors above all, becomes resident where a part of it is used.
BLOCKS = """
import ctypes, threading, time
import torch
from torch import nn
from brevact.reports.in_place import in_place
from brevact.reports.peak_probe import peak_memory_of
from brevact.reports.process_probe import ProcessProbe
from brevact.reports.step import step_of

libc = ctypes.CDLL("libc.so.6")
libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None

def allocate(count, size):
    blocks = [libc.malloc(size) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    return blocks

def free(blocks):
    while blocks:
        libc.free(blocks.pop())

looks, look = [], ProcessProbe._look

def counted(probe):
    found = look(probe)
    looks.append(found)
    return found

ProcessProbe._look = counted

def until_looked():
    before = len(looks)
    watcher = next((each for each in threading.enumerate() if each.name == "brevact report"), None)
    while watcher is not None and watcher.is_alive() and len(looks) < before + 2:  # one may have begun before
        time.sleep(0.001)

class UsesMemory(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.weight, self.use = nn.Parameter(torch.ones(512)), use

    def forward(self, x):
        self.use()
        return x * self.weight

def show_parts(use):
    model = UsesMemory(use)
    with in_place(model):
        run = step_of(model, torch.randn(512, 512), lambda model, x: model(x).square().sum(), packs=False)
        process = peak_memory_of(run).process
    print(process.workspaces, process.gaps, process.growth, process.peak - process.before)
"""


@pytest.fixture(scope="module")
def parts_of_process() -> Iterator[Callable[[str], list[int]]]:
    """Runs code that shows workspaces, gaps, growth, and peak less what was there before, in bytes."""
    with forks(BLOCKS, {**os.environ, VARIABLE: "0"}) as process:

        def parts(code: str) -> list[int]:
            done = process.run(code)
            assert done.returncode == 0, done.stderr
            return [int(word) for word in done.stdout.split()]

        yield parts


WORKSPACES = """
def use():
    blocks = allocate(1, 64 << 20)
    until_looked()
    free(blocks)

show_parts(use)
"""


@glibc
def test_workspaces_are_blocks_that_are_no_tensors(parts_of_process):
    workspaces, _, growth, above = parts_of_process(WORKSPACES)
    # Beside it there are nodes of the graph, and records of torch's profiler, of a few ops.
    assert 64 * MIB <= workspaces < 80 * MIB
    assert growth >= 64 * MIB
    assert above == growth


GAPS = """
def use():
    blocks = sorted(allocate(1280, 100 << 10))
    free(blocks[::2])
    held = blocks[1::2] + allocate(1, 32 << 20)  # so that most is resident after the blocks were freed
    until_looked()
    free(held)

show_parts(use)
"""


@glibc
def test_gaps_are_freed_blocks_between_others(parts_of_process):
    """Of 1280 blocks of 100 KiB, which glibc never maps by themselves, every other one by address is freed.

    Up to 8 MiB of them may lie in free memory that was resident before, in pieces that malloc_trim cannot return.
    """
    workspaces, gaps, _, _ = parts_of_process(GAPS)
    freed = 640 * 100 << 10
    assert freed - 8 * MIB < gaps < freed + 16 * MIB
    assert freed + 32 * MIB < workspaces < freed + 48 * MIB


@glibc
def test_looks_during_which_the_heap_changed_do_not_count():
    """A block of 60 MiB was in use when the heap was read; when resident memory was, another of 32 MiB."""
    probe = ProcessProbe()
    start = probe.start

    def look(in_use, steady):
        heap = start.heap._replace(in_use=start.heap.in_use + in_use * MIB, free=64 * MIB)
        return start._replace(resident=start.resident + 96 * MIB, heap=heap, steady=steady)

    probe.looks += [look(60, steady=False), look(32, steady=True)]
    found = probe.memory(lambda moment: 0)
    assert (found.workspaces, found.gaps, found.rest) == (32 * MIB, 64 * MIB, 0)
    del probe.looks[-1]
    assert probe.memory(lambda moment: 0).workspaces == 60 * MIB


@linux
def test_tensors_that_the_process_holds_are_those_of_the_step():
    """All of the gradient of a large weight is resident while it is computed, so that it cannot be missed."""
    x = torch.randn(512, 4096)
    parts = parts_of(nn.Linear(4096, 4096, bias=False), x, packs=False)
    assert parts.weight_gradients <= parts.process.tensors <= parts.tensors
    assert parts.process.before > x.nbytes + parts.weight_gradients


def test_other_allocators_tell_of_no_workspaces(monkeypatch):
    monkeypatch.setattr(heap.platform, "libc_ver", lambda: ("", ""))  # musl
    parts = parts_of(linear(), torch.randn(64, 2048))
    if parts.process is not None:
        assert parts.process.workspaces is None is parts.process.gaps
        assert parts.process.rest == parts.process.growth - parts.process.tensors
        lines = [line.split() for line in peak_tables(parts, parts).splitlines()]
        assert [line[0] for line in lines if line[-2:] == ["-", "-"]] == ["workspaces", "gaps"]


def test_other_systems_tell_of_tensors_alone(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("/proc/self/statm")

    monkeypatch.setattr(loaded, "open", missing, raising=False)
    assert loaded.loaded_bytes() is None
    parts = parts_of(linear(), torch.randn(64, 2048))
    assert parts.process is None
    assert parts.weight_gradients == 2048 * 1024 * 4
    assert "process" not in peak_tables(parts, parts)


def test_tables_have_a_line_a_part_and_a_sum():
    process = ProcessMemory(before=100, loaded=10, tensors=20, workspaces=30, gaps=40, rest=-5)
    parts = PeakMemory(1, 2, 3, 4, 5, 6, process)
    assert (parts.tensors, process.growth, process.peak) == (21, 85, 185)
    lines = peak_tables(PeakMemory(0, 2, 0, 4, 5, 6, process), parts).splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith("sum")] == [["21", "B"], ["185", "B"]]
    assert next(line for line in lines if line.startswith("rest")).split() == ["rest", "-5", "B", "-5", "B"]


def test_reports_print_the_parts():
    x = torch.randn(64, 2048), torch.randint(1024, (64,))

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    for report in (brevact.step_report(linear(), x, loss, rounds=2), brevact.memory_report(linear(), x, loss)):
        assert report.packed_parts.tensors == report.packed_peak
        assert report.plain_parts.tensors == report.plain_peak
        assert "gradients of activations" in str(report)


@linux
@pytest.mark.parametrize("first", ["import torch", "pass"])
def test_what_is_loaded_is_what_the_import_adds_beside_torch(first):
    code = f"""
import os
{first}
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
import brevact
after = resident()
from brevact.loaded import loaded_bytes
print(after - before, loaded_bytes(), flush=True)
os._exit(0)  # the end of an interpreter that has imported torch takes a second
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added, counted = map(int, done.stdout.split())
    assert counted > MIB
    if first == "import torch":
        assert added - MIB < counted <= added  # `brevact.version` and its like are not counted
    else:
        assert counted < added / 2  # torch takes more than all of this package
