"""A process that imports once, and forks for each piece of code that is to run by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

#: Runs the imports, then a fork for each line, whose output goes to files.
_CODE = """
import json, os, sys, tempfile
exec(sys.argv[1])
for line in sys.stdin:
    files = [tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")]
    if not (child := os.fork()):
        for target, file in enumerate(files, 1):
            os.dup2(file.fileno(), target)
        exec(json.loads(line))
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)  # the end of an interpreter that has imported torch takes a second
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = [file.seek(0) or file.read() for file in files]
    print(json.dumps([status, *texts]), flush=True)
os._exit(0)
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Forks:
    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def run(self, code: str) -> Done:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(code), file=self._process.stdin, flush=True)
        return Done(*json.loads(self._process.stdout.readline()))


@contextmanager
def forks(imports: str, environment: Mapping[str, str] = os.environ) -> Iterator[Forks]:
    """Start a process that runs ``imports``, which may start no thread, with these variables; and end it."""
    command = [sys.executable, "-c", _CODE, imports]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        yield Forks(process)
        assert process.stdin is not None
        process.stdin.close()
