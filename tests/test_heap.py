"""glibc's heap: set by the first packed tensor on the CPU, unless the user has decided."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import brevact
from brevact import heap
from tests.forks import forks

OURS = ("GLIBC_TUNABLES", "LD_PRELOAD", "THP_MEM_ALLOC_ENABLE")
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
#: Prints whether 9 MiB lie on the heap, and 33 and 20 once an activation is packed; glibc by itself learns of the 9.
CODE = """
import torch
from brevact.quantizers import UniformQuantizer

def is_on_heap(mib):
    x = torch.empty(mib << 20, dtype=torch.uint8)
    for line in open("/proc/self/maps"):
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= x.data_ptr() < stop:
            return line.rstrip().endswith("[heap]")

before = is_on_heap(9)
UniformQuantizer(bit_width=4).quantize(torch.randn(512), 0)
print(before, is_on_heap(33), is_on_heap(20))
"""


def environment_without_choices() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OURS and not name.startswith("MALLOC_")}


def run(**environment: str) -> list[str]:
    # Quantizers do without Brevitas; its import, and the end of an interpreter with all of torch, take seconds.
    code = "import os, sys; sys.modules['brevitas'] = None" + CODE + "sys.stdout.flush(); os._exit(0)"
    variables = {**environment_without_choices(), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.split()


@glibc
@pytest.mark.parametrize(
    ("environment", "is_on_heap"),
    [
        ({"MALLOC_MMAP_MAX_": "65536"}, "False"),
        pytest.param({"MALLOC_MMAP_THRESHOLD_": "67108864"}, "True", marks=pytest.mark.exhaustive),
    ],
)
def test_what_the_user_has_set_stays(environment: dict[str, str], is_on_heap: str):
    assert run(**environment) == [is_on_heap] * 3


#: Functions for the codes below: resident anonymous MiB of the process, and a heap with gaps of 4 MiB between small
#: tensors.
PROBE = """
import torch
import brevact
from brevact import heap
from brevact.quantizers import UniformQuantizer

def resident():
    with open("/proc/self/statm") as file:
        of_all, of_files = map(int, file.read().split()[1:3])
        return (of_all - of_files) * 4096 / 2**20

def gaps(count):
    tensors, between = [], []
    for _ in range(count):
        tensors.append(torch.ones(4 << 20, dtype=torch.uint8))
        between.append(torch.ones(700 << 10, dtype=torch.uint8))
    return between
"""


@pytest.fixture(scope="module")
def probe() -> Iterator[Callable[[str], list[str]]]:
    """Runs code in forks of a process that has run `PROBE` alone: the heap is that of a fresh process."""
    with forks(PROBE, environment_without_choices()) as process:

        def words(code: str) -> list[str]:
            done = process.run(code)
            assert done.returncode == 0, done.stderr
            return done.stdout.split()

        yield words


@glibc
def test_the_first_packed_tensor_lets_all_but_large_ones_lie_on_the_heap(probe):
    assert probe(CODE) == ["False", "False", "True"]


#: Prints the MiB that stay resident when small tensors, then large ones, were made and freed.
FREED = """
UniformQuantizer(bit_width=4).quantize(torch.randn(512), 0)
before = resident()
small = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(60)]
del small
large = [torch.ones(24 << 20, dtype=torch.uint8) for _ in range(10)]
del large
print(resident() - before)
"""


@glibc
def test_no_more_than_the_bound_stays_resident(probe):
    (kept,) = probe(FREED)
    assert float(kept) < 128 + 24 + 1  # the end of the heap, and large pages of one tensor below it


@pytest.mark.parametrize(
    ("environment", "is_left_alone"),
    [
        ({}, False),
        ({"MALLOC_TOP_PAD_": "1"}, True),
        ({"MALLOC_PERTURB_": "7"}, True),  # each block that malloc returns is written to, however large
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, True),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=off"}, False),
    ],
)
def test_which_environments_decide(environment: dict[str, str], is_left_alone: bool):
    assert heap.is_left_alone(environment) == is_left_alone


@glibc
def test_one_call_leaves_the_heap_alone(probe):
    assert probe("brevact.set_heap_tuning(False)" + CODE) == ["False"] * 3


def test_the_call_takes_a_bool():
    with pytest.raises(TypeError, match="enabled: got 1; accepted are True and False"):
        brevact.set_heap_tuning(1)


#: Prints the MiB that are resident when activations between small blocks that live on were freed, before and after as
#: many bytes are packed as it takes to look.
GAPS = """
from torch import nn

