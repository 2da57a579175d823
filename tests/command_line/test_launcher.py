"""Programs that restart with an allocator."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

RESTARTED = """
import os, sys
from recipes import command_line
command_line.mimalloc = lambda: os.environ["FOUND"] or None
print(len(sys.argv), command_line.allocator_in_use(), flush=True)
command_line.restart_with_mimalloc()
print("trains", sys.argv[1:], sys.flags.optimize)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
def test_a_program_restarts_itself_with_mimalloc_once_where_it_is_there_and_nobody_has_decided(tmp_path):
    library = tmp_path / "libmimalloc.so"  # any library of this name stands for it
    shutil.copy(next(line.split()[-1] for line in open("/proc/self/maps") if "libm.so" in line), library)
    clean = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "GLIBC_TUNABLES")}

    def run(found: str, **environment: str) -> list[str]:
        command = [sys.executable, "-O", "-c", RESTARTED, "--flag", "a b"]
        return subprocess.run(
            command, env={**clean, "FOUND": found, **environment}, capture_output=True, text=True
        ).stdout.splitlines()

    trains = "trains ['--flag', 'a b'] 1"
    assert run(str(library)) == ["3 ", "3 mimalloc", trains]
    assert run("") == ["3 ", trains]
    assert run(str(library), LD_PRELOAD="") == ["3 ", trains]
    assert run(str(library), MALLOC_TRIM_THRESHOLD_="65536") == ["3 ", trains]
