import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.process_memory import allocators, compared, resident_bytes
from benchmarks.training_case import TrainingCase, forget_peak, kept_bytes, status_mib

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is known on Linux only")


def test_resident_bytes_grow_with_a_tensor_in_use():
    before = resident_bytes()
    x = torch.ones(1 << 24)  # 64 MiB
    after = resident_bytes()
    if sys.platform == "linux":
        assert after - before > x.nbytes / 2
    else:
        assert before is None and after is None


@on_linux
def test_status_mib_tells_a_peak_that_has_passed():
    before = status_mib("VmHWM")
    x = torch.ones(int((before - status_mib("VmRSS") + 64) * 2**20) // 4)
    del x
    assert status_mib("VmHWM") - before > 60


@on_linux
def test_forget_peak_lets_the_peak_begin_again():
    x = torch.ones(int((status_mib("VmHWM") - status_mib("VmRSS") + 64) * 2**20) // 4)
    before = status_mib("VmHWM")
    del x
    forget_peak()
    assert status_mib("VmHWM") < before - 32


def test_kept_bytes_counts_what_autograd_keeps():
    model = nn.Sequential(nn.Linear(64, 32), nn.Sigmoid())
    x = torch.randn(128, 64)
    output = 128 * 32 * 4
    assert kept_bytes(lambda: model(x)) == output  # of Linear nothing new, of Sigmoid the output
    assert kept_bytes(lambda: torch.exp(model(x)).sum()) == pytest.approx(2 * output, abs=64)  # and the sum


def test_compared_tells_the_share_of_bytes_not_kept_by_which_memory_falls():
    case = TrainingCase(model="mlp", variant="DEFAULT", batch_size=8, depth=2)
    plain = {"kept_mib": 100.0, "loaded_mib": 200.0, "peak_mib": 400.0}
    packed = {"kept_mib": 20.0, "loaded_mib": 250.0, "peak_mib": 380.0}
    row = compared(case, "glibc", packed, plain)
    assert (row["allocator"], row["variant"], row["growth_mib"]) == ("glibc", "DEFAULT", 130.0)
    assert row["felt"] == round(70 / 80, 3) and row["felt_of_process"] == round(20 / 80, 3)
    assert compared(case, "glibc", plain, plain)["felt"] == ""
    assert compared(case, "glibc", {"error": "exit code 1"}, plain)["error"] == "exit code 1"


def test_allocators_finds_a_library_that_is_named(tmp_path: Path):
    path = tmp_path / "libtcmalloc_minimal.so.4"
    assert allocators([str(path)])["tcmalloc"]["LD_PRELOAD"] == str(path)
    assert set(allocators()) >= {"glibc", "glibc-small-pages", "glibc-mapped"}


@on_linux
@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["plain", "DEFAULT+checkpoint"])
def test_training_case_runs_in_a_process_of_its_own(variant: str):
    found = TrainingCase(model="mlp", variant=variant, batch_size=64, depth=1).run()
    assert found["peak_mib"] > found["loaded_mib"] > found["base_mib"] > 0 < found["kept_mib"], found


@on_linux
@pytest.mark.exhaustive
def test_training_case_fails_beyond_its_limit():
    found = TrainingCase(model="mlp", variant="plain", batch_size=8192, depth=1, limit_mib=16).run()
    assert "exit code" in found["error"]
