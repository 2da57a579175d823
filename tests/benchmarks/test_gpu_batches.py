"""`python -m benchmarks.gpu.batches`: the search, with tiny models on the CPU."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.gpu.batches import BatchCase, find_each, main
from benchmarks.gpu.processes import Row


@dataclass(frozen=True, kw_only=True)
class _Bounded(BatchCase):
    """A case that fits up to a batch size, and that fails beyond a larger one."""

    fitting: int = 0
    breaking: int = 1 << 30

    def prepare(self) -> Callable[[], list[Row]]:
        if self.batch_size > self.breaking:
            raise ValueError("broken")
        return lambda: [{"fits": self.batch_size <= self.fitting}]


def _case(variant: str, **settings: int) -> _Bounded:
    common = {"model": "resnet50", "dtype": "float32", "device": "cpu", "batch_size": 4, "smoke": True}
    return _Bounded(variant=variant, **common, **settings)


def test_find_each_compares_with_plain_and_keeps_errors():
    cases = [_case("plain", fitting=8), _case("2bit", fitting=24), _case("4bit", fitting=64, breaking=10)]
    plain, packed, broken = find_each(cases, most=32, timeout=60, start="fork")
    assert (plain["largest_batch"], plain["times_plain"], plain["error"]) == (8, "1.00", "")
    assert packed["largest_batch"] == 24 and packed["times_plain"] == "3.00"
    assert broken["largest_batch"] == broken["times_plain"] == ""
    assert broken["error"] == "batch 16: ValueError: broken"


def test_main_needs_a_device_or_smoke(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "cpu"])
    assert stopped.value.code == 2 and "add --smoke" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_main_smoke_searches_up_to_its_largest_batch(tmp_path: Path):
    path = tmp_path / "rows.csv"
    options = ["--smoke", "--models", "resnet50", "--variants", "2bit", "--first", "8", "--csv", str(path)]
    assert main(options) == 0
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["variant"], row["largest_batch"], row["tries"], row["error"]) == ("2bit", "8", "2", "")
