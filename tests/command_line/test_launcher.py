"""`python -m brevact run`: the environment of a program, its arguments and its exit status."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from brevact.command_line.launcher import ALLOCATORS, environment_of, library_of
from brevact.command_line.main import main
from tests.forks import Done, Forks, forks

linux = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
SCRIPT = "import os, sys; print(sys.argv[1:], os.environ.get('LD_PRELOAD', '')); sys.exit(int(sys.argv[1]))"


def launched(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "brevact", "run", *arguments], capture_output=True, text=True)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture(scope="module")
def process() -> Iterator[Forks]:
    with forks("import runpy, sys, brevact.command_line.main") as process:
        yield process


def forked(process: Forks, *arguments: str) -> Done:
    argv = ["brevact", "run", *arguments]
    return process.run(f"sys.argv = {argv}; runpy.run_module('brevact', run_name='__main__', alter_sys=True)")


@linux
def test_a_program_gets_its_arguments_and_gives_its_exit_status(process, script):
    done = forked(process, "--allocator", "none", script, "7", "--flag", "-m")
    assert (done.returncode, done.stdout) == (7, "['7', '--flag', '-m'] \n")


@linux
def test_a_module_runs_as_behind_m(process):
    done = forked(process, "--allocator", "none", "-m", "json.tool", "--help")
    assert done.returncode == 0 and "json.tool" in done.stdout


@linux
def test_two_dashes_may_stand_before_the_program(process, script):
    assert forked(process, "--allocator", "none", "--", script, "0", "--").stdout == "['0', '--'] \n"
    assert "PROGRAM: got none" in forked(process, "--allocator", "none", "--").stderr


@linux
def test_a_path_that_ld_preload_does_not_take_is_refused(tmp_path):
    library = tmp_path / "lib with spaces.so"
    library.touch()
    with pytest.raises(ValueError, match=r"--allocator .* has a space or a colon.*copy the file"):
        environment_of(str(library), {})


@linux
def test_a_signal_ends_the_program(process, tmp_path):
    path = tmp_path / "program.py"
    path.write_text("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert forked(process, "--allocator", "none", str(path)).returncode == -signal.SIGTERM


@linux
def test_a_library_is_loaded_before_others(script, tmp_path):
    library = tmp_path / "libother.so"
    library.touch()
    assert environment_of(str(library), {})["LD_PRELOAD"] == str(library)
    assert environment_of(str(library), {"LD_PRELOAD": "before.so"})["LD_PRELOAD"] == f"{library} before.so"
    assert environment_of("none", {"THP_MEM_ALLOC_ENABLE": "0"}) == {"THP_MEM_ALLOC_ENABLE": "0", "LD_PRELOAD": ""}
    assert environment_of("none", {"LD_PRELOAD": "before.so"})["LD_PRELOAD"] == "before.so"


RESTARTED = """
import os, sys
from brevact.command_line import launcher
launcher.library_of = lambda name: os.environ["FOUND"] or None
print(len(sys.argv), launcher.allocator_in_use(), flush=True)
launcher.restart_with_mimalloc()
print("trains", sys.argv[1:], sys.flags.optimize)
"""


@pytest.mark.exhaustive
@linux
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


@pytest.mark.exhaustive
@linux
@pytest.mark.parametrize("name", ALLOCATORS)
def test_an_allocator_that_is_here_runs_programs(name, script):
    if library_of(name) is None:
        assert "found no shared library" in launched("--allocator", name, script, "0").stderr
        return
    done = launched("--allocator", name, script, "0")
    assert done.returncode == 0 and ALLOCATORS[name] in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PROGRAM: got none"),
        (["missing.py"], "PROGRAM missing.py: no such file"),
        (["--allocator", "nothing", __file__], "--allocator nothing: found no shared library"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments, message, capsys):
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err
