"""The memory that is left: by control groups of both versions, written as files, and by the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from brevact import room

MACHINE = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    8000 kB\n"
#: Lines of /proc/PID/mountinfo; the root of the second is that of a container.
OF_VERSION_1 = "35 31 0:32 {root} {mount} rw,relatime shared:9 - cgroup cgroup rw,memory\n"
OF_CPUS = "32 31 0:29 / {mount}/cpu rw,relatime - cgroup cgroup rw,cpu\n"
OF_VERSION_2 = "31 23 0:28 {root} {mount} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where control groups are mounted, on a machine that has 8,000 KiB left."""
    (tmp_path / "meminfo").write_text(MACHINE)
    monkeypatch.setattr(room, "MACHINE", tmp_path / "meminfo")
    return tmp_path / "cgroup"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)


def left(monkeypatch: pytest.MonkeyPatch, memberships: str, mounts: str) -> int:
    groups = room.groups_of(memberships, mounts)
    monkeypatch.setattr(room, "_groups", lambda: groups)
    return room.memory_left()


def test_the_machine_is_the_limit_without_groups(machine, monkeypatch):
    assert left(monkeypatch, "", "") == 8000 * 1024


def test_a_group_of_version_1_counts_anonymous_and_shared_memory_against_the_least_limit_above_it(machine, monkeypatch):
    statistics = "cache 900\nrss 5\ntotal_cache 900\ntotal_rss 3000\ntotal_shmem 400\nhierarchical_memory_limit 10000\n"
    write(machine / "jobs" / "one", memory_stat=statistics)
    mounts = OF_CPUS.format(mount=machine) + OF_VERSION_1.format(root="/", mount=machine)
    assert left(monkeypatch, "5:cpu:/elsewhere\n4:memory:/jobs/one\n0::/\n", mounts) == 10000 - 3400


@pytest.mark.parametrize(
    ("limits", "expected"), [(("max", "9000"), 2000), (("5000", "12000"), 3000), (("max", "max"), 8000 * 1024)]
)
def test_groups_of_version_2_count_by_the_nearest_limit(machine, monkeypatch, limits, expected):
    write(machine / "jobs" / "one", memory_stat="anon 1500\nfile 7\nshmem 500\n", memory_max=limits[0] + "\n")
    write(machine / "jobs", memory_stat="anon 6000\nfile 7\nshmem 1000\n", memory_max=limits[1] + "\n")
    write(machine, memory_stat="anon 1\nshmem 1\n")  # the root of all has no limit
    mounts = OF_VERSION_2.format(root="/", mount=machine)
    assert left(monkeypatch, "0::/jobs/one\n", mounts) == expected


@pytest.mark.parametrize(
    ("high", "limit", "expected"),
    [("3500", "9000", 1500), ("9000", "3500", 1500), ("3500", "max", 1500), ("max", "3500", 1500), ("7", "max", -1993)],
)
def test_memory_beyond_which_the_kernel_slows_a_group_down_is_a_limit(machine, monkeypatch, high, limit, expected):
    write(machine / "one", memory_stat="anon 1500\nshmem 500\n", memory_max=f"{limit}\n", memory_high=f"{high}\n")
    assert left(monkeypatch, "0::/one\n", OF_VERSION_2.format(root="/", mount=machine)) == expected


def test_a_container_sees_its_own_group_where_all_are_mounted(machine, monkeypatch):
    write(machine, memory_stat="total_rss 100\ntotal_shmem 0\nhierarchical_memory_limit 1000\n")
    mounts = OF_VERSION_1.format(root="/docker/abc", mount=machine)
    assert left(monkeypatch, "4:memory:/docker/abc\n", mounts) == 900


def test_spaces_in_the_place_of_a_group_are_read(machine, monkeypatch):
    mount = machine / "my groups"
    write(mount / "one", memory_stat="anon 1500\nshmem 500\n", memory_max="5000\n")
    mounts = OF_VERSION_2.format(root="/all\\040of\\040them", mount=str(mount).replace(" ", "\\040"))
    assert left(monkeypatch, "0::/all of them/one\n", mounts) == 3000


def test_a_machine_that_does_not_say_so_is_an_error(machine, monkeypatch):
    room.MACHINE.write_text("MemTotal:       16000 kB\n")
    with pytest.raises(OSError, match="meminfo has no line MemAvailable:"):
        left(monkeypatch, "", "")


def test_files_that_say_something_else_say_nothing(machine, monkeypatch):
    write(machine, memory_stat="rubbish\n", memory_max="many\n")
    assert left(monkeypatch, "0::/\n", OF_VERSION_2.format(root="/", mount=machine)) == 8000 * 1024
