"""Cases in processes of their own; nothing here needs torch."""

import dataclasses
import os
import time

from benchmarks.gpu.processes import measure_each, message_of


@dataclasses.dataclass
class Noted:
    """Writes down when it gets ready and when it measures."""

    path: str
    name: str

    def prepare(self):
        self._note("ready")
        return self._measure

    def _measure(self):
        self._note("begins")
        time.sleep(0.05)
        self._note("ends")
        return [{"name": self.name, "process": os.getpid()}]

    def _note(self, what):
        with open(self.path, "a") as file:
            file.write(f"{what} {self.name}\n")


class Raises:
    def prepare(self):
        raise ValueError("no such\nkernel")


class RaisesLate:
    def prepare(self):
        return lambda: [][0]


class Crashes:
    def prepare(self):
        os._exit(3)


class Hangs:
    def prepare(self):
        time.sleep(60)


def test_measure_each_measures_one_at_a_time_when_a_wave_is_ready(tmp_path):
    path = tmp_path / "notes"
    cases = [Noted(str(path), name) for name in "abc"]
    results = list(measure_each(cases, jobs=2, timeout=60))
    assert [case.name for case, _ in results] == ["a", "b", "c"]
    assert [rows[0]["name"] for _, rows in results] == ["a", "b", "c"]
    assert len({rows[0]["process"] for _, rows in results} | {os.getpid()}) == 4
    notes = path.read_text().splitlines()
    assert sorted(notes[:2]) == ["ready a", "ready b"]
    assert notes[2:] == ["begins a", "ends a", "begins b", "ends b", "ready c", "begins c", "ends c"]


def test_measure_each_goes_on_after_cases_that_fail(tmp_path):
    cases = [Raises(), Crashes(), RaisesLate(), Noted(str(tmp_path / "notes"), "after")]
    raised, crashed, raised_late, rows = [result for _, result in measure_each(cases, jobs=4, timeout=60)]
    assert raised == "ValueError: no such"
    assert crashed == "the process ended getting ready, with exit code 3"
    assert raised_late == "IndexError: list index out of range"
    assert rows[0]["name"] == "after"


def test_measure_each_ends_what_takes_too_long():
    ((_, result),) = measure_each([Hangs()], jobs=1, timeout=0.2)
    assert result == "took too long getting ready"


def test_message_of_is_one_short_line():
    assert message_of(RuntimeError("")) == "RuntimeError: "
    assert message_of(ValueError("x" * 1000 + "\ny")) == f"ValueError: {'x' * 148}"
