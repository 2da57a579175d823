"""The memory that is left to this process: by the limit of its container (a control group of Linux), or the machine's.

Both versions of control groups are read, at each question: limits change while a process runs. Memory that the kernel
holds as a cache of files is counted as left, since it gives that up first.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

MACHINE = Path("/proc/meminfo")

_ESCAPED = re.compile(r"\\([0-7]{3})")  # how mountinfo writes spaces, tabs, line breaks and backslashes


def memory_left() -> int:
    """Return the bytes that this process and its neighbours of the same limit may still take.

    Raises:
        OSError: nothing says so: not Linux, or no /proc.
    """
    try:
        available = _number(MACHINE.read_text("ascii"), "MemAvailable:") << 10
    except ValueError as error:
        raise OSError(f"{MACHINE} has no line {error}") from None
    return min([available, *(left for group in _groups() if (left := _left_to(group)) is not None)])


@functools.cache
def _groups() -> tuple[Path, ...]:
    """Return the folders of the control groups that limit the memory of this process, the innermost one first."""
    try:
        return groups_of(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    except (OSError, ValueError):
        return ()


def groups_of(memberships: str, mounts: str) -> tuple[Path, ...]:
    """Return the folders of the control groups that limit the memory of a process, the innermost one first.

    Args:
        memberships: text of its /proc/PID/cgroup, one `hierarchy:controllers:path` a line.
        mounts: text of its /proc/PID/mountinfo.
    """
    of_version: dict[str, str] = {}  # path in the hierarchy of version 1 or 2
    for line in memberships.splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or (number == "0" and not controllers):
            of_version["cgroup" if controllers else "cgroup2"] = path
    found: list[Path] = []
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind not in of_version or (kind == "cgroup" and "memory" not in options.split(" ")[-1].split(",")):
            continue
        root, mounted = (_ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), path) for path in before.split(" ")[3:5])
        group = Path(of_version[kind])
        inside = group.relative_to(root) if group.is_relative_to(root) else Path()  # of a container that hides the rest
        folder = Path(mounted) / inside
        found += [each for each in (folder, *folder.parents) if each.is_relative_to(mounted)]
    return tuple(found)


def _left_to(group: Path) -> int | None:
    """Return the bytes that a group may still take, or None where it has no limit."""
    try:
        statistics = (group / "memory.stat").read_text("ascii")
        if "hierarchical_memory_limit" in statistics:  # version 1
            taken = _number(statistics, "total_rss") + _number(statistics, "total_shmem")
            return _number(statistics, "hierarchical_memory_limit") - taken
        limits = [limit for name in ("memory.max", "memory.high") if (limit := _limit(group / name)) is not None]
        return min(limits) - _number(statistics, "anon") - _number(statistics, "shmem") if limits else None
    except (OSError, ValueError):
        return None


def _limit(file: Path) -> int | None:
    """Return the number of a file of version 2, or None where it says "max" or is not there, as in old kernels."""
    try:
        text = file.read_text("ascii").strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _number(lines: str, name: str) -> int:
    """Return the number behind a name at the start of a line; ValueError without one."""
    for line in lines.splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise ValueError(name)