net, x = brevact.quantize_backward(nn.Linear(512, 8), brevact.StochBackward4bit), torch.randn(2048, 512)
net(x).sum().backward()
brevact.set_heap_tuning(TUNED)
start = resident()
between = gaps(100)
freed = resident() - start
for _ in range(heap.LOOKED_AFTER // x.numel() + 1):
    net(x * 1).sum().backward()
print(freed, resident() - start)
"""


@glibc
def test_free_memory_inside_of_the_heap_is_returned(probe):
    kept = float(probe(GAPS.replace("TUNED", "True"))[1])
    left = float(probe(GAPS.replace("TUNED", "False"))[1])
    # Of 400 MiB in the gaps. The small blocks stay, a step's tensors, and free memory.
    assert kept < 100 * 0.7 + 4 * 6 + heap.MOST_FREE / 2**20 < 400 / 2 < left


#: Prints the MiB that a look returns of one large gap and of 20 small ones, beyond a bound, and whether their
#: neighbours keep their values, and the heap works.
RETURNED = """
heap.tune_heap()
process = heap.Tuning.heap
large, neighbour = torch.ones(30 << 20, dtype=torch.uint8), torch.ones(700 << 10, dtype=torch.uint8)
neighbours = [neighbour, *gaps(20)]
del large
heap.MOST_FREE, heap.MORE_RETURNED, heap.FEW_FREE = BOUND << 20, BELOW << 20, 1 << 20
before = resident()
process.look()
returned = before - resident()
again = torch.ones(30 << 20, dtype=torch.uint8)
print(returned, all(bool(each.eq(1).all()) for each in [*neighbours, again]), len(again))
"""


@glibc
@pytest.mark.parametrize("bound", ["50", "10000"])
def test_free_blocks_are_returned_beyond_the_bound(probe, bound: str):
    code = RETURNED.replace("BOUND", bound).replace("BELOW", "10000")
    returned, are_whole, length = probe(code)
    assert (are_whole, length) == ("True", str(30 << 20))
    if bound == "10000":
        assert float(returned) < 1
    else:  # of 30 + 20 x 4 MiB an eighth may stay of each, and a large page at both ends of the large one
        assert float(returned) > 110 * 7 / 8 - 4


@glibc
def test_no_more_is_returned_than_leaves_some_room_below_the_bound(probe):
    """40 of 110 free MiB are too many; 16 more are returned, and the rest of the last block of 4."""
    code = RETURNED.replace("BOUND", "70").replace("BELOW", "16")
    assert 40 + 16 - 4 < float(probe(code)[0]) < 40 + 16 + 4 + 4


#: Prints the MiB that a look returns of 320 in gaps while glibc can map no block by itself, the MiB by which the heap
#: grows meanwhile, and whether the main thread still allocates from it.
WITHOUT_MAPPINGS = """
import resource, threading

heap.tune_heap()
process = heap.Tuning.heap
libc = process.libc
threading.Thread(target=threading.Event().wait, daemon=True).start()  # glibc has one arena until there are threads
neighbours = gaps(80)
heap.MOST_FREE, heap.FEW_FREE = 50 << 20, 1 << 20
end, grown = libc.sbrk(0), [0]

def malloc(size, malloc=libc.malloc):
    block = malloc(size)
    grown.append(libc.sbrk(0) - end)
    return block

with open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (limit + (200 << 20),) * 2)
before = resident()
libc.malloc = malloc
process.look()
print(before - resident(), max(grown) >> 20, process.start <= libc.malloc(200_000) < libc.sbrk(0))
"""


@glibc
def test_gaps_are_returned_where_glibc_can_map_nothing(probe):
    returned, grown, is_on_heap = probe(WITHOUT_MAPPINGS)
    assert float(returned) > 320 * 7 / 8 - 4
    assert int(grown) <= 330  # at most once by the largest block that may be free
    assert is_on_heap == "True"


def test_layers_that_are_run_again_count_as_if_their_outputs_were_packed(monkeypatch):
    """In forward and in backward: else a process that recomputes is looked at less often, and its gaps stay."""
    monkeypatch.setattr(heap.Tuning, "next_look", sys.maxsize)
    monkeypatch.setattr(heap.Tuning, "passed", 0)
    layers = nn.LayerNorm(32), nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 8)
    model, x = brevact.quantize_backward(nn.Sequential(*layers), brevact.RECOMPUTE), torch.randn(4096, 32)
    out = model(x)
    assert heap.Tuning.passed >= 4096 * 128
    monkeypatch.setattr(heap.Tuning, "passed", 0)
    out.sum().backward()
    assert heap.Tuning.passed >= 4096 * 128
