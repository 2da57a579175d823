"""`python -m benchmarks.gpu.batches`: the search, with tiny models on the CPU."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.batches import BatchCase, find_each, main, memory_of_steps
from benchmarks.gpu.processes import Row


@dataclass(frozen=True, kw_only=True)
class _Bounded(BatchCase):
    """A case that finds what it is told, or fails."""

    finds: int = 0

    def prepare(self) -> Callable[[], list[Row]]:
        if not self.finds:
            raise ValueError("broken")
        return lambda: [self._row(largest_batch=self.finds)]


def _case(variant: str, finds: int = 0) -> _Bounded:
    common = {"model": "resnet50", "dtype": "float32", "device": "cpu", "first": 4, "most": 32, "limit_gib": 1.0}
    return _Bounded(variant=variant, finds=finds, smoke=True, **common)


def test_find_each_compares_with_plain_and_keeps_errors():
    cases = [_case("plain", 8), _case("2bit", 24), _case("4bit")]
    plain, packed, broken = find_each(cases, timeout=60, start="fork")
    assert (plain["largest_batch"], plain["times_plain"], plain["error"]) == (8, "1.00", "")
    assert packed["largest_batch"] == 24 and packed["times_plain"] == "3.00"
    assert broken["largest_batch"] == broken["times_plain"] == ""
    assert broken["error"] == "ValueError: broken"


def test_a_batch_that_does_not_fit_is_told_from_one_that_does():
    class Bounded:
        def load(self, samples):
            self.samples = samples

        def step(self):
            if self.samples > 5:
                raise torch.OutOfMemoryError("too large")

        def release(self):
            pass

    training = Bounded()
    assert memory_of_steps(training, 5, torch.device("cpu")) == {}
    assert memory_of_steps(training, 6, torch.device("cpu")) is None


def test_main_needs_a_device_or_smoke(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "cpu"])
    assert stopped.value.code == 2 and "add --smoke" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_main_smoke_searches_up_to_its_largest_batch(tmp_path: Path):
    path = tmp_path / "rows.csv"
    options = ["--smoke", "--models", "resnet50", "--variants", "DEFAULT", "--first", "8", "--csv", str(path)]
    assert main(options) == 0
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["variant"], row["largest_batch"], row["tries"], row["error"]) == ("DEFAULT", "8", "2", "")
