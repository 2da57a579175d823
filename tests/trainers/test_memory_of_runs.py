"""Runs that measure take the memory of runs that do not: each in a process of its own."""

import functools
import os
import statistics
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")

#: Trains a net that keeps 400 MiB in a plain step, and prints the peak of the process; "room" is what it may take.
RUN = """
import resource, sys
import torch
from torch import nn
import brevact
from brevact.trainers import TrainingPolicy

policy, memory, room = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
layers = (layer for _ in range(8) for layer in (nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.SiLU()))
model = nn.Sequential(nn.Linear(128, 1024), nn.Linear(1024, 128), *layers)
batches = [torch.randn(8192, 128) for _ in range(4)]
loss = lambda model, batch: model(batch).square().mean()
small = brevact.quantize_backward(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.SiLU()))
small(batches[0]).sum().backward()  # kernels are loaded
if room:
    with open("/proc/self/status") as file:
        data = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (data + (room << 20),) * 2)
if policy == "none":
    for _ in range(2):
        loss(model, batches[0]).backward()
else:
    run = TrainingPolicy(policy, memory=memory)
    run.begin(model, batches, loss)
    for batch in batches[:2]:
        with brevact.backward_quant(model):
            value = loss(model, batch)
        value.backward()
        model.zero_grad()
        run.step()
    assert memory is ("brevact/plain_mib" in run.figures())
with open("/proc/self/status") as file:  # getrusage would begin with the peak of the process that forked this one
    print(next(line.split()[1] for line in file if line.startswith("VmHWM")))
"""


def peak_of_run(policy, memory=True, room=0):
    """Peak of a run in KiB; None where memory is refused to it."""
    words = [sys.executable, "-c", RUN, policy, str(memory), str(room)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if "can't allocate memory" in done.stderr or "MemoryError" in done.stderr:
        return None
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@functools.cache
def peaks_of_runs(policy, memory=True):
    """Peaks of five runs, which differ by up to a tenth: by the large pages that the machine has free."""
    return [peak_of_run(policy, memory) for _ in range(5)]


def is_larger(peaks, others):
    """Whether the mean is larger by 2 % and five standard errors."""
    errors = sum(statistics.variance(each) / len(each) for each in (peaks, others))
    return statistics.mean(peaks) - 1.02 * statistics.mean(others) > 5 * errors**0.5


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["default", "recompute"])
def test_a_measured_run_peaks_no_higher(policy):
    assert not is_larger(peaks_of_runs(policy), peaks_of_runs(policy, memory=False))


@pytest.mark.exhaustive
def test_recomputation_peaks_no_higher():
    assert not is_larger(peaks_of_runs("recompute"), peaks_of_runs("default"))
    assert is_larger(peaks_of_runs("none"), peaks_of_runs("default"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["12x", "peak=200MiB"])
def test_a_budget_is_fitted_in_less_memory_than_a_plain_run_takes(policy):
    assert peak_of_run(policy) < 0.9 * peak_of_run("none")


@pytest.mark.parametrize(("policy", "fits"), [("none", False), ("default", True)])
def test_a_run_fits_where_a_plain_one_does_not(policy, fits):
    assert (peak_of_run(policy, room=320) is not None) is fits
